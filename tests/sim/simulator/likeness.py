"""A run that was measured, beside what the fleet's simulation predicts of it.

PYTHONPATH=tests/sim python -P -m simulator.likeness runs/NAME
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.schemas.messages import Event, Rollout
from simulator.fleet import Fleet, Setting


def like(folder: Path) -> None:
    """Predict a run that was measured, from its sessions' and steps' durations, and lay both side by side."""
    place = RunFolder(folder)
    config = place.config()

    async def read(bus: Bus) -> tuple[list[tuple[int, float]], list[dict[str, Any]]]:
        sessions = [await bus.open(Rollout, stored) async for stored in read_all(bus, "ROLLOUTS")]
        events = [
            await bus.open(Event, stored)
            async for stored in read_all(bus, "EVENTS", filter_subject=f"rl.{bus.run}.event.trainer.step")
        ]
        lengths = [
            (r.trajectory.turns, r.timings_ms["total"] / 1e3)
            for r in sessions
            if r.trajectory is not None and r.purpose == "train"
        ]
        return lengths, [event.fields for event in events]

    lengths, steps = asyncio.run(with_bus(config, place, read))
    seconds = [s for _, s in lengths]
    agents = sum(region.agents for region in config.regions.values())
    busy = [step["computed_s"] for step in steps]
    setting = Setting(
        regions=1, agents=agents, sessions_per_agent=config.agent.max_sessions,
        groups_per_step=config.grpo.groups_per_step, samples_per_group=config.grpo.samples_per_group,
        min_graded=config.grpo.min_graded, max_lag=config.staleness.max_lag, swap_slack=config.staleness.swap_slack,
        turns_median=1.0, turns_sigma=0.0, turn_tokens=20, night=1.0, crash_per_hour=0.0, sync_s=0.15,
        sync_jitter_s=0.1, step_s=sum(busy) / len(busy), commit_s=sum(s["published_s"] for s in steps) / len(steps),
        hours=24.0, warm_up_hours=0.0, steps=len(steps),
    )  # fmt: skip
    fleet = Fleet(setting, lambda rng: rng.choice(seconds))
    tally = fleet.run()
    measured: Counter[int] = Counter()
    for step in steps:
        for lag in range(9):
            measured[lag] += int(step.get(f"lag_tokens_{lag}", 0))
    wall = sum(s["waited_s"] + s["computed_s"] + s["published_s"] for s in steps)
    rows = {
        "seconds_per_step": (fleet.now / len(steps), wall / len(steps)),
        "trainer_idle_share": (tally.idle_s / fleet.now, sum(s["waited_s"] for s in steps) / wall),
    }
    for lag in range(config.staleness.max_lag + 1):
        rows[f"tokens_at_lag_{lag}"] = (
            tally.lag_tokens[lag] / max(1, tally.trained_tokens), measured[lag] / max(1, sum(measured.values())),
        )  # fmt: skip
    print(f"{'':<22}{'predicted':>11}{'measured':>11}")
    for name, (predicted, found) in rows.items():
        print(f"{name:<22}{predicted:>11.3f}{found:>11.3f}")
    print(json.dumps({"name": "fleet-like", "figures": {k: [round(a, 4), round(b, 4)] for k, (a, b) in rows.items()}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of a finished run")
    like(parser.parse_args().folder)


if __name__ == "__main__":
    main()
