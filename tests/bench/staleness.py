"""What staleness costs and buys: reward per wall-second and per token at max_lag 0, 1, 2, 4 and 8.

Real `headway up` runs of the demo's geometry from one base model, with 100 ms a tool call. A cell is a (max_lag, seed);
its steps are written to OUT/cells as JSON when it ends, and a cell that is there is not run again, so that a
long measurement can be stopped at any time. Rewards are those of the training rollouts as they were trained on,
so that of step n is of versions n - max_lag to n. `gain` is the mean of the last third of the steps less that of the
first three; per wall-second and per million loss-bearing tokens, both from the commit of the first step to the last.

    python -P tests/bench/staleness.py [--steps 70] [--seeds 1,2,3] [--lags 0,1,2,4,8] [--out FOLDER] [--plot FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from overlap import headway

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader
from headway.bus.reader import read_all
from headway.bus.service import configure_logging
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.schemas.ledger import Step

LATENCY_MS = 100.0
FIRST = 3

Row = dict[str, float]
"""A step: `s` since the first commit, `tokens` trained since, and its mean reward."""


async def read(bus: Bus) -> list[Row]:
    steps: dict[int, dict[str, float]] = {}
    async for link in LedgerReader(bus).links():
        if isinstance(link.record.body, Step):
            steps[link.seq] = link.record.body.metrics
    times = {stored.seq: stored.time_s async for stored in read_all(bus, "LEDGER") if stored.seq in steps}
    rows, tokens = list[Row](), 0.0
    began_s = min(times.values())
    for seq, metrics in steps.items():
        rows.append({"s": times[seq] - began_s, "tokens": tokens, "reward": metrics["reward_mean"]})
        tokens += metrics["trained_tokens"]
    return rows


def run_cell(base: Path, lag: int, seed: int, steps: int) -> list[Row]:
    settings = {
        "run.steps": steps,
        "run.seed": seed,
        "model.base": str(base / "base"),
        "staleness.max_lag": lag,
        "staleness.swap_slack": min(1, lag // 2),  # at max_lag 1 a slack of 1 would leave nothing to issue ahead
        "agent.tool_latency_ms": LATENCY_MS,
    }
    with tempfile.TemporaryDirectory(prefix="headway-staleness-") as name:
        shutil.copytree(base / "tasks", Path(name) / "tasks")
        headway(["up"], Path(name), settings)
        run = RunFolder(Path(name))
        found: list[Row] = asyncio.run(with_bus(run.config(), run, read))
        return found


def figures(rows: Sequence[Row]) -> dict[str, float]:
    rewards = [row["reward"] for row in rows]
    gain = statistics.fmean(rewards[-(len(rewards) // 3) :]) - statistics.fmean(rewards[:FIRST])
    last = rows[-1]
    return {
        "gain": gain,
        "seconds": last["s"],
        "gain_per_1000_s": gain / last["s"] * 1e3,
        "gain_per_million_tokens": gain / last["tokens"] * 1e6,
        "tokens_per_s": last["tokens"] / last["s"],
    }


def plot(cells: dict[int, list[list[Row]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for color, (lag, runs) in enumerate(sorted(cells.items())):
        for number, rows in enumerate(runs):
            smooth = [statistics.fmean(r["reward"] for r in rows[max(0, n - 4) : n + 1]) for n in range(len(rows))]
            label = f"max_lag {lag}" if number == 0 else None
            for axis, key, unit in zip(axes, ("s", "tokens"), (1.0, 1e3), strict=True):
                axis.plot([r[key] / unit for r in rows], smooth, color=f"C{color}", label=label, linewidth=1.2)
    axes[0].set(xlabel="seconds since the first commit", ylabel="reward, mean of five steps")
    axes[1].set(xlabel="thousand loss-bearing tokens")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--lags", type=numbers, default=[0, 1, 2, 4, 8])
    parser.add_argument("--out", type=Path, default=Path("build/staleness"))
    parser.add_argument("--plot", type=Path, help="needs matplotlib")
    args = parser.parse_args()
    configure_logging()
    base, place = args.out / "base", args.out / "cells"
    place.mkdir(parents=True, exist_ok=True)
    if not (base / "base").exists():
        headway(["tasks", "build", "expr"], base.absolute(), {})
        headway(["midtrain"], base.absolute(), {})
    cells: dict[int, list[list[Row]]] = {}
    for seed in args.seeds:
        for lag in args.lags:
            file = place / f"lag{lag}-seed{seed}-steps{args.steps}.json"
            if not file.exists():
                rows = run_cell(base.absolute(), lag, seed, args.steps)
                file.with_suffix(".new").write_text(json.dumps(rows))
                file.with_suffix(".new").rename(file)
            cells.setdefault(lag, []).append(json.loads(file.read_text()))
            print(f"max_lag {lag}, seed {seed}: {figures(cells[lag][-1])}", flush=True)
    found: dict[str, Any] = {}
    for lag, runs in sorted(cells.items()):
        each = [figures(rows) for rows in runs]
        found[f"lag_{lag}"] = {key: round(statistics.median(one[key] for one in each), 4) for key in each[0]}
    if args.plot is not None:
        plot(cells, args.plot)
    print(json.dumps({"name": "staleness", "steps": args.steps, "seeds": len(args.seeds), "figures": found}))


if __name__ == "__main__":
    main()
