"""A run that was measured, beside what the fleet's simulation predicts of it.

    PYTHONPATH=tests/sim python -P -m simulator.likeness runs/NAME [--save FILE]
    PYTHONPATH=tests/sim python -P -m simulator.likeness FILE      # what was saved of a run

Taken from the run: the lengths of its sessions, the mean times of its steps, how long tasks took to be leased and
versions to be served. Predicted from them: its pace, how long its trainer waited, how old its tokens were. The first
step, with its cold start, counts on neither side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from bisect import bisect
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.schemas.config import Config
from headway.schemas.messages import Applied, Event, Rollout, Task
from simulator.fleet import Fleet, Length, Setting
from simulator.tally import LENGTHS

SEEDS = range(1, 6)
LAGS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a finished run recorded. `steps`: seconds waited, computed, and stood still for commits, of each step."""

    agents: int
    sessions_per_agent: int
    max_in_flight: int
    groups_per_step: int
    samples_per_group: int
    min_graded: int
    max_lag: int
    swap_slack: int
    lengths: list[Length]
    steps: list[tuple[float, float, float]]
    lag_tokens: list[list[int]]
    serving_s: list[float]
    """From reading of a version to serving it, of each agent and version."""
    issue_s: float
    """From a commit until the tasks that it made room for are leased; medians."""

    def figures(self) -> dict[str, float]:
        """Of all steps but the first."""
        steps = self.steps[1:]
        wall_s = sum(map(sum, steps))
        tokens = [sum(step[lag] for step in self.lag_tokens[1:]) for lag in range(LAGS)]
        return {
            "seconds_per_step": wall_s / len(steps),
            "trainer_idle_share": sum(waited for waited, _, _ in steps) / wall_s,
            **{f"tokens_at_lag_{lag}": tokens[lag] / max(1, sum(tokens)) for lag in range(self.max_lag + 1)},
        }


async def read(bus: Bus, config: Config) -> Measured:
    events, stored_steps = bus.subjects.event("trainer", "step"), read_all(bus, "LEDGER")
    commits = [stored.time_s async for stored in stored_steps if stored.subject.endswith(".step")]
    issued = {(await bus.open(Task, stored)).rollout_id: stored.time_s async for stored in read_all(bus, "TASKS")}
    steps = [await bus.open(Event, stored) async for stored in read_all(bus, "EVENTS", filter_subject=events)]
    applied = read_all(bus, "EVENTS", filter_subject=f"rl.{bus.run}.applied.>")
    serving = [await bus.open(Applied, stored) async for stored in applied]
    lengths, leased_s = list[Length](), list[float]()
    async for stored in read_all(bus, "ROLLOUTS"):
        rollout = await bus.open(Rollout, stored)
        if rollout.trajectory is not None and rollout.purpose == "train":
            lengths.append(length(rollout))
            leased_s.append(stored.time_s - issued[rollout.rollout_id] - lengths[-1].seconds)
    delays_s = [at - commits[bisect(commits, at) - 1] for at in issued.values() if at > commits[0]]
    return Measured(
        agents=sum(region.agents for region in config.regions.values()),
        sessions_per_agent=config.agent.max_sessions,
        max_in_flight=config.dispatch.max_in_flight,
        groups_per_step=config.grpo.groups_per_step,
        samples_per_group=config.grpo.samples_per_group,
        min_graded=config.grpo.min_graded,
        max_lag=config.staleness.max_lag,
        swap_slack=config.staleness.swap_slack,
        lengths=lengths,
        steps=[tuple(float(e.fields[k]) for k in ("waited_s", "computed_s", "published_s")) for e in steps],
        lag_tokens=[[int(e.fields.get(f"lag_tokens_{lag}", 0)) for lag in range(LAGS)] for e in steps],
        serving_s=[a.head_ms / 1e3 for a in serving if a.version.n],
        issue_s=median(delays_s) + median(leased_s),
    )


def length(rollout: Rollout) -> Length:
    assert rollout.trajectory is not None
    boot_s, grade_s, total_s = (round(rollout.timings_ms[part] / 1e3, 3) for part in ("boot", "grade", "total"))
    tokens = int(rollout.trajectory.loss_mask.sum())
    return Length(min(rollout.trajectory.turns, LENGTHS[-1]), tokens, total_s, boot_s, grade_s)


def predict(measured: Measured, seed: int) -> dict[str, float]:
    """The figures that a fleet of such sessions, steps and fetches has."""
    steps = measured.steps[1:]
    setting = Setting(
        regions=1, night=1.0, crash_per_hour=0.0, agents=measured.agents,
        sessions_per_agent=measured.sessions_per_agent, max_in_flight=measured.max_in_flight,
        groups_per_step=measured.groups_per_step, samples_per_group=measured.samples_per_group,
        min_graded=measured.min_graded, max_lag=measured.max_lag, swap_slack=measured.swap_slack,
        step_s=mean(computed for _, computed, _ in steps), commit_s=mean(stood for _, _, stood in steps),
        sync_s=min(measured.serving_s), sync_jitter_s=2 * (mean(measured.serving_s) - min(measured.serving_s)),
        hours=24.0, warm_up_hours=0.0, steps=len(measured.steps), seed=seed,
    )  # fmt: skip

    def drawn(rng: random.Random) -> Length:
        found, late_s = rng.choice(measured.lengths), measured.issue_s
        return found._replace(seconds=found.seconds + late_s, boot_s=found.boot_s + late_s)

    once = Fleet(setting, drawn)
    once.run()
    first_s = once.commits[1]
    fleet = Fleet(replace(setting, warm_up_hours=first_s / 3600), drawn)
    tally = fleet.run()
    wall_s = fleet.now - first_s
    return {
        "seconds_per_step": wall_s / len(steps),
        "trainer_idle_share": tally.idle_s / wall_s,
        **{
            f"tokens_at_lag_{lag}": tally.lag_tokens[lag] / max(1, tally.trained_tokens)
            for lag in range(measured.max_lag + 1)
        },
    }


def beside(measured: Measured) -> dict[str, tuple[float, float]]:
    """(predicted, the median of `SEEDS`; measured) of each figure."""
    predicted = [predict(measured, seed) for seed in SEEDS]
    return {name: (median(p[name] for p in predicted), found) for name, found in measured.figures().items()}


def load(text: str) -> Measured:
    fields = json.loads(text)
    fields["lengths"] = [Length(*length) for length in fields["lengths"]]
    fields["steps"] = [tuple(step) for step in fields["steps"]]
    return Measured(**fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a finished run's folder, or what was saved of one")
    parser.add_argument("--save", type=Path, help="where what was measured goes")
    args = parser.parse_args()
    if args.run.is_dir():
        place = RunFolder(args.run)
        config = place.config()
        measured = asyncio.run(with_bus(config, place, lambda bus: read(bus, config)))
    else:
        measured = load(args.run.read_text())
    if args.save is not None:
        args.save.write_text(json.dumps(asdict(measured)) + "\n")
    rows = beside(measured)
    print(f"{'':<22}{'predicted':>11}{'measured':>11}")
    for name, row in rows.items():
        print(f"{name:<22}" + "".join(f"{value:>11.3f}" for value in row))
    print(json.dumps({"name": "likeness", "figures": {key: [round(v, 4) for v in row] for key, row in rows.items()}}))


if __name__ == "__main__":
    main()
