"""Reading a stream by sequence, without consumers: batches, one message, all, or following it for ever.

What the bus reads from (a server, a recording) is the bus's own affair.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

import structlog

from headway.bus.connection import Bus, StoredMessage
from headway.bus.ending import ending
from headway.schemas.errors import UnavailableError, WireError
from headway.schemas.wire import Message

POLL_S = 0.03
RETRY_S = 0.2
UNAVAILABLE_S_MAX = 60.0

M = TypeVar("M", bound=Message)
log = structlog.get_logger()


async def read_batch(bus: Bus, suffix: str, start_seq: int, *, filter_subject: str = ">") -> list[StoredMessage]:
    """Messages of stream `suffix` from `start_seq` on, in order; empty when there are none yet.

    Raises UnavailableError when the server does not answer.
    """
    return await bus.read_batch(suffix, start_seq, filter_subject)


async def read_at(bus: Bus, suffix: str, seq: int) -> StoredMessage | None:
    """The message at exactly `seq`, None when the stream no longer has it. Raises UnavailableError."""
    return await bus.read_at(suffix, seq)


async def first_seq(bus: Bus, suffix: str) -> int:
    """The sequence of the oldest message that the stream holds, 1 where it holds none. Raises UnavailableError."""
    oldest = await read_batch(bus, suffix, 1)
    return oldest[0].seq if oldest else 1


async def last_valid(bus: Bus, suffix: str, cls: type[M]) -> tuple[M | None, int]:
    """The newest message of the stream that decodes as `cls`, None if none does, and the stream's last sequence.

    What does not decode was published by nobody who belongs here, and ends nothing. Raises UnavailableError.
    """
    stored = await bus.last(suffix)
    last_seq = seq = stored.seq if stored is not None else 0
    while seq > 0:
        if stored is not None:
            try:
                return await bus.open(cls, stored), last_seq
            except WireError as error:
                log.warning("foreign_message_skipped", subject=stored.subject, seq=stored.seq, detail=error.what)
        seq -= 1
        stored = await read_at(bus, suffix, seq) if seq else None
    return None, last_seq


def batches(
    bus: Bus, suffix: str, start_seq: int = 1, *, filter_subject: str = ">"
) -> AsyncGenerator[list[StoredMessage], None]:
    """Every stored message from `start_seq` up to the present end, by the batch; the next one is under way meanwhile.

    Raises UnavailableError.
    """
    return bus.batches(suffix, start_seq, filter_subject)


async def read_all(
    bus: Bus, suffix: str, start_seq: int = 1, *, filter_subject: str = ">"
) -> AsyncIterator[StoredMessage]:
    """Every stored message from `start_seq` up to the present end; see `batches`."""
    async with contextlib.aclosing(batches(bus, suffix, start_seq, filter_subject=filter_subject)) as found:
        async for batch in found:
            for message in batch:
                yield message


async def follow(
    bus: Bus, suffix: str, start_seq: int, *, filter_subject: str = ">", poll_s: float = POLL_S
) -> AsyncIterator[StoredMessage]:
    """Every message from `start_seq` on, for ever. Survives server restarts.

    Raises UnavailableError after UNAVAILABLE_S_MAX without an answer.
    """
    at = start_seq
    clock = asyncio.get_running_loop().time
    answered_at = clock()
    while not ending():
        try:
            batch = await read_batch(bus, suffix, at, filter_subject=filter_subject)
        except UnavailableError:
            if clock() - answered_at > UNAVAILABLE_S_MAX:
                raise
            await asyncio.sleep(RETRY_S)
            continue
        answered_at = clock()
        for message in batch:
            yield message
            at = message.seq + 1
        if not batch:
            await asyncio.sleep(poll_s)
