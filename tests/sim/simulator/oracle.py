"""What must hold after every message that a stream takes: promises P1 to P5, P8 and P10, judged on the bytes alone.

Written without the code it judges: no History, no Pool, no Staleness.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.schemas.config import Config
from headway.schemas.errors import WireError
from headway.schemas.ids import train_rollout_id
from headway.schemas.ledger import Drops, Fork, Genesis, LedgerEntry, Open, Record, Step
from headway.schemas.manifest import open_manifest
from headway.schemas.messages import Applied, Rollout, Task, WeightsAnnounced
from headway.schemas.subjects import Keys
from headway.schemas.trajectory import Span
from headway.schemas.version import Version
from headway.schemas.wire import open_envelope
from simulator.models import Store
from simulator.server import Stored


class Broken(Exception):
    """A promise does not hold."""


@dataclass(frozen=True, slots=True)
class Attempt:
    seq: int
    outcome: str
    reward: float | None
    spans: tuple[Span, ...]


@dataclass(slots=True)
class Oracle:
    config: Config
    store: Store
    run: str
    violation: str = ""
    digest: Any = field(default_factory=hashlib.sha256)
    events: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    issued: dict[str, Task] = field(default_factory=dict)
    first: dict[str, Attempt] = field(default_factory=dict)
    """Training rollout -> its first terminal attempt in stream order."""
    terminal_seqs: dict[int, str] = field(default_factory=dict)
    sampled: Counter[str] = field(default_factory=Counter)
    trained: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)
    bound: dict[Version, tuple[str, str]] = field(default_factory=dict)
    """Version -> (manifest, root)."""
    bases: dict[Version, Version] = field(default_factory=dict)
    checkpoints: dict[Version, str] = field(default_factory=dict)
    head: Version = field(default_factory=lambda: Version(0, 0))
    term: int = 0
    cursor: int = 0
    trainer_key: bytes = b""
    settled_groups: set[int] = field(default_factory=set)
    void_groups: int = 0
    line_groups: dict[Version, int] = field(default_factory=lambda: {Version(0, 0): 0})
    trained_groups: int = 0
    held_back: float = 0.0
    """Groups that may not be issued ahead, because steps found too much of what they took in too old."""
    drains: Counter[str] = field(default_factory=Counter)

    def on_stored(self, stream: str, seq: int, stored: Stored) -> None:
        """Judge one more message; the first violation is kept and raised."""
        self.events += 1
        self.counts[stream] += 1
        if stream not in ("EVENTS", "STAMPS"):  # these tell times, which are no decisions
            self.digest.update(f"{stream} {seq} {stored.subject}".encode() + stored.body)
        judge: Callable[[int, Stored], None] | None = {
            "TASKS": self._task,
            "ROLLOUTS": self._rollout,
            "LEDGER": self._ledger,
            "WEIGHTS": self._weights,
        }.get(stream)
        try:
            if judge is not None:
                judge(seq, stored)
            elif ".applied." in stored.subject:
                self._applied(stored)
        except Broken as error:
            self.violation = self.violation or f"{error} (at {stream} {seq})"

    def require(self, true: object, promise: str, text: str) -> None:
        if not true:
            raise Broken(f"{promise}: {text}")

    # Streams

    def _task(self, seq: int, stored: Stored) -> None:
        task = open_envelope(Task, stored.headers, stored.body)
        self.require(task.rollout_id not in self.issued, "P2", f"{task.rollout_id} is issued twice")
        self.issued[task.rollout_id] = task
        if task.purpose == "train":
            self.require(task.rollout_id == train_rollout_id(task.group, task.sample), "P3", f"{task.rollout_id}")
            allowed = self._groups_allowed()
            self.require(task.group < allowed, "P8", f"group {task.group} is issued where {allowed} may be")

    def _groups_allowed(self) -> int:
        grpo, staleness = self.config.grpo, self.config.staleness
        widest = (self.head.n + 1 + staleness.max_lag - staleness.swap_slack) * grpo.groups_per_step
        ahead = widest - round(self.held_back)
        most = self.config.run.steps * grpo.groups_per_step
        return min(ahead, most) + self.void_groups + self.trained_groups - self.line_groups[self.head]

    def _rollout(self, seq: int, stored: Stored) -> None:
        try:
            rollout = open_envelope(Rollout, stored.headers, stored.body)
        except WireError as error:
            raise Broken(f"P11: an agent published what cannot be read: {error}") from None
        self.require(rollout.rollout_id in self.issued, "P1", f"{rollout.rollout_id} was never issued")
        if rollout.outcome == "ok":
            self.sampled[rollout.rollout_id] += 1
        if rollout.terminal and rollout.purpose == "train":
            self.terminal_seqs[seq] = rollout.rollout_id
            spans = tuple(rollout.trajectory.spans) if rollout.trajectory is not None else ()
            self.first.setdefault(rollout.rollout_id, Attempt(seq, rollout.outcome, rollout.reward, spans))

    def _ledger(self, seq: int, stored: Stored) -> None:
        entry = open_envelope(LedgerEntry, stored.headers, stored.body)
        record: Record = entry.open(self.trainer_key or None)
        body = record.body
        if isinstance(body, Open):
            self.require(record.term == self.term + 1, "P3", f"term {record.term} opens after {self.term}")
            self.term = record.term
        else:
            self.require(record.term == self.term, "P3", f"a writer of term {record.term} appends in term {self.term}")
        match body:
            case Genesis():
                self.trainer_key = body.trainer_key
                self._bind(Version(0, 0), body.base_manifest, body.base_root)
            case Step():
                self._step(body)
            case Drops():
                self._settle([], body.drops, body)
            case Fork():
                self.require(self._ancestor(body.base), "P3", f"a fork from {body.base}, no ancestor of {self.head}")
                self.bases[body.version] = body.base
                self.line_groups[body.version] = self.line_groups[body.base]
                self._bind(body.version, body.manifest, body.root)
                self.head = body.version

    def _step(self, step: Step) -> None:
        expected = Version(self.head.epoch, self.head.n + 1)
        self.require((step.version, step.parent) == (expected, self.head), "P3", f"{step.version} after {self.head}")
        self._durable(step)
        fresh = sampled = 0
        for one in step.consumed:
            attempt = self.first.get(one.rollout_id)
            self.require(attempt is not None and attempt.outcome == "ok", "P2", f"{one.rollout_id} trained on what?")
            assert attempt is not None
            self.require(attempt.reward == one.reward, "P11", f"{one.rollout_id} trained with reward {one.reward}")
            kept = sum(span.end - span.start for span in attempt.spans if self._lag(span.version) is not None)
            self.require(kept, "P5", f"every token of {one.rollout_id} is too old")
            whole = sum(span.end - span.start for span in attempt.spans)
            if self.config.staleness.stale_policy == "drop":
                self.require(kept == whole, "P5", f"{one.rollout_id} has stale tokens and is trained, not dropped")
            fresh, sampled = fresh + kept, sampled + whole
        found = step.metrics["trained_tokens"]
        self.require(found == fresh, "P5", f"{step.version} trains {found:g} tokens, {fresh} are within max_lag")
        stale = [drop for drop in step.drops if drop.reason == "stale"]
        self._hold_back(fresh / sampled * len(step.consumed) / (len(step.consumed) + len(stale)))
        groups = {int(one.rollout_id[1:8]) for one in step.consumed}
        self.require(len(groups) == self.config.grpo.groups_per_step, "P8", f"a step of {len(groups)} groups")
        self._settle([one.rollout_id for one in step.consumed], step.drops, step)
        self.trained_groups += len(groups)
        self.line_groups[step.version] = self.line_groups[step.parent] + len(groups)
        self._bind(step.version, step.manifest, step.root)
        self.checkpoints[step.version] = step.checkpoint
        self.head = step.version

    def _hold_back(self, fresh_share: float) -> None:
        """A step that finds everything too old takes half a batch off what is issued ahead; one batch always may be."""
        staleness, size = self.config.staleness, self.config.grpo.groups_per_step
        most = (staleness.max_lag - staleness.swap_slack) * size
        excess = 1 - fresh_share - staleness.stale_share_max
        self.held_back = min(max(self.held_back + 0.5 * size * excess, 0.0), most)

    def _settle(self, consumed: list[str], drops: list[Any], record: Step | Drops) -> None:
        seqs = {drop.rollout_id: drop.seq for drop in drops}
        if isinstance(record, Step):
            seqs |= {one.rollout_id: one.seq for one in record.consumed}
        for rollout_id, seq in seqs.items():
            self.require(rollout_id not in self.trained, "P2", f"{rollout_id} is trained and settled again")
            self.require(rollout_id not in self.dropped, "P2", f"{rollout_id} is dropped and settled again")
            attempt = self.first.get(rollout_id)
            where = attempt.seq if attempt else "nowhere"
            self.require(where == seq, "P2", f"{rollout_id} is settled by {seq}, its first terminal attempt is {where}")
        self.require(len(seqs) == len(consumed) + len(drops), "P2", "a record settles a rollout twice")
        self.trained |= set(consumed)
        self.dropped |= {drop.rollout_id: drop.reason for drop in drops}
        samples = self.config.grpo.samples_per_group
        for group in {int(rollout_id[1:8]) for rollout_id in seqs}:
            members = {train_rollout_id(group, sample) for sample in range(samples)}
            self.require(members <= seqs.keys(), "P1", f"group {group} is settled in part")
            self.settled_groups.add(group)
            self.void_groups += not members & set(consumed)
        counters = record.counters
        counted = (counters.trained_rollouts, counters.dropped_rollouts, counters.void_groups)
        self.require(
            counted == (len(self.trained), len(self.dropped), self.void_groups), "P1", f"counters say {counted}"
        )
        self._none_lost(record)

    def _none_lost(self, record: Step | Drops) -> None:
        """P1: whatever lies before the cursor is settled, waits in the pool, or was a duplicate."""
        self.require(record.cursor >= self.cursor, "P1", f"the cursor goes back to {record.cursor}")
        self.require(record.cursor <= self.counts["ROLLOUTS"], "P1", f"the cursor {record.cursor} is past the stream")
        self.cursor, pool = record.cursor, set(record.pool)
        for rollout_id, attempt in self.first.items():
            settled = rollout_id in self.trained or rollout_id in self.dropped
            waits = attempt.seq in pool
            if attempt.seq <= self.cursor:
                self.require(settled != waits, "P1", f"{rollout_id} at {attempt.seq} is lost before the cursor")
            else:
                self.require(not settled and not waits, "P1", f"{rollout_id} is settled ahead of the cursor")
        firsts = {attempt.seq for attempt in self.first.values()}
        self.require(pool <= firsts, "P1", f"the pool holds {sorted(pool - firsts)[:3]}, which decide nothing")

    def _durable(self, step: Step) -> None:
        keys, objects = Keys(self.run), self.store.objects
        self.require(keys.checkpoint(step.checkpoint) in objects, "P6", f"{step.version} has no checkpoint")
        sealed = objects.get(keys.manifest(step.manifest))
        self.require(sealed is not None, "P3", f"{step.version} is committed before its manifest is durable")
        assert sealed is not None
        manifest = open_manifest(sealed, step.manifest, self.trainer_key)
        for shard in manifest.shards:
            self.require(keys.shard(shard.sha256) in objects, "P3", f"{step.version} is committed before its shards")
        self.require((manifest.version, manifest.root) == (step.version, step.root), "P3", "another manifest")

    def _weights(self, seq: int, stored: Stored) -> None:
        said = open_envelope(WeightsAnnounced, stored.headers, stored.body)
        self.require(self.bound.get(said.version) == (said.manifest, said.root), "P3", f"{said.version} is unbound")

    def _applied(self, stored: Stored) -> None:
        said = open_envelope(Applied, stored.headers, stored.body)
        bound = self.bound.get(said.version)
        self.require(bound is not None and bound[1] == said.root, "P4", f"{said.agent} serves {said.version} wrongly")

    # Versions

    def _bind(self, version: Version, manifest: str, root: str) -> None:
        self.require(version not in self.bound, "P3", f"{version} is bound twice")
        self.bound[version] = (manifest, root)

    def _ancestor(self, version: Version) -> bool:
        at = self.head
        while at.epoch > version.epoch:
            first = min(v for v in self.bases if v.epoch == at.epoch)
            at = self.bases[first]
        return at.epoch == version.epoch and version.n <= at.n

    def _lag(self, version: Version) -> int | None:
        """The lag of a token under the head, None when it may not train."""
        lag = self.head.n - version.n
        return lag if self._ancestor(version) and 0 <= lag <= self.config.staleness.max_lag else None

    # The end

    def trace(self) -> list[Any]:
        """What P6 fixes in lockstep mode."""
        return [self.bound, sorted(self.trained), sorted(self.dropped.items()), sorted(self.checkpoints.items())]

    def assert_finished(self) -> None:
        """Every issued training rollout ended, in one state."""
        train = {rollout_id for rollout_id, task in self.issued.items() if task.purpose == "train"}
        open_ones = train - self.trained - self.dropped.keys()
        self.require(not open_ones, "P1", f"{sorted(open_ones)[:3]} never ended")
        self.require(self.head.n >= self.config.run.steps, "P6", f"the run ends at {self.head}")
