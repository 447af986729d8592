"""The ledger on the bus: append with fencing, read with verification.

Invariants: an append succeeds only on the tail that the writer has seen; every record read is the child
of the one before it; with the trainer's key at hand every signature is checked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog

from headway.bus.connection import Bus, StoredMessage
from headway.bus.reader import read_all, read_batch
from headway.schemas import signing
from headway.schemas.errors import FencedOut, PromiseViolated, UnavailableError, WireError
from headway.schemas.ledger import (
    CHAIN_START,
    Drops,
    Fork,
    Genesis,
    LedgerEntry,
    Open,
    Record,
    Step,
    seal_record,
)
from headway.schemas.version import Version
from headway.schemas.wire import digest_of, pack

OPENS_MAX = 20
"""How often a term is tried to be opened while the one before goes on committing."""
log = structlog.get_logger()
Body = Genesis | Open | Step | Drops | Fork


START = Version(0, 0)


@dataclass(frozen=True, slots=True)
class LedgerTail:
    """The newest link: its place in the stream, digest, term, index and version."""

    seq: int = 0
    digest: str = CHAIN_START
    term: int = 0
    index: int = -1
    version: Version = START


@dataclass(frozen=True, slots=True)
class Link:
    """A verified record and its place."""

    seq: int
    record: Record
    version: Version
    digest: str

    @property
    def tail(self) -> LedgerTail:
        return LedgerTail(self.seq, self.digest, self.record.term, self.record.index, self.version)


class LedgerReader:
    """Follows the chain from its start (or any verified link) and checks every step of it."""

    def __init__(self, bus: Bus, public_key: bytes | None = None) -> None:
        self._bus, self._key = bus, public_key
        self.tail = LedgerTail()

    async def read_new(self) -> list[Link]:
        """Links after the tail, verified; moves the tail. Raises PromiseViolated, UnavailableError.

        When the server goes away midway, the links before that are returned: the tail has passed them,
        so that no later call would.
        """
        found: list[Link] = []
        try:
            while batch := await read_batch(self._bus, "LEDGER", self.tail.seq + 1):
                for stored in batch:
                    found.append(await self.verify(stored))
        except UnavailableError:
            if not found:
                raise
        return found

    async def links(self) -> AsyncIterator[Link]:
        """Every link after the tail up to the present end, verified."""
        async for stored in read_all(self._bus, "LEDGER", self.tail.seq + 1):
            yield await self.verify(stored)

    async def verify(self, stored: StoredMessage) -> Link:
        """The next message as a link; moves the tail. Raises PromiseViolated, UnavailableError."""
        try:
            entry = await self._bus.open(LedgerEntry, stored)
            record = entry.open(self._key)
            if isinstance(record.body, Genesis) and self._key is None:
                self._key = record.body.trainer_key
                entry.open(self._key)
        except WireError as error:
            raise PromiseViolated(f"ledger sequence {stored.seq} cannot be trusted", why=str(error)) from None
        if record.prev != self.tail.digest or record.index != self.tail.index + 1:
            raise PromiseViolated(
                f"the ledger's chain breaks at sequence {stored.seq}",
                why=f"it continues {record.prev[:12]} at {record.index}, the link before is {self.tail.digest[:12]}",
            )
        if record.term < self.tail.term or (record.term > self.tail.term and not isinstance(record.body, Open)):
            raise PromiseViolated(f"ledger sequence {stored.seq}: term {record.term} after {self.tail.term}")
        link = Link(stored.seq, record, entry.version, digest_of(entry.payload))
        self.tail = link.tail
        return link


class LedgerWriter:
    """Appends as one term's only writer."""

    def __init__(self, bus: Bus, private_key: bytes, tail: LedgerTail) -> None:
        self._bus, self._key, self.tail = bus, private_key, tail

    async def append(self, body: Body, version: Version, *, term: int | None = None) -> Link:
        """Put the record into the object store, then append it. This is the commit.

        Raises:
            FencedOut: another term's writer has taken over.
        """
        record = Record(
            prev=self.tail.digest,
            term=self.tail.term if term is None else term,
            index=self.tail.index + 1,
            body=body,
        )
        entry = seal_record(record, version, self._key)
        digest = digest_of(entry.payload)
        if self._bus.store is not None:
            await self._bus.store.put(self._bus.keys.ledger(digest), pack(entry))
        subject = self._bus.subjects.ledger(version, body.kind)
        try:
            seq = await self._bus.publish(subject, entry, expect_last_seq=self.tail.seq)
        except (FencedOut, UnavailableError):
            # The acknowledgement may have been lost after the append: the tail decides.
            stored = await self._bus.last("LEDGER")
            if stored is None or digest_of((await self._bus.open(LedgerEntry, stored)).payload) != digest:
                raise
            seq = stored.seq
        if seq <= self.tail.seq:
            raise PromiseViolated(f"the ledger acknowledged sequence {seq} after {self.tail.seq}")
        link = Link(seq, record, version, digest)
        self.tail = link.tail
        return link

    async def take_over(self, opened: Open) -> list[Link]:
        """Open the next term; returns what the one before committed until then, and last the link of `opened`.

        Raises FencedOut when somebody else opens it first, or the one before outruns this for `OPENS_MAX` times.
        """
        reader = LedgerReader(self._bus, signing.public_key(self._key))
        reader.tail, term, found = self.tail, self.tail.term, list[Link]()
        for left in reversed(range(OPENS_MAX)):
            try:
                return [*found, await self.append(opened, self.tail.version, term=term + 1)]
            except FencedOut:
                newer = await reader.read_new()
                if not left or not newer or reader.tail.term > term:
                    raise
                found += newer
                self.tail = reader.tail
        raise AssertionError("the last try returns or raises")
