"""Whole runs: `headway up` as a process, killed in every way, and what its streams say afterwards.

One small base model and task set serve every run; a run takes about ten seconds on two quiet cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader
from headway.bus.reader import read_all
from headway.bus.server import free_port
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.schemas.ledger import Drops, Open, Step
from headway.schemas.messages import Applied, Rollout
from headway.trainer.audit import Report, audit
from headway.trainer.history import History

RUN_S_MAX = 240.0
WAIT_S_MAX = 120.0
POLL_S = 0.01
FAULTS = Path(__file__).parent / "faults"
HEADWAY = [sys.executable, "-P", "-m", "headway.deploy.cli.main"]
CONFIG = """
[run]
name = "run"
[model]
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
moe_intermediate_size = 64
num_experts = 4
[midtrain]
pretrain_steps = 0
sft_steps = 150
sft_sessions_per_step = 32
threads = 1
[tasks]
demonstrations = 4000
[grpo]
groups_per_step = 4
samples_per_group = 4
min_graded = 2
[dispatch]
ack_wait_s = 3.0
[eval]
at = []
"""
REGIONS = """
[regions.east]
[regions.west]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What the streams of a run say once nothing of it is up."""

    code: int
    output: str
    report: Report
    history: History
    steps: list[Step]
    drops: list[Drops]
    opens: list[Open]
    attempts: list[Rollout]
    applied: list[Applied]
    dead: list[str]

    def ok_attempts(self) -> dict[str, int]:
        """How often each rollout was sampled to its end."""
        found: dict[str, int] = {}
        for attempt in self.attempts:
            if attempt.outcome == "ok":
                found[attempt.rollout_id] = found.get(attempt.rollout_id, 0) + 1
        return found

    def trace(self) -> list[Any]:
        """Everything that lockstep fixes: weight roots, ordered rollout ids, rewards, drops, losses."""
        return [
            (
                str(step.version),
                step.root,
                [(one.rollout_id, one.reward) for one in step.consumed],
                [(drop.rollout_id, drop.reason) for drop in step.drops],
                step.metrics["loss"],
            )
            for step in self.steps
        ] + [[(drop.rollout_id, drop.reason) for drop in record.drops] for record in self.drops]

    def assert_promises(self, steps: int, *, last_served: bool = True) -> None:
        """The run reached its last step and kept P1 to P5 and the live part of P7.

        An agent that died in the last step need not have come back before the run ended: `last_served` False.
        """
        assert self.code == 0, self.output
        report = self.report
        assert report.violations == []
        assert (report.pending, report.lost, report.trained_twice) == (0, 0, 0)
        assert report.issued == report.trained + sum(report.dropped.values())
        assert [step.version.n for step in self.steps] == list(range(1, steps + 1))
        assert report.versions == steps + 1
        assert not last_served or {one.version.n for one in self.applied} >= {steps}, "nobody served the last version"
        for one in self.applied:
            assert one.root == self.history.roots[one.version]
        assert all(step.metrics["lag0_equal_fraction"] == 1.0 for step in self.steps)
        assert sum(step.metrics["lag0_tokens"] for step in self.steps) > 0
        assert self.dead == []
        self._assert_no_stale_token_trained()

    def _assert_no_stale_token_trained(self) -> None:
        by_id = {a.rollout_id: a for a in reversed(self.attempts) if a.outcome == "ok"}
        max_lag = self.history.genesis.config["staleness"]["max_lag"]
        for step in self.steps:
            spans = [span for one in step.consumed for span in by_id[one.rollout_id].trajectory.spans]
            fresh = [s.end - s.start for s in spans if 0 <= step.parent.n - s.version.n <= max_lag]
            assert step.metrics["trained_tokens"] == sum(fresh)


class Run:
    """One run in a folder that outlives every `headway up` of it."""

    def __init__(
        self, folder: Path, settings: dict[str, Any], faults: dict[str, list[str]], points: str, regions: str
    ) -> None:
        self.folder, self.output_file = RunFolder(folder), folder.with_suffix(".out")
        (folder / "given.toml").write_text(CONFIG + regions)
        self.command = [*HEADWAY, "up", "--config", str(folder / "given.toml"), "--run-dir", str(folder)]
        self.command += [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        self.marks = folder.with_suffix(".marks")
        self.marks.mkdir()
        self._env = {
            **os.environ,
            "CHAOS_FAULTS": json.dumps(faults),
            "CHAOS_MARKS": str(self.marks),
            "HEADWAY_FAILPOINTS": points,
        }
        if faults:
            self._env["PYTHONPATH"] = os.pathsep.join([str(FAULTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.up: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """`headway up`."""
        with self.output_file.open("ab") as output:
            self.up = subprocess.Popen(
                self.command, env=self._env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def until(self, true: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + WAIT_S_MAX
        while not true():
            assert self.up is not None
            assert self.up.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < end_s, f"no {what} within {WAIT_S_MAX} s:\n{self.output}"
            time.sleep(POLL_S)

    def until_said(self, pattern: str) -> None:
        self.until(lambda: re.search(pattern, self.output, re.MULTILINE), pattern)

    def until_step(self, n: int) -> None:
        self.until_said(rf"^step +{n}/")

    def pids(self) -> dict[str, int]:
        """The processes that run now, by instance."""
        assert self.up is not None
        found: dict[str, int] = {}
        for pid in Path(f"/proc/{self.up.pid}/task/{self.up.pid}/children").read_text().split():
            try:
                argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                env = Path(f"/proc/{pid}/environ").read_text().split("\0")
            except OSError:  # it has just ended
                continue
            names = [line.removeprefix("HEADWAY_INSTANCE=") for line in env if line.startswith("HEADWAY_INSTANCE=")]
            if "--name" in argv:
                names = [argv[argv.index("--name") + 1]]
            elif argv[0].endswith("nats-server"):
                names = ["nats"]
            found |= dict.fromkeys(names, int(pid))
        return found

    def passed(self, instance: str) -> Counter[str]:
        """How often each fail point was passed, over all lives of the instance."""
        return Counter((self.folder.path / "failpoints" / f"passed.{instance}").read_text().splitlines())

    def struck(self) -> set[str]:
        """The fail points that struck, as they were asked for."""
        found = {path.name for path in (self.folder.path / "failpoints").iterdir()}
        return {name for name in found if not name.startswith("passed.")}

    def kill(self, *names: str) -> None:
        """kill -9 of the processes, as close together as can be."""
        self.until(lambda: set(names) <= self.pids().keys(), f"{names} all up")
        pids = self.pids()
        for name in names:
            os.kill(pids[name], signal.SIGKILL)

    def signal(self, number: int) -> int:
        """Signal `headway up` and wait for its end; the exit code."""
        assert self.up is not None
        self.up.send_signal(number)
        return self.up.wait(RUN_S_MAX)

    def end(self) -> Ended:
        """Wait for the end of `headway up`, then read the run."""
        assert self.up is not None
        return self.read(self.up.wait(RUN_S_MAX))

    def read(self, code: int = 0) -> Ended:
        """What the streams say now; only while nothing is up."""
        return asyncio.run(with_bus(self.folder.config(), self.folder, lambda bus: _read(bus, code, self.output)))

    def log(self, name: str) -> str:
        return (self.folder.logs / f"{name}.log").read_text()

    def abandon(self) -> None:
        """Kill what a failed test left; the kernel kills the children with it."""
        if self.up is not None and self.up.poll() is None:
            self.up.kill()
            self.up.wait(10)


async def _read(bus: Bus, code: int, output: str) -> Ended:
    links = [link async for link in LedgerReader(bus).links()]
    history = History()
    history.extend(links)
    bodies = [link.record.body for link in links]
    events = [stored async for stored in read_all(bus, "EVENTS")]
    kinds = [(bus.subjects.parse(stored.subject)[0], stored) for stored in events]
    return Ended(
        code=code,
        output=output,
        report=await audit(bus),
        history=history,
        steps=[body for body in bodies if isinstance(body, Step)],
        drops=[body for body in bodies if isinstance(body, Drops)],
        opens=[body for body in bodies if isinstance(body, Open)],
        attempts=[await bus.open(Rollout, stored) async for stored in read_all(bus, "ROLLOUTS")],
        applied=[await bus.open(Applied, stored) for kind, stored in kinds if kind == "applied"],
        dead=[stored.subject for kind, stored in kinds if kind == "dead"],
    )


@pytest.fixture(scope="session")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks/ and base/: made once."""
    folder = tmp_path_factory.mktemp("seed")
    (folder / "given.toml").write_text(CONFIG + REGIONS)
    files = ["--config", str(folder / "given.toml"), "--run-dir", str(folder)]
    for command in (["tasks", "build", "expr"], ["midtrain"]):
        subprocess.run([*HEADWAY, *command, *files], check=True, timeout=RUN_S_MAX, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def launch(seed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Run]]:
    """Start a run of `steps` steps; `settings` are dotted keys, `faults` as in faults/sitecustomize.py.

    `points` arms fail points; `regions` is TOML.
    """
    runs: list[Run] = []

    def start(
        steps: int,
        settings: dict[str, Any] | None = None,
        faults: dict[str, list[str]] | None = None,
        points: str = "",
        regions: str = REGIONS,
    ) -> Run:
        folder = tmp_path_factory.mktemp("chaos") / "run"
        folder.mkdir()
        shutil.copytree(seed / "tasks", folder / "tasks")
        relay = {"regions.east.relay_url": f"http://127.0.0.1:{free_port()}"} if regions == REGIONS else {}
        given = {"run.steps": steps, "model.base": str(seed / "base"), **relay, **(settings or {})}
        runs.append(Run(folder, given, faults or {}, points, regions))
        runs[-1].start()
        return runs[-1]

    yield start
    for run in runs:
        run.abandon()


@pytest.fixture(scope="session")
def lockstep() -> dict[str, Any]:
    return {"run.lockstep": True, "staleness.max_lag": 0, "staleness.swap_slack": 0}
