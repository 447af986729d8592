"""A LEDGER stream that is lost comes back from the object store, or is refused with what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.bus.ledger import LedgerReader
from headway.bus.rebuild import rebuild
from headway.bus.topology import Topology
from headway.schemas import signing
from headway.schemas.errors import PromiseViolated
from headway.schemas.ledger import Open, Record, seal_record
from headway.schemas.version import Version
from headway.schemas.wire import digest_of, pack
from headway.trainer.audit import audit

from .recorded import finish

Make = Callable[..., Any]
STEPS = 3


async def digests(bus: Any) -> list[str]:
    return [link.digest async for link in LedgerReader(bus).links()]


async def lose(bus: Any) -> None:
    await bus.js.delete_stream(bus.subjects.stream("LEDGER"))
    await Topology(run="test").apply(bus.js)


async def put(run: Any, record: Record, key: bytes) -> None:
    entry = seal_record(record, Version(0, 0), key)
    await run.bus.store.put(run.bus.keys.ledger(digest_of(entry.payload)), pack(entry))


async def test_a_lost_ledger_is_rebuilt_and_the_run_goes_on(make_run: Make, tmp_path: Path) -> None:
    run = make_run(steps=STEPS)
    await finish(run, STEPS)
    before, report = await digests(run.bus), await audit(run.bus)
    key = signing.load_key(run.folder / "keys" / "trainer.key")
    body = Open(instance="x", environment={})
    # refused by a fence, never appended, and by somebody else: none of them is the ledger
    await put(run, Record(prev=before[2], term=1, index=3, body=body), key)
    await put(run, Record(prev=before[0], term=9, index=1, body=body), key)
    await put(run, Record(prev=before[-1], term=9, index=len(before), body=body), bytes(32))
    assert await rebuild(run.bus) == 0
    await lose(run.bus)
    assert await digests(run.bus) == []
    assert await rebuild(run.bus) == len(before)
    assert await digests(run.bus) == before
    assert await audit(run.bus) == report
    async with run.trainer() as trainer:
        while trainer.status.get("phase") != "all steps committed":
            await asyncio.sleep(0.05)
    assert (await audit(run.bus)).violations == []


async def test_a_record_that_the_store_lost_too_is_named(make_run: Make) -> None:
    run = make_run(steps=STEPS)
    await finish(run, STEPS)
    before = await digests(run.bus)
    await lose(run.bus)
    await run.bus.store.delete(run.bus.keys.ledger(before[2]))
    with pytest.raises(PromiseViolated, match="lacks record 2 of the ledger") as caught:
        await rebuild(run.bus)
    assert f"record 3 continues {before[2]}" in caught.value.why
    assert await digests(run.bus) == []
