"""Puts a recording's messages into the streams of a server again, in the order in which they were stored.

Invariant: every message gets the sequence that it had, so that what the ledger says of sequences still holds; where
the original had lost one, a filler takes its place and is deleted. A replay that was stopped goes on behind the
last message that is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import operator
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from nats.errors import Error as NatsError
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NotFoundError

from headway.bus.blobs import BlobStore
from headway.bus.connection import ACK_S_MAX, Bus, StoredMessage
from headway.bus.failpoints import failpoint
from headway.bus.recording import Recording
from headway.bus.topology import Topology
from headway.schemas.errors import ConfigError, FencedOut, InputError, UnavailableError
from headway.schemas.messages import H_REWARD, H_ROLLOUT
from headway.schemas.subjects import STREAM_SUFFIXES
from headway.schemas.version import Version
from headway.schemas.wire import H_VERSION

H_RECORDED_SEQ = "Headway-Recorded-Seq"
H_RECORDED_TIME = "Headway-Recorded-Time"
GAP_MAX = 100_000
ORDER = ("TASKS", "STAMPS", "ROLLOUTS", "LEDGER", "WEIGHTS", "EVENTS")
COMPARE = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}
Stop = Callable[[str, StoredMessage], bool]
Sleep = Callable[[float], Awaitable[None]]


def until(text: str) -> Stop:
    """`step=12`, `step=1.12`, `seq=345` (of ROLLOUTS), `seq=LEDGER:7`, `reward<0`: whether to stop behind a message.

    Raises ConfigError.
    """
    if match := re.fullmatch(r"step=(?:(\d+)\.)?(\d+)", text):
        epoch, n = match[1], int(match[2])

        def at_step(stream: str, message: StoredMessage) -> bool:
            if stream != "LEDGER" or message.headers.get("Headway-Record") != "step":
                return False
            with contextlib.suppress(ValueError):  # whoever recorded it may have written anything
                version = Version.parse(message.headers.get(H_VERSION, ""))
                return version.n == n and epoch in (None, str(version.epoch))
            return False

        return at_step
    if (match := re.fullmatch(r"seq=(?:([A-Z]+):)?(\d+)", text)) and (match[1] or "ROLLOUTS") in STREAM_SUFFIXES:
        wanted, seq = match[1] or "ROLLOUTS", int(match[2])
        return lambda stream, message: stream == wanted and message.seq >= seq
    if match := re.fullmatch(r"reward(<=|>=|<|>|=)(-?\d+(?:\.\d+)?)", text):
        compare, bound = COMPARE[match[1]], float(match[2])

        def at_reward(stream: str, message: StoredMessage) -> bool:
            with contextlib.suppress(ValueError):
                return stream == "ROLLOUTS" and bool(compare(float(message.headers.get(H_REWARD, "")), bound))
            return False

        return at_reward
    raise ConfigError(f"--until {text!r}", why="no such moment", hint="step=12, seq=345, seq=LEDGER:7 or 'reward<0'")


def describe(stream: str, message: StoredMessage) -> str:
    """A message in a few words."""
    parts = [message.headers.get(name, "") for name in (H_ROLLOUT, "Headway-Record", H_VERSION, "Headway-Event")]
    reward = message.headers.get(H_REWARD)
    words = [part for part in parts if part] + ([f"reward {reward}"] if reward is not None else [])
    return f"{stream} {message.seq}: {' '.join(words)}"


def in_order(recording: Recording, start: dict[str, int]) -> Iterator[tuple[str, StoredMessage]]:
    """Every message behind the sequences of `start`, by the time at which it was stored."""

    def messages(rank: int, stream: str) -> Iterator[tuple[float, int, int, StoredMessage]]:
        seq = start.get(stream, 0) + 1
        while batch := recording.batch(stream, seq):
            yield from ((message.time_s, rank, message.seq, message) for message in batch)
            seq = batch[-1].seq + 1

    for _, rank, _, message in heapq.merge(*(messages(rank, stream) for rank, stream in enumerate(ORDER))):
        yield ORDER[rank], message


@dataclass(slots=True, kw_only=True)
class Replayer:
    """`speed` 1.0 is the original's; None as fast as the server takes it. `published` counts messages."""

    recording: Recording
    bus: Bus
    speed: float | None = None
    stop: Stop = field(default=lambda stream, message: False)
    sleep: Sleep = asyncio.sleep
    published: int = 0
    _last: dict[str, int] = field(default_factory=dict)

    async def prepare(self, store: BlobStore, topology: Topology) -> None:
        """Make the streams, and put the objects into `store`.

        Raises InputError when the streams hold anything else than a beginning of this recording.
        """
        for stream in topology.streams():
            suffix = str(stream.name).rpartition("-")[2]
            self._last[suffix] = await self._adopt(stream, suffix)
        for key, known in self.recording.contents.objects.items():
            own = key.startswith(f"{self.bus.run}/") and not key.startswith(f"{self.bus.run}/files/")
            if known.offsets is not None and own:  # one store may hold many runs
                await store.put(key, self.recording.object(key) or b"")

    async def _adopt(self, stream: StreamConfig, suffix: str) -> int:
        try:
            info = await self.bus.js.stream_info(str(stream.name))
        except NotFoundError:
            await self.bus.js.add_stream(stream)
            return 0
        last = int(info.state.last_seq)
        if last:
            there, recorded = await self.bus.read_at(suffix, last), self.recording.at(suffix, last)
            if there is None or recorded is None or (there.subject, there.body) != (recorded.subject, recorded.body):
                raise InputError(
                    f"stream {stream.name} holds something else than a beginning of {self.recording.path}",
                    hint="replay into a server without that run, or --run-dir another folder",
                )
        return last

    async def run(self) -> str | None:
        """Publish until the end, None, or until `stop`, then a description of the message. Raises UnavailableError."""
        clock = asyncio.get_running_loop().time
        began_s = first_s = None
        for stream, message in in_order(self.recording, dict(self._last)):
            if self.speed is not None:
                if began_s is None or first_s is None:
                    began_s, first_s = clock(), message.time_s
                await self.sleep(max(0.0, began_s + (message.time_s - first_s) / self.speed - clock()))
            await self._publish(stream, message)
            if self.stop(stream, message):
                return describe(stream, message)
        return None

    async def _publish(self, stream: str, message: StoredMessage) -> None:
        if message.seq - self._last[stream] > GAP_MAX:
            raise InputError(f"{stream} lacks {message.seq - self._last[stream]} messages before {message.seq}")
        while self._last[stream] + 1 < message.seq:
            await self._put(stream, message.subject, b"", {})
            await self._delete(stream, self._last[stream])
        kept = {name: value for name, value in message.headers.items() if not name.startswith("Nats-")}
        kept |= {H_RECORDED_SEQ: str(message.seq), H_RECORDED_TIME: f"{message.time_s:.6f}"}
        await self._put(stream, message.subject, message.body, kept)
        self.published += 1

    async def _put(self, stream: str, subject: str, body: bytes, headers: dict[str, str]) -> None:
        expected = {"Nats-Expected-Last-Sequence": str(self._last[stream])}
        try:
            failpoint("publish.replayed.before")
            ack = await self.bus.js.publish(subject, body, headers={**headers, **expected}, timeout=ACK_S_MAX)
            failpoint("publish.replayed.after")
        except APIError as error:
            if error.err_code == 10071:
                raise FencedOut(f"somebody else writes into {stream}", why=str(error.description)) from None
            raise UnavailableError(f"cannot publish into {stream}", why=str(error)) from None
        except (NatsError, OSError, TimeoutError) as error:
            raise UnavailableError(f"cannot publish into {stream}", why=repr(error)[:200]) from None
        self._last[stream] = int(ack.seq)

    async def _delete(self, stream: str, seq: int) -> None:
        try:
            await self.bus.js.delete_msg(self.bus.subjects.stream(stream), seq)
        except (NatsError, OSError, TimeoutError) as error:
            raise UnavailableError(f"cannot delete {stream} {seq}", why=repr(error)[:200]) from None
