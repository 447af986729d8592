"""Publishing into streams with many acknowledgements under way, all of them on one inbox.

nats-py's own `publish` makes a request, a task and a time-out of each message, its `publish_async` has no
time-out and turns a cancellation into another error; this costs a future, and a timer where one waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

import nats.errors
from nats.js.errors import APIError, NoStreamResponseError

from headway.bus.client import LeanClient


@dataclass(frozen=True, slots=True)
class Sent:
    """A message on its way: `seq` becomes the sequence under which the stream holds it, unless it is late."""

    reply: str
    end_s: float
    seq: asyncio.Future[int]


class AckWindow:
    """The publishes of one connection that wait for their stream's acknowledgement."""

    def __init__(self, client: LeanClient) -> None:
        self._client = client
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self._inbox = ""
        self._published = 0

    async def send(self, subject: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> Sent:
        """Send without waiting; what keeps it from being sent, or answered in time, is for `stored` to say."""
        if not self._inbox:
            self._inbox = self._client.new_inbox()
            await self._client.listen(f"{self._inbox}.*", self._take)
        self._published += 1
        loop = asyncio.get_running_loop()
        sent = Sent(f"{self._inbox}.{self._published}", loop.time() + timeout_s, loop.create_future())
        self._waiting[sent.reply] = sent.seq
        try:
            await self._client.publish(subject, body, reply=sent.reply, headers=dict(headers))
        except nats.errors.Error as error:
            self._waiting.pop(sent.reply)
            sent.seq.set_exception(error)
        except BaseException:
            self.forget(sent)
            raise
        return sent

    async def stored(self, sent: Sent) -> int:
        """The sequence of what was sent.

        Raises APIError (the stream refuses it), NoStreamResponseError, nats.errors.TimeoutError (it may be stored).
        """
        if sent.seq.done():
            return sent.seq.result()
        timer = asyncio.get_running_loop().call_at(sent.end_s, _expire, sent.seq)
        try:
            return await sent.seq
        finally:
            timer.cancel()
            self.forget(sent)

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> int:
        """Send and wait; see `send` and `stored`."""
        return await self.stored(await self.send(subject, body, headers, timeout_s))

    def forget(self, sent: Sent) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(sent.reply, None)
        if not sent.seq.cancel() and not sent.seq.cancelled():
            sent.seq.exception()  # seen, or asyncio would complain

    def _take(self, subject: str, headers: dict[str, str], body: bytes) -> None:
        seq = self._waiting.pop(subject, None)
        if seq is None or seq.done():
            return
        if headers.get("Status") == "503":
            seq.set_exception(NoStreamResponseError())
            return
        found = json.loads(body)
        try:
            if "error" in found:
                raise APIError.from_error(found["error"])  # which raises by itself
            seq.set_result(int(found["seq"]))
        except APIError as error:
            seq.set_exception(error)


def _expire(seq: asyncio.Future[int]) -> None:
    if not seq.done():
        seq.set_exception(nats.errors.TimeoutError())
