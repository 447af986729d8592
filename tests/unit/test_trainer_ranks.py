"""Promise: ranks in processes of their own take the steps of one, bit for bit, and publish the same weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway.bus.server import free_port
from headway.schemas.errors import ConfigError, UnavailableError
from headway.trainer.mesh import Layout

PROGRAM = Path(__file__).parent / "faults" / "rank_learns.py"
WAIT_S = 120


def start(
    folder: Path, ranks: int, dtype: str = "bfloat16", how: str = "in_order", patience_s: float = 60
) -> list[subprocess.Popen[str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HEADWAY_RANK_PATIENCE_S": str(patience_s)}
    if ranks > 1:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-P", "-W", "error", PROGRAM, folder, dtype, how]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return [subprocess.Popen(command, env=env | {"RANK": str(r)}, **pipes, text=True) for r in range(ranks)]


def steps_of(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """What rank 0 told of each step."""
    told = [process.communicate(timeout=WAIT_S) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), [err[-2000:] for _, err in told]
    return [json.loads(line) for line in told[0][0].splitlines()]


def bits(steps: list[dict[str, Any]]) -> list[Any]:
    return [{name: step[name] for name in step if name != "shards"} for step in steps]


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "bfloat16"), (3, "fp8")])
def test_several_ranks_have_the_bits_of_one_and_sums_added_at_once_have_others(
    tmp_path: Path, ranks: int, dtype: str
) -> None:
    """Metrics, masters and moments, rollout weights and what is published of them."""
    both = start(tmp_path / "one", 1, dtype), start(tmp_path / "several", ranks, dtype)
    alone, steps = map(steps_of, both)
    assert len(alone) == len({step["root"] for step in alone}) == 3, "the weights stood still"
    assert all(len(step["micro_batches"]) > 4 and step["published"] == step["root"] for step in alone)
    assert bits(steps) == bits(alone)
    assert all(len(step["shards"]) == ranks for step in steps), "each rank put a shard of its own"
    if ranks == 2:  # what data parallelism usually does; else the order would not have to be kept
        usual = steps_of(start(tmp_path / "usual", ranks, dtype, "all_reduce"))
        assert usual[0]["metrics"]["loss"] == alone[0]["metrics"]["loss"]
        assert usual[0]["checkpoint"] != alone[0]["checkpoint"]


def test_a_share_that_cannot_be_computed_fails_the_step_on_all_ranks_and_leaves_them_as_they_were(
    tmp_path: Path,
) -> None:
    steps = steps_of(start(tmp_path, 2, how="poison"))
    assert "rank 1 could not compute its share" in steps[1]["error"]
    assert "a share that cannot be computed" in steps[1]["error"]
    assert steps[1]["unchanged"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stands_still_ends_the_others_in_bounded_time(tmp_path: Path, number: int) -> None:
    patience_s = 12
    first, second = start(tmp_path, 2, how="halt", patience_s=patience_s)
    assert first.stdout is not None
    while first.stdout.readline() != "{}\n":
        assert first.poll() is None
    second.send_signal(number)
    began_s = time.monotonic()
    err = first.communicate("\n", timeout=WAIT_S)[1]
    assert (first.returncode, "rank 0 of 2 has lost another" in err) == (UnavailableError.exit_code, True)
    assert time.monotonic() - began_s < (10 if number == signal.SIGKILL else 2 * patience_s + 10)  # gloo waits twice
    second.kill()
    second.communicate(timeout=WAIT_S)


def test_a_rank_of_another_build_is_refused(tmp_path: Path) -> None:
    first, second = start(tmp_path, 2, how="unlike")
    err = second.communicate(timeout=WAIT_S)[1]
    assert (second.returncode, "build another" in err) == (ConfigError.exit_code, True)
    first.communicate(timeout=WAIT_S)
    assert first.returncode == UnavailableError.exit_code


def test_a_layout_gives_every_tensor_to_one_rank_and_none_nothing() -> None:
    shapes = {"a": (8, 8), "b": (4, 4), "c": (4, 8), "d": (3,), "e": (1,)}
    layout = Layout.of(shapes, 2)
    assert layout.owned == (("a",), ("b", "c", "d", "e"))
    assert sorted(layout.elements(rank) for rank in range(2)) == [52, 64]
    with pytest.raises(ConfigError, match="6 ranks for 5 tensors"):
        Layout.of(shapes, 6)
