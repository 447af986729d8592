"""A trainer of two ranks under torchrun's agent: the run of one, bit for bit, also when a rank is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

STEPS = 6
NOTICED_S_MAX = 15.0


def ranks_of(run: Any) -> dict[int, int]:
    """The pids of the trainer's ranks, by rank."""
    launcher = run.pids().get("trainer")
    found: dict[int, int] = {}
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split() if launcher else []
        for pid in children:
            lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found |= {int(line.removeprefix("RANK=")): int(pid) for line in lines if line.startswith("RANK=")}
    except OSError:  # one has just ended
        return {}
    return found


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(scope="module")
def alone(launch: Any, lockstep: dict[str, Any]) -> Any:
    ended = launch(STEPS, lockstep).end()
    ended.assert_promises(STEPS)
    assert len({step.root for step in ended.steps}) == STEPS, "the weights stood still: nothing would be compared"
    return ended


def essence(ended: Any) -> Any:
    return ended.trace(), [(step.checkpoint, step.metrics, step.micro_batches) for step in ended.steps]


def test_two_ranks_drain_and_one_goes_on_and_the_run_ends_like_that_of_one(
    launch: Any, lockstep: dict[str, Any], alone: Any
) -> None:
    run = launch(STEPS, lockstep | {"trainer.ranks": 2})
    run.until_step(3)
    ranks = ranks_of(run)
    run.signal(signal.SIGTERM)
    assert "did not drain" not in run.output
    assert sorted(ranks) == [0, 1]
    assert all(map(gone, ranks.values()))
    run.command.append("--set=trainer.ranks=1")
    run.start()
    ended = run.end()
    ended.assert_promises(STEPS)
    assert [opened.environment["mesh"] for opened in ended.opens] == ["2", "1"]
    assert essence(ended) == essence(alone)


@pytest.mark.parametrize("victim", [0, 1, "agent"])
def test_when_a_rank_or_their_agent_is_killed_all_end_and_begin_again(
    launch: Any, lockstep: dict[str, Any], alone: Any, victim: int | str
) -> None:
    run = launch(STEPS, lockstep | {"trainer.ranks": 2})
    run.until_step(2)
    run.until(lambda: len(ranks_of(run)) == 2, "two ranks")
    before = ranks_of(run)
    os.kill(run.pids()["trainer"] if victim == "agent" else before[int(victim)], signal.SIGKILL)
    noticed_s = time.monotonic()
    run.until(lambda: all(map(gone, before.values())), "the end of all ranks")
    assert time.monotonic() - noticed_s < NOTICED_S_MAX
    ended = run.end()
    ended.assert_promises(STEPS)
    assert {opened.environment["mesh"] for opened in ended.opens} == {"2"}
    assert len(ended.opens) > 1
    assert essence(ended) == essence(alone)
