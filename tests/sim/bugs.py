"""Bugs that others have had, each as a patch: what the simulator must find."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from headway.bus.ledger import LedgerWriter
from headway.rollout_agent.outcomes import Outcomes
from headway.schemas.errors import UnavailableError
from headway.schemas.messages import Rollout
from headway.schemas.wire import digest_of
from headway.trainer.groups import Pool, parse_train_id
from headway.trainer.publishing import WeightLine
from headway.trainer.staleness import Staleness


def late_ack_counted_twice() -> Any:
    """Two agents finish one task; the second attempt counts as well as the first."""

    def observe(self: Any, decided: Any) -> bool:
        self.cursor = decided.seq
        place = parse_train_id(decided.rollout_id)
        assert place is not None
        members = self.open.setdefault(place[0], {})
        members[place[1]] = decided
        if len(members) == self.samples and place[0] not in self.closed:
            self.closed.append(place[0])
        return True

    return mock.patch.object(Pool, "observe", observe)


def drop_not_recorded() -> Any:
    """Rollouts of groups that cannot train are forgotten instead of being written down."""
    real = Pool.plan

    def plan(self: Any, *arguments: Any) -> Any:
        batch = real(self, *arguments)
        kept = tuple(drop for drop in batch.drops if drop.reason != "group_incomplete")
        return dataclasses.replace(batch, drops=kept)

    return mock.patch.object(Pool, "plan", plan)


def verdict_by_last_span_only() -> Any:
    """A trajectory is as fresh as the version that wrote its last token."""
    real = Staleness.lags

    def lags(self: Any, rollout: Any, lineage: Any) -> Any:
        found = real(self, rollout, lineage)
        return (found[-1],) * len(found)

    return mock.patch.object(Staleness, "lags", lags)


def commit_before_durable() -> Any:
    """The checkpoint is uploaded in the background while the step is committed."""
    real = WeightLine.put_checkpoint

    async def upload(self: Any, blob: bytes) -> None:
        await asyncio.sleep(0.1)  # a slow store
        with contextlib.suppress(UnavailableError):
            await real(self, blob)

    async def put(self: Any, blob: bytes) -> str:
        self._upload = asyncio.create_task(upload(self, blob))
        return digest_of(blob)

    return mock.patch.object(WeightLine, "put_checkpoint", put)


def attempt_not_fenced() -> Any:
    """Attempts at one rollout share a dedup id, so that a failed one hides the good one after it."""
    return mock.patch.object(Rollout, "message_id", lambda self: self.rollout_id)


def cursor_past_the_pool() -> Any:
    """The cursor passes rollouts of groups that are still open, and the ledger does not name them."""
    real = Pool.pending_seqs

    def pending(self: Any) -> list[int]:
        closed = {m.seq for group in self.closed for m in self.open[group].values()}
        return [seq for seq in real(self) if seq in closed]

    return mock.patch.object(Pool, "pending_seqs", pending)


@contextlib.contextmanager
def writer_not_fenced() -> Iterator[None]:
    """A ledger record is appended wherever the tail is."""
    real = LedgerWriter.append

    async def append(self: Any, *arguments: Any, **named: Any) -> Any:
        bus = self._bus
        expected = bus.publish

        async def publish(subject: str, message: Any, *, expect_last_seq: int | None = None) -> int:
            return int(await expected(subject, message))

        with mock.patch.object(bus, "publish", publish):
            return await real(self, *arguments, **named)

    with mock.patch.object(LedgerWriter, "append", append):
        yield


def acked_before_published() -> Any:
    """An agent acknowledges its task before the rollout is stored."""
    real = Outcomes.finished

    async def publish(self: Any, lease: Any, *arguments: Any) -> None:
        await lease.ack()
        await asyncio.sleep(0.1)  # a slow bus
        await real(self, lease, *arguments)

    return mock.patch.object(Outcomes, "finished", publish)


BUGS: dict[str, Callable[[], Any]] = {
    bug.__name__: bug
    for bug in (
        late_ack_counted_twice,
        drop_not_recorded,
        verdict_by_last_span_only,
        commit_before_durable,
        attempt_not_fenced,
        cursor_past_the_pool,
        writer_not_fenced,
        acked_before_published,
    )
}
