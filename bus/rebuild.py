"""Puts a lost LEDGER stream back together from the object store, which got every record before the stream did.

Records continue one another by digest and are signed, so their order needs no stream. A record that was put and
then refused (its writer was fenced out) or never appended has a sibling that others continue: the longest chain
is the ledger, at its end the record of the higher term.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import structlog

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader
from headway.schemas.errors import PromiseViolated, UnavailableError, WireError
from headway.schemas.ledger import CHAIN_START, Genesis, LedgerEntry, Record
from headway.schemas.wire import digest_of, unpack

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Stored:
    digest: str
    entry: LedgerEntry
    record: Record


async def rebuild(bus: Bus, public_key: bytes | None = None) -> int:
    """Append what the stream lacks; how many records. The stream may hold a beginning of the ledger or nothing.

    Raises PromiseViolated when the stored records do not make one chain that continues what the stream holds.
    """
    reader = LedgerReader(bus, public_key)
    there = [link.digest async for link in reader.links()]
    chain = _chain(await _stored(bus, public_key))
    if [one.digest for one in chain[: len(there)]] != there:
        raise PromiseViolated("the stored records do not continue what the LEDGER stream holds")
    info = await bus.js.stream_info(bus.subjects.stream("LEDGER"))
    last_seq = int(info.state.last_seq)
    for one in chain[len(there) :]:
        subject = bus.subjects.ledger(one.entry.version, one.record.body.kind)
        seq = await bus.publish(subject, one.entry, expect_last_seq=last_seq)
        if seq != last_seq + 1:
            raise UnavailableError(
                f"record {one.record.index} was taken for a duplicate",
                why="the server still remembers the lost stream's messages",
                hint="delete the LEDGER stream, `headway topology apply`, and again",
            )
        last_seq = seq
    return len(chain) - len(there)


async def _stored(bus: Bus, public_key: bytes | None) -> list[_Stored]:
    """The records that the store holds and whose signature verifies."""
    assert bus.store is not None
    found = []
    async for key, _ in bus.store.list(f"{bus.run}/ledger/"):
        try:
            entry = unpack(LedgerEntry, await bus.store.get(key))
            one = _Stored(digest_of(entry.payload), entry, entry.open(public_key))
        except WireError as error:
            log.warning("ledger_object_refused", key=key, why=error.what)
            continue
        found.append(one)
    if public_key is not None:
        return found
    keys = {one.record.body.trainer_key for one in found if isinstance(one.record.body, Genesis)}
    if len(keys) != 1:
        raise PromiseViolated(f"the store holds {len(keys)} keys of geneses", hint="audit where the trainer's key lies")
    return await _stored(bus, keys.pop())


def _chain(stored: list[_Stored]) -> list[_Stored]:
    children: dict[str, list[_Stored]] = defaultdict(list)
    depth: dict[str, int] = {}
    for one in sorted(stored, key=lambda one: -one.record.index):
        children[one.record.prev].append(one)
        depth[one.digest] = 1 + max((depth.get(child.digest, 0) for child in children.get(one.digest, ())), default=0)
    chain, at = list[_Stored](), CHAIN_START
    while candidates := sorted(
        children.get(at, ()), key=lambda one: (depth[one.digest], one.record.term), reverse=True
    ):
        best = candidates[0]
        if len(candidates) > 1 and _rank(best, depth) == _rank(candidates[1], depth):
            raise PromiseViolated(
                f"two records continue {at[:16]} alike", why=f"{best.digest[:16]} and {candidates[1].digest[:16]}"
            )
        chain.append(best)
        at = best.digest
    beyond = [one for one in stored if one.record.index > len(chain)]
    if beyond or not chain:
        first = min(beyond, key=lambda one: one.record.index, default=None)
        raise PromiseViolated(
            f"the store lacks record {len(chain)} of the ledger",
            why=f"record {first.record.index} continues {first.record.prev}" if first else "it holds none",
            hint="restore the object store from a copy",
        )
    return chain


def _rank(one: _Stored, depth: dict[str, int]) -> tuple[int, int]:
    return depth[one.digest], one.record.term
