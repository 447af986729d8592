"""Questions of size: a fleet of thousands of agents as a discrete-event simulation.

    PYTHONPATH=tests/sim python -P -m simulator.fleet [--agents 2000] [--hours 24] [--max-lag 4] [--seed 1]

What decides is the real code: pacing (`Pacing`), which attempt counts and when a group closes (`Pool`), how old a
token is and what becomes of it (`Staleness.reason`, `span_lags`). What takes time is drawn: turns, steps, fetches.
Nothing travels: messages and bytes are counted, not sent. The last line is JSON.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from headway.schemas.ids import train_rollout_id
from headway.schemas.trajectory import Span
from headway.schemas.version import Version
from headway.trainer.batching import span_lags
from headway.trainer.groups import Decided, Lineage, Pool
from headway.trainer.pacing import Pacing, too_old_share
from headway.trainer.staleness import Staleness
from simulator.tally import Done, Length, Session, Tally, length_class, summary

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A fleet. `night` is the share of its agents that a region keeps at night; region r is r quarter days ahead."""

    regions: int = 4
    agents: int = 2000
    sessions_per_agent: int = 4
    max_in_flight: int = 0
    """0: twice what the fleet holds."""
    groups_per_step: int = 64
    samples_per_group: int = 16
    min_graded: int = 12
    max_lag: int = 4
    swap_slack: int = 1
    stale_share_max: float = 0.05
    drop: bool = False
    turns_max: int = 50
    turns_median: float = 12.0
    turns_sigma: float = 0.9
    alike: float = 0.0
    """The share of the variance of (log) turns that the samples of a group have in common: they try the same task."""
    turn_tokens: int = 300
    turn_s_median: float = 12.0
    turn_s_sigma: float = 0.9
    step_s: float = 120.0
    commit_s: float = 8.0
    sync_s: float = 25.0
    """From the announcement until an agent serves: the region's relay fetches, then its agents."""
    sync_jitter_s: float = 15.0
    night: float = 0.35
    crash_per_hour: float = 0.02
    ack_wait_s: float = 30.0
    delta_bytes: int = 20 << 30
    hours: float = 24.0
    warm_up_hours: float = 1.0
    steps: int = 1_000_000
    seed: int = 1


