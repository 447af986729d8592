"""Borrowed machines: eight agents with the real services, four of which come and go; what is trained on, what is lost.

    PYTHONPATH=tests/sim python -P -m simulator.borrowed [--hours 10] [--seed 1]

A region is one machine: an agent with its engine and sandbox. The odd ones are borrowed for PRESENT_S and away for
AWAY_S, each at its own time of the hour; three times of four they are told to leave (SIGTERM), else they vanish. How
long a session gets is a function of its task, so that what became of long ones does not depend on who survives.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from headway.bus import reader
from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.rollout_agent import attempts, head
from headway.rollout_agent import weights as agent_weights
from headway.schemas import expr_protocol as p
from headway.schemas.config import Config
from headway.schemas.messages import Rollout
from headway.schemas.vocab import NEWLINE
from headway.trainer import dispatcher
from headway.trainer import service as trainer_service
from headway.trainer.audit import Report
from simulator import engines, loop, world
from simulator.client import Client
from simulator.models import installed
from simulator.plan import RUN, Plan
from simulator.server import Rates
from simulator.world import Process, World, shared_folder

REGIONS = tuple(f"r{number}" for number in range(8))
BORROWED = REGIONS[1::2]
PRESENT_S, AWAY_S = 20 * 60.0, 10 * 60.0
GONE_S = 60.0
"""After a request to leave: then engine and sandbox are gone, too."""
VANISHES = 0.25
TURNS_MAX = 40
SUBMITS = 0.08
"""Of a turn: sessions have 12 turns on average, one in thirty the most."""
TURN_S, STEP_S = 20.0, 45.0
LENGTHS = (5, 10, 20, 40)
LOOK_S = 5.0
ACK_WAIT_S = 30.0
SLOW = (
    (attempts, "POLL_S", 2.0),
    (attempts, "FETCH_S", 10.0),
    (head, "POLL_S", 10.0),
    (agent_weights, "HEALTH_EVERY_S", 30.0),
    (dispatcher, "POLL_S", 2.0),
    (trainer_service, "WAIT_S", 10.0),
    (world, "ACK_WAIT_S", ACK_WAIT_S),
    (loop, "MOST_CALLBACKS", 100_000_000),
)
"""Waits of services that would be polling for most of ten hours, and the bound on what a short run does."""


def plan(seed: int) -> Plan:
    config = Config.model_validate(
        {
            "run": {"name": RUN, "steps": 1_000_000, "seed": seed},
            "grpo": {"groups_per_step": 4, "samples_per_group": 4, "min_graded": 3, "retain_steps": 2},
            "staleness": {"max_lag": 4, "swap_slack": 1},
            "dispatch": {"ack_wait_s": ACK_WAIT_S, "max_attempts": 6, "max_in_flight": 64},
            "agent": {
                "max_sessions": 4,
                "max_turns": TURNS_MAX,
                "max_session_tokens": 1024,
                "turn_timeout_s": 120.0,
                "session_timeout_s": 7200.0,
                "rollout_timeout_s": 9000.0,
                "session_log": True,
            },
            "model": {"max_position_embeddings": 1024},
            "eval": {"at": []},
            "regions": {region: {"engine_urls": [f"http://127.0.0.1:{n}"]} for n, region in enumerate(REGIONS, 1)},
        }
    )
    return Plan(
        config=config, rates=Rates(), faults=(), compute_s=STEP_S, turn_s=TURN_S, skew=False, forget_ids=False,
        lost_put_reply=0.0, described="borrowed",
    )  # fmt: skip


def turns_of(sampling_seed: int) -> int:
    """How many turns the session of a task has, whoever runs it."""
    draws = random.Random(f"turns {sampling_seed}")
    return next((turn for turn in range(1, TURNS_MAX) if draws.random() < SUBMITS), TURNS_MAX)


FIRST_TOKENS, TURN_TOKENS = len(p.PROMPT) + 1, 2 + len(p.observation("pass"))


class Borrowed(World):
    """A run of some hours, at whose end everyone is asked to stop."""

    def __init__(self, seed: int, hours: float, folder: Path, shared: Path) -> None:
        super().__init__(seed, plan(seed), folder, shared)
        self.end_s = hours * 3600
        self.left: Counter[str] = Counter()
        self.present_s: Counter[str] = Counter()
        self.rollouts: list[Rollout] = []
        self.turns_sampled = 0

    def line(self, place: int, sampling: dict[str, Any]) -> list[int]:
        """In the place of `engines._line`."""
        self.turns_sampled += 1
        turn = 1 + (place - FIRST_TOKENS) // TURN_TOKENS
        return [ord("s" if turn >= turns_of(sampling["sampling_seed"]) else "t"), NEWLINE]

    async def _main(self) -> Report:
        for region in REGIONS:
            for kind in ("engine", "sandbox", "agent"):
                self._add(kind, f"{region}-{kind}", region)
        self._add("trainer", "trainer", "hub")
        self._add("dispatcher", "dispatcher", "hub")
        for process in list(self.processes.values()):
            self.start(process)
        for number, region in enumerate(BORROWED):
            self.loop.at(PRESENT_S * (number + 1) / len(BORROWED), self._leave, region)
        while self.loop.now < self.end_s:
            self._check()
            for region in REGIONS:
                self.present_s[region] += LOOK_S * (not self.processes[f"{region}-agent"].down)
            await asyncio.sleep(LOOK_S)
        await self._drain_all()
        self._check()
        report = await self._audit()
        assert report.violations == [], report.violations
        assert (report.lost, report.trained_twice) == (0, 0), report
        return report

    def _machine(self, region: str) -> list[Process]:
        return [self.processes[f"{region}-{kind}"] for kind in ("agent", "engine", "sandbox")]

    def _leave(self, region: str) -> None:
        agent, *others = self._machine(region)
        vanishes = self.rng.random() < VANISHES
        self.left["vanished" if vanishes else "drained"] += 1
        agent.down = True
        if vanishes:
            for process in (agent, *others):
                self._take_away(process)
        else:
            self.sigterm(agent)
            for process in others:
                self.loop.after(GONE_S, self._take_away, process)
        self.loop.after(AWAY_S, self._come, region)

    @staticmethod
    def _take_away(process: Process) -> None:
        process.down = True
        if process.life is not None:
            process.life.die()

    def _come(self, region: str) -> None:
        for process in reversed(self._machine(region)):
            process.down = False
            self.start(process)
        self.loop.after(PRESENT_S, self._leave, region)

    async def _read_audit(self) -> Report:
        bus = Bus(Client(self.server), RUN, self.store)  # type: ignore[arg-type]
        self.rollouts = [await bus.open(Rollout, stored) async for stored in read_all(bus, "ROLLOUTS")]
        return await super()._read_audit()


@contextlib.contextmanager
def slowly() -> Iterator[None]:
    """Services that wait long, and the places of eight machines."""
    urls = {region: f"http://127.0.0.1:{number}" for number, region in enumerate(REGIONS, 1)}
    with contextlib.ExitStack() as stack:
        for module, name, value in SLOW:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(world, "ENGINE_URLS", urls))
        stack.enter_context(mock.patch.object(world, "CALM_S", 1e9))
        stack.enter_context(mock.patch.dict(reader.follow.__kwdefaults__, poll_s=2.0))
        yield


def figures(run: Borrowed, report: Report, hours: float) -> dict[str, Any]:
    """What became of the tasks that could have ended, by length and by region."""
    oracle, first = run.oracle, {}
    for rollout in run.rollouts:
        if rollout.outcome == "ok":
            first.setdefault(rollout.rollout_id, rollout)
    ended = oracle.trained | oracle.dropped.keys()
    by_length: dict[int, Counter[str]] = {bound: Counter() for bound in LENGTHS}
    for rollout_id in ended:
        turns = turns_of(oracle.issued[rollout_id].sampling_seed)
        by_length[next(bound for bound in LENGTHS if turns <= bound)][fate(oracle, rollout_id)] += 1
    by_region: dict[str, Counter[str]] = {region: Counter() for region in REGIONS}
    for rollout_id in ended & first.keys():
        by_region[first[rollout_id].region][fate(oracle, rollout_id)] += 1
    resumed = [r for r in first.values() if r.delivery > 1]
    return {
        "hours": hours,
        "versions": report.versions,
        "left": dict(run.left),
        "issued": report.issued,
        "trained": report.trained,
        "dropped": report.dropped,
        "pending": report.pending,
        "ended_after_more_than_one_agent": len(resumed),
        "turns_sampled": run.turns_sampled,
        "turns_in_rollouts": sum(r.trajectory.turns for r in first.values() if r.trajectory is not None),
        "not_trained_by_turns": {str(bound): share(found) for bound, found in by_length.items()},
        "dropped_by_turns": {
            str(bound): {why: n for why, n in sorted(found.items()) if why != "trained"}
            for bound, found in by_length.items()
        },
        "ended_by_turns": {str(bound): found.total() for bound, found in by_length.items()},
        "not_trained_by_region": {region: share(found) for region, found in by_region.items()},
        "trained_per_hour_present": {
            region: round(found["trained"] / run.present_s[region] * 3600, 1) for region, found in by_region.items()
        },
    }


def fate(oracle: Any, rollout_id: str) -> str:
    return "trained" if rollout_id in oracle.trained else str(oracle.dropped[rollout_id])


def share(fates: Counter[str]) -> float:
    return round(1 - fates["trained"] / max(1, fates.total()), 4)


def simulate(hours: float, seed: int, shared: Path) -> dict[str, Any]:
    """Raises AssertionError naming the promise that broke."""
    folder = shared / f"borrowed-{seed}"
    folder.mkdir()
    for name in ("tasks", "base"):
        (folder / name).symlink_to(shared / name)
    with slowly():
        run = Borrowed(seed, hours, folder, shared)
        with mock.patch.object(engines, "_line", run.line):
            return figures(run, run.run().report, hours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with installed(), shared_folder() as shared:
        found = simulate(args.hours, args.seed, shared)
    json.dump({"name": "borrowed", "seed": args.seed, "figures": found}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
