"""JetStream's direct get: messages of a stream by sequence, without consumers.

A batched direct get leaves no state on the server, so nothing about what was read can be forgotten or
acknowledged too early: the cursor lives with the reader (the trainer's is in the ledger).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from typing import Self

import nats.errors
from nats.aio.subscription import Subscription

from headway.bus.client import LeanClient
from headway.schemas.errors import UnavailableError

BATCH_MESSAGES = 1024
BATCH_BYTES = 8 << 20
REPLY_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as a stream holds it."""

    subject: str
    seq: int
    headers: dict[str, str]
    body: bytes
    time_s: float = 0.0
    """When the server stored it, in Unix seconds; 0.0 where the reader did not learn it."""


async def get_batch(client: LeanClient, stream: str, start_seq: int, filter_subject: str) -> list[StoredMessage]:
    """Messages from `start_seq` on, in order; empty when there are none yet. Raises UnavailableError."""
    return await (await _Batch.ask(client, stream, start_seq, filter_subject)).whole()


async def get_batches(
    client: LeanClient, stream: str, start_seq: int, filter_subject: str
) -> AsyncGenerator[list[StoredMessage], None]:
    """Batches from `start_seq` up to the present end. While one is handed out the next is under way: two in memory.

    Raises UnavailableError.
    """
    asked = await _Batch.ask(client, stream, start_seq, filter_subject)
    try:
        while batch := await asked.whole():
            asked = await _Batch.ask(client, stream, batch[-1].seq + 1, filter_subject)
            yield batch
    finally:
        await asked.close()


async def get_one(client: LeanClient, stream: str, seq: int) -> StoredMessage | None:
    """The message at exactly `seq`, None when the stream no longer has it. Raises UnavailableError."""
    found = await (await _Batch.ask(client, stream, seq, ">", messages=1)).whole()
    return next((message for message in found if message.seq == seq), None)


class _Batch:
    """Messages that arrive one by one, until the server says that it was the last."""

    def __init__(self, what: str) -> None:
        self._what, self._found = what, list[StoredMessage]()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._subscription: Subscription | None = None

    @classmethod
    async def ask(
        cls, client: LeanClient, stream: str, start_seq: int, filter_subject: str, messages: int = BATCH_MESSAGES
    ) -> Self:
        """Raises UnavailableError."""
        batch, inbox = cls(f"{stream} from {start_seq}"), client.new_inbox()
        request = {
            "seq": max(1, start_seq),
            "next_by_subj": filter_subject,
            "batch": messages,
            "max_bytes": BATCH_BYTES,
        }
        try:
            batch._subscription = await client.listen(inbox, batch.take)
            await client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=inbox)
        except (nats.errors.Error, OSError) as error:
            await batch.close()
            raise batch._unread(error) from None
        return batch

    def _unread(self, error: Exception) -> UnavailableError:
        return UnavailableError(f"cannot read {self._what}", why=repr(error)[:200])

    async def close(self) -> None:
        """Listen no more."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    def take(self, _: str, headers: dict[str, str], body: bytes) -> None:
        status = _status(headers)
        if self._end.done():
            return
        if status is None:
            self._found.append(_stored(headers, body))
        elif status in ("204", "404"):
            self._end.set_result(None)
        else:
            absent = "no stream answers: JetStream is off, or the run has no streams"
            why = absent if status == "503" else f"the server refuses direct get with status {status}"
            refusal = UnavailableError(f"cannot read {self._what}", why=why, hint="headway topology plan")
            self._end.set_exception(refusal)

    async def whole(self) -> list[StoredMessage]:
        """All of them. Raises UnavailableError, also when nothing came for REPLY_S_MAX."""
        try:
            seen = -1
            while not self._end.done() and len(self._found) > seen:
                seen = len(self._found)
                await asyncio.wait([self._end], timeout=REPLY_S_MAX)
            if not self._end.done():
                raise self._unread(TimeoutError())
            self._end.result()
            return self._found
        finally:
            await self.close()


def _status(headers: dict[str, str]) -> str | None:
    """What the server says instead of a stored message. To that it adds a sequence, whatever its publisher added."""
    return None if "Nats-Sequence" in headers else headers.get("Status", "unknown")


def _stored(headers: dict[str, str], body: bytes) -> StoredMessage:
    """`headers` loses those that direct get added."""
    subject, seq, stored_at = (headers.pop(name) for name in _DIRECT_HEADERS)
    for name in _DIRECT_COUNTS:
        headers.pop(name, None)
    return StoredMessage(subject, int(seq), headers, body, datetime.fromisoformat(stored_at).timestamp())


_DIRECT_HEADERS = ("Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp")
_DIRECT_COUNTS = ("Nats-Stream", "Nats-Num-Pending", "Nats-Last-Sequence")
