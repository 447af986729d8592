"""Bounded work against stores that may fail: parallel ranges, retries with jitter, a cap on bandwidth.

Every wait and every number of tries is a field of `TransferLimits`. Sources try once a call; only `Retrier`
repeats, so that limits never multiply.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import structlog

from headway.bus.blobs import MissingBlob
from headway.schemas.errors import UnavailableError, WireError
from headway.schemas.wire import digest_of

T = TypeVar("T")
Read = Callable[[], Awaitable[bytes]]
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """How much at a time, and how hard to try.

    Waits double from `wait_s` to `wait_s_max`, each scaled by a random factor in [0.5, 1). The defaults outlast
    an outage of half a minute.
    """

    parallel: int = 32
    """Ranges in flight, over all objects."""
    objects: int = 4
    """Objects held in memory while their ranges arrive."""
    range_bytes: int = 2 << 20
    range_bytes_min: int = 64 << 10
    """Of a small object a range is what makes `parallel` of them, but for this: a delta of a few MB is many
    connections' first round trips, not one's slow start."""
    attempts_max: int = 20
    """Of one range."""
    wrong_bytes_max: int = 3
    """How often an object is fetched that arrives with another digest."""
    timeout_s: float = 60.0
    """Of one try at the origin."""
    deadline_s: float = 300.0
    """After it, no range of an object is tried again."""
    wait_s: float = 0.1
    wait_s_max: float = 5.0
    rest_s: float = 10.0
    """How long a relay that was down is passed over."""
    bytes_per_s_max: float = math.inf


class SourceDown(UnavailableError):
    """Nobody answered. Other than an answer that says no, it speaks about every object."""


class Source(Protocol):
    """Where objects are read. One try a call; raises MissingBlob, UnavailableError."""

    async def get(self, key: str) -> bytes: ...
    async def get_range(self, key: str, start: int, end: int) -> bytes: ...


class Relay(Protocol):
    """A cache before the origin, which may need to know how large an object is. Raises SourceDown as well."""

    async def get(self, key: str) -> bytes: ...
    async def get_range(self, key: str, start: int, end: int, size_bytes: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrier:
    """Tries again after UnavailableError; absence is an answer."""

    limits: TransferLimits
    rng: random.Random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic

    async def run(self, what: str, attempt: Callable[[], Awaitable[T]], *, end_s: float = math.inf) -> T:
        """The first success. After `attempts_max` failures, or past `end_s`, the last error is raised."""
        number = 1
        while True:
            try:
                return await attempt()
            except MissingBlob:
                raise
            except UnavailableError as error:
                if number == self.limits.attempts_max or self.clock() >= end_s:
                    raise
                log.warning("transfer_retried", what=what, attempt=number, why=str(error)[:300])
            wait_s = min(self.limits.wait_s * 2 ** (number - 1), self.limits.wait_s_max)
            await self.sleep(wait_s * self.rng.uniform(0.5, 1.0))
            number += 1


@dataclass(slots=True)
class Tally:
    """What one caller moved. `refetches` counts objects that arrived with wrong bytes."""

    fetched_bytes: int = 0
    refetches: int = 0


@dataclass(slots=True, kw_only=True)
class Downloader:
    """Whole objects, from the relay if it serves them, else from the origin."""

    origin: Source
    retrier: Retrier
    relay: Relay | None = None
    _room: asyncio.Semaphore = field(init=False)
    _free_s: float = field(init=False, default=-math.inf)
    """When the link is free again under `bytes_per_s_max`."""
    _rested_s: float = field(init=False, default=-math.inf)
    """When a relay that was down is tried again."""

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.retrier.limits.parallel)

    async def get(
        self, key: str, check: Callable[[bytes], T], tally: Tally | None = None, *, size_bytes: int | None = None
    ) -> T:
        """What `check` makes of the object, which it refuses with WireError; then the origin is asked again.

        Ranges that have arrived are kept while others are tried again. Without `size_bytes` it comes in one
        piece. Raises MissingBlob, UnavailableError, and the last WireError.
        """
        limits, tally = self.retrier.limits, tally or Tally()
        end_s, relay = self.retrier.clock() + limits.deadline_s, self.relay
        for number in range(1, limits.wrong_bytes_max + 1):
            data = await self._whole(relay, key, size_bytes, end_s)
            tally.fetched_bytes += len(data)
            try:
                return await asyncio.to_thread(check, data)
            except WireError:
                if number == limits.wrong_bytes_max:
                    raise
            relay = None  # not its copy a second time
            tally.refetches += 1
        raise AssertionError("unreachable")

    async def _whole(self, relay: Relay | None, key: str, size_bytes: int | None, end_s: float) -> bytes:
        if size_bytes is None:
            return await self._read(
                key,
                0,
                end_s,
                lambda: self.origin.get(key),
                None if relay is None else lambda: relay.get(key),
            )

        limits = self.retrier.limits
        small = max(-(-size_bytes // limits.parallel), limits.range_bytes_min)
        step = min(small, limits.range_bytes) if relay is None else limits.range_bytes  # a relay is near

        async def part(start: int) -> bytes:
            end = min(start + step, size_bytes)
            return await self._read(
                key,
                end - start,
                end_s,
                lambda: self.origin.get_range(key, start, end),
                None if relay is None else lambda: relay.get_range(key, start, end, size_bytes),
            )

        try:
            async with asyncio.TaskGroup() as group:
                parts = [group.create_task(part(start)) for start in range(0, size_bytes, step)]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return b"".join(task.result() for task in parts)

    async def _read(self, key: str, nbytes: int, end_s: float, origin: Read, relay: Read | None) -> bytes:
        """One range, as often as it takes; each try asks the relay, unless it rests, and then the origin."""
        limits = self.retrier.limits

        async def attempt() -> bytes:
            if relay is not None and self.retrier.clock() >= self._rested_s:
                try:
                    return await relay()
                except SourceDown as error:
                    self._rested_s = self.retrier.clock() + limits.rest_s
                    log.warning("relay_passed_over", why=str(error)[:300], rest_s=limits.rest_s)
                except UnavailableError as error:
                    log.warning("relay_declined", why=str(error)[:300])
            try:
                async with asyncio.timeout(limits.timeout_s):
                    return await origin()
            except TimeoutError:
                raise UnavailableError(f"get of {key} took longer than {limits.timeout_s} s") from None

        async with self._room:
            await self._pace(nbytes)
            return await self.retrier.run(f"get of {key}", attempt, end_s=end_s)

    async def _pace(self, nbytes: int) -> None:
        now_s = self.retrier.clock()
        begin_s = max(self._free_s, now_s)
        self._free_s = begin_s + nbytes / self.retrier.limits.bytes_per_s_max
        if begin_s > now_s:
            await self.retrier.sleep(begin_s - now_s)


def checked(key: str, data: bytes, digest: str) -> bytes:
    """`data` if its SHA-256 is `digest`, else WireError("bad_shard")."""
    if digest_of(data) != digest:
        raise WireError(
            "bad_shard",
            f"{key} does not match its digest",
            why=f"the {len(data)} bytes that arrived are not those that were published",
            hint="check the store or relay that served it",
        )
    return data


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], parallel: int) -> None:
    """Run `work` on every item, at most `parallel` at a time, taking items only as there is room.

    Iterating happens in a worker thread (it may compute). The first failure cancels the rest and is raised.
    """
    room = asyncio.Semaphore(parallel)
    source, done = iter(items), object()

    async def one(item: T) -> None:
        try:
            await work(item)
        finally:
            room.release()

    try:
        async with asyncio.TaskGroup() as group:
            while True:
                await room.acquire()
                item = await asyncio.to_thread(next, source, done)
                if item is done:
                    break
                group.create_task(one(item))  # type: ignore[arg-type]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
