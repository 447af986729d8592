"""OpenAI's chat completions for the sessions of this agent, on loopback. A key is a session: no key, no answer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import structlog
from aiohttp import web

from headway.rollout_agent.conversation import Conversation
from headway.rollout_agent.openai_protocol import ChatRequest, Refused, Reply, model_body, models_body, parse_request
from headway.schemas.errors import HeadwayError

BODY_BYTES_MAX = 16 << 20
KEY_BYTES = 32
STOP_S = 1.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = structlog.get_logger()


class ChatEndpoint:
    """One of a process. `model` is the only one there is; `now` tells seconds since 1970."""

    def __init__(self, model: str, *, now: Callable[[], float]) -> None:
        self.now, self.base_url, self._model = now, "", model
        self._sessions: dict[bytes, Conversation] = {}
        self._answers: dict[Conversation, set[asyncio.Task[Reply]]] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=STOP_S)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def bound(self, conversation: Conversation) -> Iterator[str]:
        """A key for this session, which is good while the context lasts."""
        key = secrets.token_urlsafe(KEY_BYTES)
        self._sessions[_digest(key)] = conversation
        self._answers[conversation] = set()
        try:
            yield key
        finally:
            del self._sessions[_digest(key)]
            for answer in self._answers.pop(conversation):
                answer.cancel()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in OpenAI's shape, with the word to its client whether asking again may help."""
        try:
            self._session(request)
            return await handler(request)
        except Refused as refused:
            return _error(refused)
        except web.HTTPException as error:
            return _error(Refused(f"{request.method} {request.path[:100]}: {error.reason}", status=error.status))
        except HeadwayError as error:
            log.info("chat_session_over", why=str(error)[:300])
            return _error(Refused(f"the session is over: {error.what}", status=503, code="session_over"))

    def _session(self, request: web.Request) -> Conversation:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        found = self._sessions.get(_digest(key)) if scheme == "Bearer" else None
        if found is None:
            raise Refused("a session's key is due as a Bearer token", status=401, code="invalid_api_key")
        return found

    async def _models(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name")
        if name is None:
            return web.json_response(models_body(self._model, 0))
        if name != self._model:
            raise Refused(f"there is no model {name[:100]!r}", status=404, code="model_not_found", param="model")
        return web.json_response(model_body(self._model, 0))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = parse_request(await request.read(), self._model)
        conversation = self._session(request)  # which may have ended while the body came
        answers = self._answers[conversation]
        answer = asyncio.ensure_future(conversation.answer(asked))
        answers.add(answer)
        answer.add_done_callback(answers.discard)
        answer.add_done_callback(_looked_at)
        reply = await asyncio.shield(answer)  # of a client that hangs up, too: what was sampled is recorded
        if asked.stream:
            return await self._stream(request, asked, reply)
        return web.json_response(reply.body(logprobs=asked.logprobs))

    async def _stream(self, request: web.Request, asked: ChatRequest, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in reply.chunks(logprobs=asked.logprobs, include_usage=asked.include_usage):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def _looked_at(answer: asyncio.Task[Any]) -> None:
    """Nobody may be left to hear how it ended."""
    if not answer.cancelled():
        answer.exception()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _error(refused: Refused) -> web.Response:
    headers = {"x-should-retry": "true" if refused.status == 429 else "false"}
    return web.json_response(refused.body(), status=refused.status, headers=headers)
