"""A run of real processes whose machines are borrowed: half of the agents come and go on a schedule.

    python -P tests/chaos/borrowed.py [--minutes 10] [--agents 8] [--seed 1]

`headway up` runs half of the agents in two regions. The others, each with its engine, are started and ended by this
script: present and away for PERIOD_S in turn, told to leave by `headway drain --within`, or killed as a machine that
vanishes. At the end the run is drained and audited. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from conftest import CONFIG, HEADWAY, RUN_S_MAX, Run

from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.bus.server import free_port
from headway.deploy.local import with_bus
from headway.schemas.messages import Rollout
from headway.trainer.audit import audit

PERIOD_S = 60.0
WITHIN_S = 12.0
EXIT_S_MAX = 20.0
"""From the command to drain until the agent is gone, on a busy machine."""
VANISHES = 0.3
POLL_S = 0.5
STEPS = 1_000_000
SETTINGS = {
    "run.steps": STEPS,
    "agent.session_log": True,
    "agent.tool_latency_ms": 300.0,
    "agent.max_sessions": 6,  # so that no agent takes all there is
    "dispatch.max_attempts": 8,
}


@dataclass(slots=True)
class Machine:
    """An agent and its engine, as processes of this script."""

    name: str
    region: str
    run: Run
    rng: random.Random
    turn_s: float
    """When it comes or goes next."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    """That drains took."""

    def come(self, env: dict[str, str]) -> None:
        """With the credentials of an agent of `headway up`."""
        port = free_port()
        own = {"HEADWAY_INSTANCE": self.name, "HEADWAY_REGION": self.region}
        env = {**env, **own, "HEADWAY_ENGINE_URL": f"http://127.0.0.1:{port}"}
        folder = self.run.folder
        files = ["--config", str(folder.config_file), "--run-dir", str(folder.path)]
        self._start("engine", ["engine", "--port", str(port), "--name", f"{self.name}-engine", *files], env)
        self._start("agent", ["agent", *files], env)

    def _start(self, kind: str, arguments: list[str], env: dict[str, str]) -> None:
        with (self.run.folder.logs / f"{self.name}-{kind}.log").open("ab") as log:
            self.processes[kind] = subprocess.Popen(
                [*HEADWAY, *arguments], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def go(self) -> None:
        agent, engine = self.processes["agent"], self.processes["engine"]
        if agent.poll() is not None:
            self.left[f"ended by itself with {agent.returncode}"] += 1
        elif self.rng.random() < VANISHES:
            self.left["vanished"] += 1
        else:
            self._drain(agent)
        self.end()
        assert engine.returncode is not None

    def _drain(self, agent: subprocess.Popen[bytes]) -> None:
        began_s = time.monotonic()
        command = [*HEADWAY, "drain", str(self.run.folder.path), "agent", self.name, "--within", f"{WITHIN_S:g}s"]
        told = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=RUN_S_MAX)
        try:
            code = agent.wait(EXIT_S_MAX)
        except subprocess.TimeoutExpired:
            self.left["did not end in time"] += 1
            return
        self.seconds.append(time.monotonic() - began_s)
        self.left["drained" if (told.returncode, code) == (0, 0) else f"drain {told.returncode}, end {code}"] += 1

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(10)
        self.processes.clear()


def environment_of(run: Run) -> dict[str, str]:
    """What `headway up` gave to one of its agents."""
    pid = run.pids()["east-agent-0"]
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def come_and_go(run: Run, machines: list[Machine], minutes: float, began_s: float) -> None:
    env = environment_of(run)
    while (now_s := time.monotonic() - began_s) < minutes * 60:
        assert run.up is not None
        if run.up.poll() is not None:
            raise SystemExit(f"the run ended by itself with {run.up.returncode}:\n{run.output[-3000:]}")
        for machine in machines:
            if now_s >= machine.turn_s:
                machine.turn_s += PERIOD_S
                if machine.processes:
                    machine.go()
                else:
                    machine.come(env)
        time.sleep(POLL_S)


async def inspect(bus: Bus) -> tuple[Any, list[Rollout]]:
    return await audit(bus), [await bus.open(Rollout, stored) async for stored in read_all(bus, "ROLLOUTS")]


def borrowed(folder: Path, minutes: float, agents: int, seed: int) -> dict[str, Any]:
    """Run it; the figures."""
    source, place = folder / "seed", folder / "run"
    for made in (source, place):
        made.mkdir()
    regions = f"[regions.east]\nagents = {agents - agents // 2 - agents // 4}\n"
    regions += f"[regions.west]\nagents = {agents // 4}\n" if agents >= 4 else ""
    (source / "given.toml").write_text(CONFIG + regions)
    files = ["--config", str(source / "given.toml"), "--run-dir", str(source)]
    for command in (["tasks", "build", "expr"], ["midtrain"]):
        subprocess.run([*HEADWAY, *command, *files], check=True, timeout=RUN_S_MAX, stdout=subprocess.DEVNULL)
    (source / "tasks").rename(place / "tasks")
    run, rng = Run(place, {**SETTINGS, "model.base": str(source / "base")}, {}, "", regions), random.Random(seed)
    where = ["east", "west"] if agents >= 4 else ["east"]
    machines = [
        Machine(f"borrowed-{n}", where[n % len(where)], run, rng, PERIOD_S * n / (agents // 2))
        for n in range(agents // 2)
    ]
    run.start()
    try:
        run.until_step(1)
        come_and_go(run, machines, minutes, time.monotonic())
        for machine in machines:
            if machine.processes:
                machine.go()
        code = run.signal(signal.SIGTERM)
    finally:
        for machine in machines:
            machine.end()
        run.abandon()
    report, rollouts = asyncio.run(with_bus(run.folder.config(), run.folder, inspect))
    left = sum((machine.left for machine in machines), Counter[str]())
    done = [r for r in rollouts if r.outcome == "ok"]
    return {
        "minutes": minutes,
        "agents": agents,
        "left": dict(left),
        "drain_s_max": round(max((s for machine in machines for s in machine.seconds), default=0.0), 1),
        "versions": report.versions,
        "trained": report.trained,
        "dropped": report.dropped,
        "lost": report.lost,
        "trained_twice": report.trained_twice,
        "duplicates": report.duplicates,
        "violations": report.violations,
        "outcomes": dict(Counter(r.outcome for r in rollouts)),
        "finished_by_borrowed": sum(r.agent.startswith("borrowed") for r in done),
        "finished_after_another_began": sum(r.delivery > 1 for r in done),
        "exit_code": code,
    }


def is_clean(figures: dict[str, Any]) -> bool:
    odd = set(figures["left"]) - {"drained", "vanished"}
    broken = figures["violations"] or figures["lost"] or figures["trained_twice"] or figures["exit_code"] or odd
    return bool(figures["finished_by_borrowed"]) and not broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--agents", type=int, default=8, help="half of them borrowed")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    with tempfile.TemporaryDirectory(prefix="headway-borrowed-") as name:
        figures = borrowed(Path(name), args.minutes, args.agents, args.seed)
    print(json.dumps({"name": "borrowed", "clean": is_clean(figures), "figures": figures}))
    return 0 if is_clean(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
