"""`headway relay`: a region's cache of weight objects. Each is fetched once from the origin, whoever asks.

Invariants: no byte is served before the object's SHA-256 was checked; one origin read an object at a time, which
goes on when its askers hang up; what is held is served without the origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from headway.bus.blobs import MissingBlob
from headway.bus.service import Service
from headway.schemas.errors import ConfigError, HeadwayError, UnavailableError, WireError
from headway.schemas.manifest import SHARD_BYTES_MAX
from headway.weight_sync.relay_client import FETCHING, H_SIZE
from headway.weight_sync.shelf import Shelf, ShelfFull
from headway.weight_sync.transfer import Downloader, Retrier, Source, TransferLimits, checked

NAME = re.compile(r"[0-9a-f]{64}\.(?:shard|manifest)")
HOLD_S = 10.0
"""An asker is told at this interval that its object is still on the way."""
ASKERS_MAX = 4096
REFUSED_S = 2.0
"""A refusal is repeated for so long: an object's many ranges are not each a new read of the origin."""
REPORT_EVERY_S = 0.5
ORIGIN_ATTEMPTS_MAX = 3
"""An agent that is refused asks the origin itself and comes back."""
log = structlog.get_logger()


@dataclass(slots=True)
class Counters:
    """Since start."""

    hits: int = 0
    misses: int = 0
    refused: int = 0
    origin_bytes: int = 0
    served_bytes: int = 0


class Relay:
    """The cache and its HTTP side. `prefix` is where keys of weights begin, `<run>/weights/`."""

    def __init__(self, shelf: Shelf, origin: Source, prefix: str, token: str, limits: TransferLimits) -> None:
        self._shelf, self._prefix, self._token = shelf, prefix, token
        self._downloader = Downloader(origin=origin, retrier=Retrier(limits=limits, rng=random.Random()))
        self._flights: dict[str, asyncio.Task[HeadwayError | None]] = {}
        self._askers = 0
        self.counters = Counters()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/{key:.+}", self._get)
        return app

    async def close(self) -> None:
        """End what is on its way from the origin."""
        for flight in self._flights.values():
            flight.cancel()
        await asyncio.gather(*self._flights.values(), return_exceptions=True)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(_given(request), f"Bearer {self._token}".encode()):
            return self._refuse(401, "the relay's token is due")
        name = request.match_info["key"].removeprefix(self._prefix)
        if f"{self._prefix}{name}" != request.match_info["key"] or not NAME.fullmatch(name):
            return self._refuse(404, f"a relay serves {self._prefix}<sha256>.shard and .manifest")
        if self._askers == ASKERS_MAX:
            return self._refuse(503, f"{ASKERS_MAX} askers wait")
        self._askers += 1
        try:
            return await self._serve(request, name)
        finally:
            self._askers -= 1

    async def _serve(self, request: web.Request, name: str) -> web.StreamResponse:
        self.counters.hits += self._shelf.has(name)
        while not self._shelf.has(name):  # it may be evicted between two looks
            flight = self._flight(name, request.headers.get(H_SIZE, ""))
            if not (await asyncio.wait({flight}, timeout=HOLD_S))[0]:
                return web.Response(status=FETCHING, text="still on its way from the origin")
            if (error := flight.result()) is not None:
                return self._refuse(_status(error), str(error))
        held = contextlib.ExitStack()
        return _Lent(held.enter_context(self._shelf.lent(name)), held, self.counters)

    def _refuse(self, status: int, why: str) -> web.Response:
        self.counters.refused += 1
        return web.Response(status=status, text=why[:300])

    def _flight(self, name: str, size: str) -> asyncio.Task[HeadwayError | None]:
        """The one task that brings `name`."""
        if name not in self._flights:
            size_bytes = int(size) if size.isascii() and size.isdigit() and len(size) < 12 else 0
            self.counters.misses += 1
            flight = self._flights[name] = asyncio.create_task(self._bring(name, size_bytes))
            flight.add_done_callback(lambda _: self._landed(name, flight))
        return self._flights[name]

    def _landed(self, name: str, flight: asyncio.Task[HeadwayError | None]) -> None:
        failed = not flight.cancelled() and flight.result() is not None
        asyncio.get_running_loop().call_later(REFUSED_S if failed else 0, self._flights.pop, name, None)

    async def _bring(self, name: str, size_bytes: int) -> HeadwayError | None:
        """Put the object on the shelf; why not, otherwise: every asker is told."""
        try:
            if await self._shelf.check(name):
                return None
            if size_bytes > SHARD_BYTES_MAX or not self._shelf.fits(size_bytes):
                raise ShelfFull(f"{size_bytes} bytes do not fit into {self._shelf.bytes_max}")
            key, digest = f"{self._prefix}{name}", name.partition(".")[0]
            data = await self._downloader.get(
                key, lambda data: checked(key, data, digest), size_bytes=size_bytes or None
            )
            self.counters.origin_bytes += len(data)
            await self._shelf.put(name, data)
        except Exception as found:  # a flight that ended otherwise would never leave
            error = found if isinstance(found, HeadwayError) else UnavailableError(f"{name} was not kept: {found!r}")
            log.warning("object_not_relayed", name=name, why=str(error)[:300])
            return error
        log.info("object_relayed", name=name, size_bytes=len(data), held_bytes=self._shelf.held_bytes)
        return None


