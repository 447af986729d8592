"""The trainer's sweep: every now and then it deletes what its run has not needed for a grace period.

Marks live in memory and on a monotonic clock: no host's time can move them, a trainer that dies in a sweep
has deleted only what nobody needs, and the next one begins a new grace period. Putting an object, even one
that exists, begins its own anew, so that what is being published is safe before the ledger binds it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError

from headway.bus.blobs import BlobStore
from headway.bus.connection import Bus
from headway.bus.ending import ending
from headway.bus.failpoints import failpoint
from headway.bus.reader import first_seq, read_all
from headway.bus.service import Service
from headway.bus.topology import AGENTS_CONSUMER
from headway.schemas.errors import UnavailableError, WireError
from headway.schemas.messages import Task
from headway.schemas.subjects import ANY, STREAM_SUFFIXES
from headway.schemas.version import Version
from headway.schemas.wire import H_CLAIM, Claim, unpack
from headway.trainer.history import History
from headway.trainer.retention import Kept, delete, kept, leases_of, require_term, unneeded
from headway.weight_sync.chain import Chain

AGENTS_MAX = 4096
BEAT_BYTES_MAX = 16 << 10
T = TypeVar("T")
log = structlog.get_logger()


@dataclass(slots=True)
class Marks:
    """A store that remembers since when each of its objects has been needed by nobody."""

    inner: BlobStore
    clock: Callable[[], float]
    _since_s: dict[str, float] = field(default_factory=dict)
    _deleting: set[str] = field(default_factory=set)
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def put(self, key: str, data: bytes) -> None:
        self._since_s.pop(key, None)
        if key in self._deleting:
            async with self._busy:  # put it once it is gone
                pass
        await self.inner.put(key, data)

    async def get(self, key: str) -> bytes:
        return await self.inner.get(key)

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        return await self.inner.get_range(key, start, end)

    async def exists(self, key: str) -> bool:
        return await self.inner.exists(key)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)

    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        return self.inner.list(prefix)

    def once(self) -> BlobStore:
        return self.inner.once()  # for readers

    async def sweep(self, keys: Iterable[str], grace_s: float, drop: Callable[[list[str]], Awaitable[None]]) -> int:
        """Mark `keys`, unmark all others, and `drop` those marked for `grace_s`, in their order; how many."""
        now_s = self.clock()
        self._since_s = {key: self._since_s.get(key, now_s) for key in keys}
        async with self._busy:
            due = [key for key, since_s in self._since_s.items() if now_s - since_s >= grace_s]
            self._deleting = set(due)
            try:
                await drop(due)
            finally:
                self._deleting = set()
        for key in due:
            self._since_s.pop(key, None)
        return len(due)


@dataclass(slots=True, kw_only=True)
class Serving:
    """Which versions agents serve, by their heartbeats of the last `memory_s`."""

    clock: Callable[[], float]
    memory_s: float
    _heard: dict[str, tuple[Version, float]] = field(default_factory=dict)

    async def listen(self, bus: Bus) -> None:
        async def take(message: Msg) -> None:
            self.take(message.subject, message.data)

        await bus.client.subscribe(bus.subjects.beat("agent", ANY), cb=take)

    def take(self, subject: str, data: bytes) -> None:
        """Take a heartbeat; from one that says no version nothing is learnt."""
        try:
            if len(data) > BEAT_BYTES_MAX or len(self._heard) > AGENTS_MAX:
                return
            self._heard[subject] = Version.parse(str(json.loads(data)["served"])), self.clock()
        except (ValueError, KeyError, TypeError, RecursionError):
            return

    def versions(self) -> set[Version]:
        oldest_s = self.clock() - self.memory_s
        self._heard = {agent: heard for agent, heard in self._heard.items() if heard[1] >= oldest_s}
        return {version for version, _ in self._heard.values()}


class Claims:
    """Which objects the messages of all streams claim. Every message is read once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._next = dict.fromkeys(STREAM_SUFFIXES, 1)
        self._keys: dict[str, dict[int, str]] = {suffix: {} for suffix in STREAM_SUFFIXES}

    async def keys(self) -> set[str]:
        """Of the messages that streams hold now. Raises UnavailableError."""
        for suffix, held in self._keys.items():
            first = await first_seq(self._bus, suffix)
            for seq in [seq for seq in held if seq < first]:
                del held[seq]
            async for stored in read_all(self._bus, suffix, self._next[suffix]):
                self._next[suffix] = stored.seq + 1
                if H_CLAIM in stored.headers:
                    try:
                        held[stored.seq] = unpack(Claim, stored.body).key
                    except WireError:
                        continue
        return {key for held in self._keys.values() for key in held.values()}


