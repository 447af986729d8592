"""From kill -9 to the first new step, and what a step leaves on the bus: real `headway up` runs of the demo's geometry.

    python -P tests/bench/resume.py [STEPS]

Killed during a run: the trainer, twice; the nats-server; then the whole run, which the same command starts again. The
time ends when `headway up` tells of a step that was committed after the kill, so it holds the wait for rollouts and
one step's work, too. Beside it the time of an undisturbed step. The last line is JSON: name, figures, targets.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headway.bus.connection import Bus
from headway.bus.service import configure_logging
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.schemas.subjects import STREAM_SUFFIXES

HEADWAY = [sys.executable, "-P", "-m", "headway.deploy.cli.main"]
DEMO = Path(__file__).parents[2] / "deploy" / "demo.toml"
SETTINGS: dict[str, Any] = {
    "eval.at": [], "midtrain.pretrain_steps": 0, "midtrain.sft_steps": 150, "tasks.demonstrations": 4000,
}  # fmt: skip
RESUME_S_MAX = 10.0
WAIT_S_MAX = 240.0
POLL_S = 0.01


class Run:
    """`headway up` and what it says."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self._said = folder, folder.with_suffix(".out")
        sets = [f"--set={key}={json.dumps(value)}" for key, value in {**SETTINGS, "run.steps": steps}.items()]
        self._command = [*HEADWAY, "up", "--config", str(DEMO), "--run-dir", str(folder), *sets]
        self.start()

    def start(self) -> None:
        with self._said.open("ab") as out:
            self.up = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)

    def step(self) -> int:
        """The last step that was told of."""
        return max((int(n) for n in re.findall(r"^step +(\d+)/", self._said.read_text(), re.MULTILINE)), default=0)

    def until(self, step: int) -> None:
        end_s = time.monotonic() + WAIT_S_MAX
        while self.step() < step:
            if time.monotonic() > end_s or self.up.poll() not in (None, 0):
                sys.exit(f"no step {step}:\n{self._said.read_text()}")
            time.sleep(POLL_S)

    def pid(self, name: str) -> int:
        """Of the child whose instance, or program, is `name`."""
        for pid in Path(f"/proc/{self.up.pid}/task/{self.up.pid}/children").read_text().split():
            argv, env = (Path(f"/proc/{pid}/{file}").read_text().split("\0") for file in ("cmdline", "environ"))
            if f"HEADWAY_INSTANCE={name}" in env or Path(argv[0]).name == name:
                return int(pid)
        sys.exit(f"no {name} runs")

    def resumed_s(self, name: str) -> float:
        """Seconds from the kill of `name`, of everything where it is "", to the next step."""
        at = self.step()
        began_s = time.monotonic()
        os.kill(self.pid(name) if name else self.up.pid, signal.SIGKILL)
        if not name:
            self.up.wait()
            self.start()
        self.until(at + 1)
        return time.monotonic() - began_s


async def stored(bus: Bus) -> dict[str, int]:
    """Bytes by stream."""
    return {
        suffix: int((await bus.js.stream_info(bus.subjects.stream(suffix))).state.bytes) for suffix in STREAM_SUFFIXES
    }


def main(steps: int) -> None:
    configure_logging()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        run = Run(folder, steps)
        run.until(4)
        began_s, first = time.monotonic(), run.step()
        run.until(first + 3)
        step_s = (time.monotonic() - began_s) / 3
        took: dict[str, list[float]] = {}
        for what in ("trainer", "nats-server", "", "trainer"):
            took.setdefault(what or "run", []).append(run.resumed_s(what))
            run.until(min(run.step() + 1, steps))
        if run.up.wait(WAIT_S_MAX):
            sys.exit(run._said.read_text())
        files = RunFolder(folder)
        bytes_of = asyncio.run(with_bus(files.config(), files, stored))
    figures = {"step_s": round(step_s, 2)}
    figures |= {f"resume_{what.replace('-', '_')}_s": round(statistics.median(s), 2) for what, s in took.items()}
    figures |= {f"{suffix.lower()}_bytes_a_step": round(size / steps) for suffix, size in bytes_of.items()}
    figures["bus_bytes_a_step"] = round(sum(bytes_of.values()) / steps)
    for key, value in figures.items():
        print(f"{key:<28}{value:>12,}")
    slowest = max(max(seconds) for seconds in took.values())
    targets = {"resume_s_max": [round(slowest, 2), "<=", RESUME_S_MAX, slowest <= RESUME_S_MAX]}
    print(json.dumps({"name": "resume", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 24)
