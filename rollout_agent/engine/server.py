"""SGLang's HTTP protocol over the model thread. Listens on loopback unless a key guards it."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from headway.rollout_agent.engine.core import EngineCore, Finished, PauseMode
from headway.rollout_agent.engine.replies import generate_reply, loads_reply
from headway.rollout_agent.engine.requests import BadRequest, Limits, as_map, flag, parse_generate, text
from headway.rollout_agent.engine.weights import Weights, load_weights
from headway.schemas.errors import UnavailableError
from headway.schemas.manifest import root_of
from headway.weight_sync import torch_apply
from headway.weight_sync.tensors import table_of
from headway.weight_sync.torch_apply import raw_tensors

BODY_BYTES_MAX = 4 << 20
QUEUED_MAX = 256
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")
UPDATE_KEYS = {"model_path", "weight_version", "flush_cache", "abort_all_requests", "load_format"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Busy(UnavailableError):
    """Answered with 503: too many requests are open, or nothing is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """Weights in memory that nobody serves yet. `root` was computed from that memory, which is not written again."""

    folder: Path
    base: Weights | None
    weights: Weights
    count: int
    root: str | None


class EngineServer:
    """The handlers and the requests that are open."""

    def __init__(self, core: EngineCore, *, key: str = "", queued_max: int = QUEUED_MAX) -> None:
        self._core, self._key = core, key.encode()
        self._open: dict[str, asyncio.Future[Finished]] = {}
        self._limit = core.settings.max_batch + queued_max
        self._updating = asyncio.Lock()
        self._prepared: Prepared | None = None
        self._path = ""
        self._started = time.time()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/continue_generation", self.resume)
        app.router.add_post("/prepare_weights_from_disk", self.prepare)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_post("/weights_checker", self.check)
        app.router.add_post("/abort_request", self.abort)
        app.router.add_post("/release_memory_occupation", self.release_memory)
        app.router.add_post("/resume_memory_occupation", self.resume_memory)
        app.router.add_route("*", "/flush_cache", self.flush)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/health", self.health)
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self.info)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_get("/metrics", self.metrics)
        return app

    def fail(self, error: BaseException) -> None:
        """End every open request: the model thread is gone."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(Busy("the engine's model thread stopped", why=repr(error)[:300]))

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        open_to_all = request.path in ("/health", "/ready")
        if self._key and not open_to_all and not hmac.compare_digest(given, b"Bearer " + self._key):
            return web.json_response({"error": {"message": "a Bearer key is due"}}, status=401)
        try:
            return await handler(request)
        except (BadRequest, UnavailableError) as error:
            status = 400 if isinstance(error, BadRequest) else 503
            return web.json_response({"success": False, "message": str(error)}, status=status)

    async def generate(self, request: web.Request) -> web.Response:
        weights = self._weights()
        limits = Limits(
            vocab_size=weights.config.vocab_size,
            context_tokens=min(self._core.settings.context_tokens, weights.config.max_position_embeddings),
        )
        ask = parse_generate(await _body(request), limits)
        if ask.rid in self._open:
            raise BadRequest(f"rid {ask.rid!r} is in use")
        if len(self._open) >= self._limit:
            raise Busy(f"{len(self._open)} requests are open", hint="ask again later")
        loop = asyncio.get_running_loop()
        future = self._open[ask.rid] = loop.create_future()

        def settle(finished: Finished) -> None:
            if not future.done():
                future.set_result(finished)

        self._core.submit(ask, lambda finished: loop.call_soon_threadsafe(settle, finished))
        try:
            finished = await future
        except asyncio.CancelledError:  # the client hung up
            self._core.call(lambda: self._core.abort(ask.rid))
            raise
        finally:
            del self._open[ask.rid]
        if finished.reason["type"] == "error":
            return web.json_response({"error": finished.reason}, status=500)
        return web.json_response(generate_reply(finished, self._weights().version))

    async def pause(self, request: web.Request) -> web.Response:
        fields = as_map(await _body(request), "the request", {"mode"})
        mode = fields.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode = {str(mode)[:40]!r}", hint=f"one of {', '.join(PAUSE_MODES)}")
        await self._do(lambda: self._core.pause(mode))
        return _done(f"paused, {mode}")

    async def resume(self, request: web.Request) -> web.Response:
        as_map(await _body(request), "the request", {"torch_empty_cache"})
        await self._do(self._core.resume)
        return _done("continued")

    async def prepare(self, request: web.Request) -> web.Response:
        """Read, check, fuse and hash a checkpoint while serving, so that its update only exchanges it. Not SGLang's."""
        fields = as_map(await _body(request), "the request", {"model_path", "weight_version"})
        folder, version = Path(text(fields, "model_path", "", 4096)), text(fields, "weight_version", "")
        async with self._updating:
            self._prepared = None  # never a third set of weights in memory
            base = self._core.weights
            weights, count = await self._read(folder, version, base)
            root = await asyncio.to_thread(torch_apply.root, weights.tensors)
            self._prepared = Prepared(folder=folder, base=base, weights=weights, count=count, root=root)
        return _done(f"{count} tensors of version {version} are ready")

    async def _read(self, folder: Path, version: str, base: Weights | None) -> tuple[Weights, int]:
        settings = self._core.settings
        return await asyncio.to_thread(load_weights, folder, version, base, settings.compute_dtype, settings.numerics)

    async def _load(self, folder: Path, version: str) -> Prepared:
        """What was prepared for this update, else the folder's weights without a root."""
        ready, self._prepared = self._prepared, None
        base = self._core.weights
        if ready is not None and (ready.folder, ready.weights.version, ready.base) == (folder, version, base):
            return ready
        weights, count = await self._read(folder, version, base)
        return Prepared(folder=folder, base=base, weights=weights, count=count, root=None)

    async def update(self, request: web.Request) -> web.Response:
        fields = as_map(await _body(request), "the request", UPDATE_KEYS)
        folder, version = Path(text(fields, "model_path", "", 4096)), text(fields, "weight_version", "")
        if not version or fields.get("load_format") not in (None, "auto"):
            raise BadRequest("weight_version is due, and no load_format but auto")
        flush = flag(fields, "flush_cache", True)
        async with self._updating:
            if flag(fields, "abort_all_requests"):
                await self._do(lambda: self._core.abort(None))
            loaded = await self._load(folder, version)
            await self._do(lambda: self._core.swap(loaded.weights, flush))
            self._path = str(folder)
        reply = {"success": True, "message": f"{loaded.count} tensors of version {version}"}
        return web.json_response(reply | ({"root": loaded.root} if loaded.root else {}))

    async def check(self, request: web.Request) -> web.Response:
        fields = as_map(await _body(request), "the request", {"action"})
        if fields.get("action") != "checksum":
            raise BadRequest("action = 'checksum' is due")
        weights = self._weights()
        table = await asyncio.to_thread(lambda: table_of(raw_tensors(weights.tensors)))
        sums = {entry.name: entry.xxh3 for entry in table}
        found = {"checksums": sums, "root": root_of(table), "weight_version": weights.version}
        return web.json_response({"success": True, "message": "", **found})

    async def abort(self, request: web.Request) -> web.Response:
        fields = as_map(await _body(request), "the request", {"rid", "abort_all"})
        rid = None if flag(fields, "abort_all") else text(fields, "rid", "")
        return _done(f"{await self._do(lambda: self._core.abort(rid))} aborted")

    async def release_memory(self, request: web.Request) -> web.Response:
        as_map(await _body(request), "the request", {"tags"})
        async with self._updating:
            self._prepared = None
            await self._do(self._core.release_memory)
        return _done("weights and KV cache given up")

    async def resume_memory(self, request: web.Request) -> web.Response:
        """Nothing to do: memory comes with the next weights."""
        as_map(await _body(request), "the request", {"tags"})
        return _done("waiting for weights")

    async def flush(self, request: web.Request) -> web.Response:
        await self._do(self._core.flush)
        return _done("idle prefixes forgotten")

    async def ready(self, request: web.Request) -> web.Response:
        weights = self._core.weights
        if weights is None:
            why = "no weights were loaded yet: post /update_weights_from_disk"
            return web.json_response({"ready": False, "message": why}, status=503)
        return web.json_response({"ready": True, "weight_version": weights.version})

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def info(self, request: web.Request) -> web.Response:
        weights, settings = self._core.weights, self._core.settings
        if weights is None:
            return web.json_response({"engine": "headway", "weight_version": None, "started_s": self._started})
        config = weights.config
        found = {
            "model_path": self._path,
            "is_generation": True,
            "weight_version": weights.version,
            "vocab_size": config.vocab_size,
            "context_tokens": min(settings.context_tokens, config.max_position_embeddings),
            "num_layers": config.num_hidden_layers,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "max_running_requests": settings.max_batch,
            "engine": "headway",
            "started_s": self._started,
        }
        return web.json_response(found)

    async def loads(self, request: web.Request) -> web.Response:
        return web.json_response(loads_reply(self._core.loads(), self._core.counters, self._core.settings.max_batch))

    async def metrics(self, request: web.Request) -> web.Response:
        numbers = {**asdict(self._core.loads()), **asdict(self._core.counters)}
        lines = [f"headway_engine_{name} {value}" for name, value in numbers.items() if value != str(value)]
        return web.Response(text="\n".join(lines) + "\n")

    def _weights(self) -> Weights:
        if self._core.weights is None:
            raise Busy("no weights were loaded yet", hint="post /update_weights_from_disk first")
        return self._core.weights

    async def _do(self, command: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._core.call(command))


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise BadRequest("the body is not JSON", why=str(error)[:200]) from None


def _done(message: str) -> web.Response:
    return web.json_response({"success": True, "message": message})
