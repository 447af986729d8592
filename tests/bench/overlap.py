"""What asynchrony buys: loss-bearing tokens of committed steps per second, asynchronous against synchronous.

Real `headway up` runs of the demo's geometry (two regions, one engine each, groups of 8 x 8) from one base
model, alternating: synchronous is max_lag 0 and swap_slack 0 (sample a batch, train, swap, again),
asynchronous the demo's max_lag 2 and swap_slack 1. Medians over the repeats, at no tool latency and at 100 ms
a tool call. A rate covers the steps after commit FIRST and up to commit STEPS - TAIL, by the time that the
server stored them in the ledger: start-up is left out, and so is the end, where an asynchronous run trains on
what it sampled ahead and samples no more.

The ideal comes from the synchronous run's own step events: with G = waited (generation, latency, swaps) and
T = computed + published (training) a step, perfect overlap takes max(G, T) instead of G + T, a factor
(G + T) / max(G, T). `async_over_ideal` is the measured factor over that.

What limits it on two cores: the ideal takes generation and training to be separate resources. Here two
engines alone fill both cores, so that a step that overlaps costs at least the sum of the CPU time of
both; with g CPU-seconds of generation a step (2G at most) the factor cannot pass (G + T) / ((g + T) / 2).
Latency is different: it takes no core, so asynchronous sessions hide it in each other and in training.

    python -P tests/bench/overlap.py [STEPS [REPEATS]]
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader
from headway.bus.reader import read_all
from headway.bus.service import configure_logging
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.schemas.ledger import Step
from headway.schemas.messages import Event

HEADWAY = [sys.executable, "-P", "-m", "headway.deploy.cli.main"]
DEMO = Path(__file__).parents[2] / "deploy" / "demo.toml"
FIRST, TAIL = 2, 2
TARGET = 0.8
LATENCIES_MS = (0, 100)
MODES: dict[str, dict[str, Any]] = {
    "sync": {"staleness.max_lag": 0, "staleness.swap_slack": 0},
    "async": {"staleness.max_lag": 2, "staleness.swap_slack": 1},
}
COMMON: dict[str, Any] = {
    "eval.at": [],
    "agent.max_sessions": 64,
    "midtrain.pretrain_steps": 0,
    "midtrain.sft_steps": 150,
    "tasks.demonstrations": 4000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured steps of one run; seconds and tokens are sums, `cpu_s` is of the whole run."""

    tokens: float
    wall_s: float
    waited_s: float
    trained_s: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def ideal(self) -> float:
        return (self.waited_s + self.trained_s) / max(self.waited_s, self.trained_s)


def headway(command: list[str], folder: Path, settings: dict[str, Any]) -> None:
    sets = [f"--set={key}={json.dumps(value)}" for key, value in {**COMMON, **settings}.items()]
    files = ["--config", str(DEMO), "--run-dir", str(folder)]
    done = subprocess.run([*HEADWAY, *command, *files, *sets], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"headway {command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


async def read(bus: Bus, cpu_s: float) -> Measured:
    measured = slice(FIRST, -TAIL)
    steps: dict[int, float] = {}
    async for link in LedgerReader(bus).links():
        if isinstance(link.record.body, Step):
            steps[link.seq] = link.record.body.metrics["trained_tokens"]
    times = [stored.time_s async for stored in read_all(bus, "LEDGER") if stored.seq in steps]
    events = [await bus.open(Event, s) async for s in read_all(bus, "EVENTS") if ".event." in s.subject]
    taken = sorted((e.fields for e in events if e.name == "step"), key=lambda fields: fields["step"])[measured]
    return Measured(
        tokens=sum(list(steps.values())[measured]),
        wall_s=times[-TAIL - 1] - times[FIRST - 1],
        waited_s=sum(float(f["waited_s"]) for f in taken),
        trained_s=sum(float(f["computed_s"]) + float(f["published_s"]) for f in taken),
        cpu_s=cpu_s,
    )


def measure(seed: Path, folder: Path, steps: int, settings: dict[str, Any]) -> Measured:
    shutil.copytree(seed / "tasks", folder / "tasks")
    before = os.times()
    headway(["up"], folder, {"run.steps": steps, "model.base": str(seed / "base"), **settings})
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    run = RunFolder(folder)
    found: Measured = asyncio.run(with_bus(run.config(), run, lambda bus: read(bus, cpu_s)))
    return found


def main(steps: int, repeats: int) -> None:
    configure_logging()
    figures: dict[str, float] = {}
    targets: dict[str, list[Any]] = {}
    print(f"{'':24} tokens/s   s/step  waiting  training  CPU-s a run   ({os.cpu_count()} cores, {steps} steps)")
    with tempfile.TemporaryDirectory() as root:
        seed = Path(root) / "seed"
        headway(["tasks", "build", "expr"], seed, {})
        headway(["midtrain"], seed, {})
        for latency_ms in LATENCIES_MS:
            runs: dict[str, list[Measured]] = {mode: [] for mode in MODES}
            for repeat in range(repeats):
                for mode, settings in MODES.items():
                    folder = Path(root) / f"{mode}-{latency_ms}-{repeat}"
                    one = measure(seed, folder, steps, {**settings, "agent.tool_latency_ms": latency_ms})
                    runs[mode].append(one)
                    n = steps - FIRST - TAIL
                    label = f"{mode:6} {latency_ms:4} ms, run {repeat + 1}"
                    print(
                        f"{label:24} {one.tokens_per_s:8,.0f}  {one.wall_s / n:7.2f}  {one.waited_s / n:7.2f}"
                        f"  {one.trained_s / n:8.2f}  {one.cpu_s:11.1f}",
                        flush=True,
                    )
            rates = {mode: statistics.median(one.tokens_per_s for one in found) for mode, found in runs.items()}
            ideal = statistics.median(one.ideal for one in runs["sync"])
            value = round(rates["async"] / rates["sync"] / ideal, 3)
            print(f"latency {latency_ms} ms: {rates['async'] / rates['sync']:.2f} x, ideal {ideal:.2f} x: {value:.2f}")
            figures |= {f"{mode}_tokens_per_s_latency_{latency_ms}": round(rate, 1) for mode, rate in rates.items()}
            figures[f"ideal_latency_{latency_ms}"] = round(ideal, 3)
            targets[f"async_over_ideal_latency_{latency_ms}"] = [value, ">=", TARGET, value >= TARGET]
    print(json.dumps({"name": "overlap", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main(
        steps=int(sys.argv[1]) if len(sys.argv) > 1 else 14,
        repeats=int(sys.argv[2]) if len(sys.argv) > 2 else 2,
    )