class Fleet:
    """One simulated span of time."""

    def __init__(self, setting: Setting, drawn: Callable[[random.Random], Length] | None = None) -> None:
        """`drawn`: the length of the next session, if not by the setting."""
        self.at, self.rng, self.tally = setting, random.Random(setting.seed), Tally()
        self._drawn = drawn
        self.pacing = Pacing(
            groups_per_step=setting.groups_per_step,
            samples_per_group=setting.samples_per_group,
            max_lag=setting.max_lag,
            swap_slack=setting.swap_slack,
            steps=setting.steps,
            stale_share_max=setting.stale_share_max,
            max_in_flight=setting.max_in_flight or 2 * setting.agents * setting.sessions_per_agent,
        )
        self.stale = Staleness(max_lag=setting.max_lag, drop=setting.drop)
        self.pool: Pool[Done] = Pool(samples=setting.samples_per_group, min_graded=setting.min_graded)
        self.lineage = Lineage(Version(0, 0))
        self.now = 0.0
        self.end_s = setting.hours * 3600
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._seq = itertools.count(1)
        self.commits = [0.0]
        """When version n was announced."""
        self.groups = self.void = 0
        self.waiting: deque[str] = deque()
        self.running: dict[str, Session] = {}
        self.busy = [0] * setting.regions
        self.training = False
        self.free_since = 0.0

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), act, args))

    @property
    def measured(self) -> bool:
        return self.now >= self.at.warm_up_hours * 3600

    def run(self) -> Tally:
        self._every(20.0, self._schedule)
        self._schedule()
        while self._events and self.now < self.end_s and self.lineage.head.n < self.at.steps:
            self.now, _, act, args = heapq.heappop(self._events)
            act(*args)
        return self.tally

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self.after(seconds, again)

        self.after(seconds, again)

    # The fleet by time of day

    def slots(self, region: int) -> int:
        """Sessions that the region's agents hold now."""
        share = self.at.agents / self.at.regions * self.at.sessions_per_agent
        angle = 2 * math.pi * (self.now / DAY_S + region / self.at.regions)
        low = self.at.night
        return int(share * (low + (1 - low) * (0.5 - 0.5 * math.cos(angle))))

    def _schedule(self) -> None:
        """The dispatcher issues what pacing allows; agents with room lease what waits; leaving ones hand back."""
        while self.pacing.may_issue(
            groups_issued=self.groups,
            n=self.lineage.head.n,
            void_groups=self.void,
            in_flight=len(self.waiting) + len(self.running),
        ):
            ids = [train_rollout_id(self.groups, sample) for sample in range(self.at.samples_per_group)]
            self.waiting.extend(ids)
            self.groups += 1
            self._count("task", len(ids))
        for region in range(self.at.regions):
            if (over := self.busy[region] - self.slots(region)) > 0:
                mine = [s for s in self.running.values() if s.region == region]
                for session in self.rng.sample(mine, min(over, len(mine))):
                    self._abandon(session, "handed_back")
        rooms = [(self.slots(region) - self.busy[region], region) for region in range(self.at.regions)]
        free = [region for room, region in rooms for _ in range(room)]
        self.rng.shuffle(free)
        while self.waiting and free:
            self._start(self.waiting.popleft(), free.pop())

    def _start(self, rollout_id: str, region: int) -> None:
        rng, at = self.rng, self.at
        length = self._drawn(rng) if self._drawn is not None else self._length(rollout_id)
        seconds = length.seconds
        jitter = rng.random() * at.sync_jitter_s
        session = Session(rollout_id, length, region, self.now, self.now + seconds, jitter)
        self.running[rollout_id] = session
        self.busy[region] += 1
        self._count("renewal", int(seconds / (at.ack_wait_s / 3)))
        if rng.random() < 1 - math.exp(-at.crash_per_hour * seconds / 3600):
            self.after(rng.random() * seconds, self._crash, session)
        self.after(seconds, self._finish, session)

    def _length(self, rollout_id: str) -> Length:
        rng, at = self.rng, self.at
        group = random.Random(f"{at.seed} {rollout_id.partition('s')[0]}").gauss(0.0, 1.0)
        mean = math.log(at.turns_median) + at.turns_sigma * math.sqrt(at.alike) * group
        drawn = rng.lognormvariate(mean, at.turns_sigma * math.sqrt(1 - at.alike))
        turns = max(1, min(at.turns_max, round(drawn)))
        seconds = sum(rng.lognormvariate(math.log(at.turn_s_median), at.turn_s_sigma) for _ in range(turns))
        return Length(turns, turns * at.turn_tokens, seconds)

    def _crash(self, session: Session) -> None:
        if self.running.get(session.rollout_id) is session:
            self._abandon(session, "crashed", self.at.ack_wait_s)

    def _abandon(self, session: Session, why: str, delay_s: float = 0.0) -> None:
        """Its task is leased again, and its tokens were for nothing."""
        del self.running[session.rollout_id]
        self.busy[session.region] -= 1
        done = (self.now - session.began_s) / max(session.ends_s - session.began_s, 1e-9)
        self._waste(why, int(done * session.length.tokens))
        self._count("rollout", why == "handed_back")
        self.after(delay_s, self.waiting.append, session.rollout_id)

    def _finish(self, session: Session) -> None:
        if self.running.get(session.rollout_id) is not session:
            return
        del self.running[session.rollout_id]
        self.busy[session.region] -= 1
        self._count("rollout", 1)
        self._count("stamp", 1)
        self._count("ack", 1)
        self.pool.observe(
            Decided(seq=next(self._seq), rollout_id=session.rollout_id, payload=Done(session, self._spans(session)))
        )
        self._train()
        if self.waiting and self.busy[session.region] < self.slots(session.region):
            self._start(self.waiting.popleft(), session.region)

    def _spans(self, session: Session) -> list[Span]:
        """Tokens are sampled evenly between boot and grading, under what the session's agent served at the time."""
        served, length = session.agent_jitter_s + self.at.sync_s, session.length
        began_s, ends_s = session.began_s + length.boot_s, session.ends_s - length.grade_s
        cuts, start, n = list[Span](), 0, max(0, bisect_right(self.commits, began_s - served) - 1)
        total_s = max(ends_s - began_s, 1e-9)
        while start < length.tokens:
            until_s = self.commits[n + 1] + served if n + 1 < len(self.commits) else math.inf
            end = length.tokens
            if until_s < ends_s:
                end = int(length.tokens * max(0.0, until_s - began_s) / total_s)
            if end > start:
                cuts.append(Span(start=start, end=end, version=Version(0, n)))
                start = end
            n += 1
        return cuts

    # The trainer

    def _lags(self, done: Done) -> tuple[int, ...]:
        return span_lags(done.spans, self.lineage.head, self.lineage.is_ancestor)

    def _reason(self, done: Done) -> Any:
        return self.stale.reason(SimpleNamespace(trajectory=done), self.lineage)  # type: ignore[arg-type]

    def _train(self) -> None:
        stuck = self.groups == len(self.pool.settled) + len(self.pool.closed)
        if self.training or (len(self.pool.closed) < self.at.groups_per_step and not stuck):
            return
        batch = self.pool.plan(self.at.groups_per_step, self._reason)
        due = len(batch.void_groups) >= (1 if stuck else self.at.groups_per_step)
        if len(batch.groups) < self.at.groups_per_step and not due:
            return
        if self.measured:
            self.tally.idle_s += self.now - max(self.free_since, self.at.warm_up_hours * 3600)
        for drop in batch.drops:
            group, sample = int(drop.rollout_id[1:8]), int(drop.rollout_id[9:])
            done = self.pool.open[group][sample].payload
            if done is not None:
                self._end(done, drop.reason)
                self._waste(drop.reason, done.session.length.tokens, done.session)
        self.pool.settle([*(group for group, _ in batch.groups), *batch.void_groups])
        self.void += len(batch.void_groups)
        self._count("verdict", sum(1 for _ in batch.rollouts()) + len(batch.drops))
        if len(batch.groups) < self.at.groups_per_step:
            self.free_since = self.now
            self._schedule()
            return
        masked = trained = 0
        for decided in batch.rollouts():
            assert decided.payload is not None
            self._end(decided.payload, "trained")
            old, young = self._count_tokens(decided.payload)
            masked, trained = masked + old, trained + young
        stale, fresh = sum(drop.reason == "stale" for drop in batch.drops), sum(1 for _ in batch.rollouts())
        self.pacing = self.pacing.after(too_old_share((masked, trained), (stale, fresh)))
        self.training = True
        self.after(self.at.step_s + self.at.commit_s, self._commit)

    def _commit(self) -> None:
        self.lineage = self.lineage.advance()
        self.commits.append(self.now)
        self.training, self.free_since = False, self.now
        if self.measured:
            self.tally.steps += 1
        agents = sum(self.slots(r) for r in range(self.at.regions)) // self.at.sessions_per_agent
        self._count("weights", 1)
        self._count("ledger", 1)
        self._count("applied", agents)
        self._schedule()
        self._train()

    # Counting

    def _end(self, done: Done, how: str) -> None:
        if self.measured:
            self.tally.by_length[length_class(done.session), how] += 1
            self.tally.by_region[done.session.region, how] += 1

    def _count_tokens(self, done: Done) -> tuple[int, int]:
        """How many of its tokens are masked, and how many trained."""
        masked = 0
        for span, lag in zip(done.spans, self._lags(done), strict=True):
            size = span.end - span.start
            if lag > self.at.max_lag:
                masked += size
                self._waste("masked", size, done.session)
            elif self.measured:
                self.tally.lag_tokens[lag] += size
                self.tally.trained_tokens += size
                self.tally.tokens_by_length[length_class(done.session), "trained"] += size
        return masked, done.session.length.tokens - masked

    def _waste(self, why: str, tokens: int, ended: Session | None = None) -> None:
        """`ended`: whose they were, if it will not be tried again."""
        if self.measured:
            self.tally.wasted[why] += tokens
            if ended is not None:
                self.tally.tokens_by_length[length_class(ended), why] += tokens

    def _count(self, what: str, times: int) -> None:
        if self.measured:
            self.tally.messages[what] += times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = Setting()
    parser.add_argument("--agents", type=int, default=usual.agents)
    parser.add_argument("--hours", type=float, default=usual.hours)
    parser.add_argument("--max-lag", type=int, default=usual.max_lag)
    parser.add_argument(
        "--alike", type=float, default=usual.alike, help="how alike the lengths within a group are: 0 to 1"
    )
    parser.add_argument("--min-graded", type=int, default=usual.min_graded)
    parser.add_argument("--groups", type=int, default=usual.groups_per_step, help="a step")
    parser.add_argument("--stale-share-max", type=float, default=usual.stale_share_max, help="1: never slower")
    parser.add_argument("--drop", action="store_true", help="stale_policy = drop")
    parser.add_argument("--seed", type=int, default=usual.seed)
    args = parser.parse_args()
    setting = replace(
        usual, agents=args.agents, hours=args.hours, max_lag=args.max_lag, alike=args.alike, min_graded=args.min_graded,
        groups_per_step=args.groups, stale_share_max=args.stale_share_max, drop=args.drop,
        seed=args.seed,
    )  # fmt: skip
    found = summary(setting, Fleet(setting).run())
    print(json.dumps({"name": "fleet", "agents": args.agents, "max_lag": args.max_lag, "figures": found}, indent=1))


if __name__ == "__main__":
    main()
