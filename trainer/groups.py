"""Which rollouts a step trains on: a function of the order of ROLLOUTS and of the ledger, of nothing else.

Invariants: the first valid terminal attempt in stream order decides a rollout; a group closes when each of
its samples is decided; a settled rollout is never decided again (P2). No clock, no randomness, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headway.schemas.errors import PromiseViolated
from headway.schemas.ids import train_rollout_id
from headway.schemas.ledger import Counters, Drop, DropReason
from headway.schemas.version import Version

TRAIN_ID = re.compile(r"g(\d{7,12})s(\d{3,4})")

T = TypeVar("T")


def parse_train_id(rollout_id: str) -> tuple[int, int] | None:
    """(group, sample) of a training rollout's id, None for any other."""
    match = TRAIN_ID.fullmatch(rollout_id)
    if match is None:
        return None
    group, sample = int(match[1]), int(match[2])
    return (group, sample) if train_rollout_id(group, sample) == rollout_id else None


@dataclass(frozen=True, slots=True)
class Lineage:
    """The line of history that leads to the head: where each earlier epoch was left.

    `forks` are (epoch that was left, last n that still belongs to the line), oldest first.
    """

    head: Version
    forks: tuple[tuple[int, int], ...] = ()

    def is_ancestor(self, version: Version) -> bool:
        if version.epoch == self.head.epoch:
            return version.n <= self.head.n
        bounds = [last for epoch, last in self.forks if epoch >= version.epoch]
        return any(epoch == version.epoch for epoch, _ in self.forks) and version.n <= min(bounds)

    def advance(self) -> Lineage:
        return Lineage(Version(self.head.epoch, self.head.n + 1), self.forks)

    def fork(self, version: Version, base: Version) -> Lineage:
        return Lineage(version, (*self.forks, (base.epoch, base.n)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided(Generic[T]):
    """A rollout's deciding attempt. `payload` is what a step needs of it, None unless graded."""

    seq: int
    rollout_id: str
    payload: T | None
    reason: DropReason | None = None

    def __post_init__(self) -> None:
        if (self.payload is None) == (self.reason is None):
            raise ValueError("an attempt has either something to train on or a reason why not")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[T]):
    """What a step settles: whole groups to train on, in order, and what is dropped with it."""

    groups: tuple[tuple[int, tuple[Decided[T], ...]], ...]
    drops: tuple[Drop, ...]
    void_groups: tuple[int, ...]

    def rollouts(self) -> Iterator[Decided[T]]:
        for _, members in self.groups:
            yield from members


@dataclass(slots=True, kw_only=True)
class Pool(Generic[T]):
    """Attempts seen and not yet settled.

    `stale` says why a graded rollout may not train under the present head, if so. In lockstep order groups
    are taken by number, else in the order in which they closed.
    """

    samples: int
    min_graded: int
    lockstep: bool = False
    cursor: int = 0
    open: dict[int, dict[int, Decided[T]]] = field(default_factory=dict)
    closed: list[int] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)

    def observe(self, decided: Decided[T]) -> bool:
        """Take a terminal attempt in stream order; False when the rollout was decided before."""
        if decided.seq <= self.cursor:
            raise PromiseViolated(f"attempt {decided.seq} arrives after the cursor passed {self.cursor}")
        self.cursor = decided.seq
        place = parse_train_id(decided.rollout_id)
        if place is None or place[1] >= self.samples:
            raise ValueError(f"{decided.rollout_id!r} is no training rollout of groups of {self.samples}")
        group, sample = place
        members = self.open.get(group, {})
        if group in self.settled or sample in members:
            return False
        self.open.setdefault(group, members)[sample] = decided
        if len(members) == self.samples:
            self.closed.append(group)
        return True

    def skip(self, seq: int) -> None:
        """Pass a message that decides nothing: a retry, an evaluation, a duplicate."""
        if seq <= self.cursor:
            raise PromiseViolated(f"message {seq} arrives after the cursor passed {self.cursor}")
        self.cursor = seq

    def pending_seqs(self) -> list[int]:
        """Sequences of the attempts that are decided and not settled."""
        return sorted(member.seq for members in self.open.values() for member in members.values())

    def plan(self, groups_max: int, stale: Callable[[T], DropReason | None]) -> Batch[T]:
        """The next batch of at most `groups_max` groups, and every closed group that cannot train before it.

        Changes nothing: `settle` does, once the ledger holds it.
        """
        chosen: list[tuple[int, tuple[Decided[T], ...]]] = []
        drops: list[Drop] = []
        void: list[int] = []
        for group in sorted(self.closed) if self.lockstep else self.closed:
            if len(chosen) == groups_max:
                break
            members = [self.open[group][sample] for sample in range(self.samples)]
            reasons = {m.rollout_id: m.reason if m.payload is None else stale(m.payload) for m in members}
            kept = tuple(m for m in members if reasons[m.rollout_id] is None)
            whole = len(kept) >= self.min_graded
            for member in members:
                reason = reasons[member.rollout_id] or (None if whole else "group_incomplete")
                if reason is not None:
                    drops.append(Drop(rollout_id=member.rollout_id, seq=member.seq, reason=reason))
            if whole:
                chosen.append((group, kept))
            else:
                void.append(group)
        return Batch(groups=tuple(chosen), drops=tuple(drops), void_groups=tuple(void))

    def drops_of(self, batch: Batch[T], groups: Container[int]) -> tuple[Drop, ...]:
        """Those drops of `batch`, planned from this pool, that end rollouts of `groups`."""
        members = {m.rollout_id for group in batch.void_groups if group in groups for m in self.open[group].values()}
        return tuple(drop for drop in batch.drops if drop.rollout_id in members)

    def settle(self, groups: Iterable[int]) -> None:
        """Forget groups whose fate the ledger holds. Raises PromiseViolated for one settled before (P2)."""
        for group in groups:
            if group in self.settled:
                raise PromiseViolated(f"group {group} would be settled twice")
            self.settled.add(group)
            self.open.pop(group, None)
            if group in self.closed:
                self.closed.remove(group)


def counters_after(
    before: Counters, batch: Batch[T], disagreed: dict[str, int], metrics: Mapping[str, float] | None = None
) -> Counters:
    """What the record of `batch` counts; `metrics` are its step's, None without one."""
    found = metrics or {}
    return Counters(
        trained_rollouts=before.trained_rollouts + sum(1 for _ in batch.rollouts()),
        dropped_rollouts=before.dropped_rollouts + len(batch.drops),
        void_groups=before.void_groups + len(batch.void_groups),
        trained_groups=before.trained_groups + len(batch.groups),
        zero_variance_groups=before.zero_variance_groups + int(found.get("zero_variance_groups", 0)),
        trained_tokens=before.trained_tokens + int(found.get("trained_tokens", 0)),
        masked_tokens=before.masked_tokens + int(found.get("masked_tokens", 0)),
        disagreed=disagreed,
    )


def settled_groups(rollout_ids: Iterable[str]) -> set[int]:
    """The groups that a ledger record's rollouts belong to."""
    places = (parse_train_id(rollout_id) for rollout_id in rollout_ids)
    return {place[0] for place in places if place is not None}