class Sweeper:
    """One term's sweep. Make it before anything is put: from then on the service's store is its `Marks`."""

    def __init__(
        self, service: Service, history: History, public_key: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service, self._bus, self._history, self._key = service, service.bus, history, public_key
        self._config = service.config.retention
        self._marks = Marks(service.store, clock)
        service.store = self._bus.store = self._marks
        self._serving = Serving(clock=clock, memory_s=self._config.grace_s)
        self._chain = Chain(self._marks, self._bus.keys, public_key)
        self._claims = Claims(self._bus)

    async def run(self, term: int) -> None:
        """Sweep until cancelled. Raises FencedOut when the term is over."""
        await self._serving.listen(self._bus)
        while not ending():
            await asyncio.sleep(self._config.every_s)
            try:
                await self.sweep(term)
            except (UnavailableError, WireError) as error:
                log.warning("sweep_failed", why=str(error)[:300])

    async def sweep(self, term: int) -> int:
        """Mark, and delete what has been marked for the grace period; how many objects.

        Raises FencedOut, UnavailableError, and WireError for a lease that cannot be read or a manifest that cannot
        be trusted; nothing more is deleted then.
        """
        leases = await leases_of(self._bus)
        keep = kept(self._history, self._service.config, self._serving.versions(), leases)
        keys = list(await unneeded(self._bus, self._history, self._chain, keep))
        if self._config.purge:
            await require_term(self._bus, term, self._key)
            await self._purge("ROLLOUTS", keep.rollouts_from_seq)
            await self._purge("TASKS", await self._tasks_from_seq(keep))
            claimed = await self._claims.keys()
            keys += [key async for key, _ in self._marks.list(f"{self._bus.run}/blobs/") if key not in claimed]
        swept = await self._marks.sweep(keys, self._config.grace_s, lambda due: delete(self._bus, due, term, self._key))
        if swept:
            log.info("swept", objects=swept, marked=len(keys) - swept)
        return swept

    async def _tasks_from_seq(self, keep: Kept) -> int:
        """The first task that is unsettled, not acknowledged, held by a lease, or the last valid one."""
        info = await self._ask(self._bus.js.consumer_info(self._bus.subjects.stream("TASKS"), AGENTS_CONSUMER))
        bound = (info.ack_floor.stream_seq if info.ack_floor else 0) + 1
        bound = min(bound, keep.tasks_from_seq or bound)
        floor = 1
        async for stored in read_all(self._bus, "TASKS"):
            try:
                task = await self._bus.open(Task, stored)
            except WireError:
                continue
            floor = stored.seq
            if floor >= bound or (task.purpose == "train" and task.group not in self._history.settled):
                break
        return min(floor, bound)

    async def _purge(self, suffix: str, below_seq: int) -> None:
        """Forget messages below a sequence; the newest always stays. Raises UnavailableError."""
        last = await self._bus.last(suffix)
        below_seq = min(below_seq, last.seq if last is not None else 1)
        if below_seq > await first_seq(self._bus, suffix):
            failpoint("purge.before")
            await self._ask(self._bus.js.purge_stream(self._bus.subjects.stream(suffix), seq=below_seq))
            failpoint("purge.after")
            log.info("purged", stream=suffix, below_seq=below_seq)

    async def _ask(self, request: Awaitable[T]) -> T:
        try:
            return await request
        except (NatsError, JetStreamError, OSError, TimeoutError) as error:
            raise UnavailableError("the NATS server refuses or does not answer", why=repr(error)[:200]) from None