def _given(request: web.Request) -> bytes:
    """The bytes of the header, which need be no text."""
    return request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")


class _Lent(web.FileResponse):
    """A file, or the range of it that was asked for, which stays on the shelf until it was sent."""

    def __init__(self, path: Path, held: contextlib.ExitStack, counters: Counters) -> None:
        super().__init__(path)
        self._held, self._counters = held, counters

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._held:
            writer = await super().prepare(request)  # sends it all
            self._counters.served_bytes += self.content_length or 0
            return writer


def _status(error: HeadwayError) -> int:
    match error:
        case MissingBlob():
            return 404
        case WireError():
            return 502
        case ShelfFull():
            return 507
    return 503


async def serve(service: Service) -> None:
    """The relay as a service; `run_service("relay", config, serve)`.

    It listens on the port of its region's `relay_url`, on HEADWAY_RELAY_HOST, by default loopback alone.
    """
    settings, region = service.settings, service.config.regions.get(service.settings.region)
    url = region.relay_url if region is not None else ""
    token = os.environ.get("HEADWAY_RELAY_TOKEN", "")
    if region is None or not url or not token:
        missing = "HEADWAY_RELAY_TOKEN" if url else f"regions.{settings.region}.relay_url"
        raise ConfigError(
            "the relay cannot listen", why=f"{missing} is not set", hint="one relay a region, one token for its agents"
        )
    shelf = Shelf(settings.run_dir / "relays" / settings.instance, region.relay_bytes)
    limits = TransferLimits(
        attempts_max=ORIGIN_ATTEMPTS_MAX, bytes_per_s_max=region.download_bytes_per_s_max or math.inf
    )
    prefix = service.bus.keys.shard("").removesuffix(".shard")
    relay = Relay(shelf, service.store.once(), prefix, token, limits)
    runner = web.AppRunner(relay.app(), access_log=None)
    await runner.setup()
    host, port = os.environ.get("HEADWAY_RELAY_HOST", "127.0.0.1"), urlsplit(url).port
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise UnavailableError(f"the relay cannot listen on {host}:{port}", why=str(error)) from None
        log.info("relay_listening", host=host, port=port, objects=len(shelf), held_bytes=shelf.held_bytes)
        while not service.stop.is_set():
            _report(service, relay, shelf)
            try:
                await asyncio.wait_for(service.stop.wait(), REPORT_EVERY_S)
            except TimeoutError:
                continue
    finally:
        await runner.cleanup()
        await relay.close()


def _report(service: Service, relay: Relay, shelf: Shelf) -> None:
    counters = {name: getattr(relay.counters, name) for name in Counters.__dataclass_fields__}
    held = {"held_bytes": shelf.held_bytes, "objects": len(shelf), "evictions": shelf.evictions}
    service.status.update(phase="relaying", **held, **counters)
