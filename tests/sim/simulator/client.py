"""The client that `headway.bus` sees instead of nats-py's."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import nats.errors
from nats.js.errors import APIError, NotFoundError

from simulator.loop import LIFE
from simulator.server import Msg, Server, Stream


class Subscription:
    """A core subscription of a client."""

    def __init__(self, client: Client, subject: str, queue: str, cb: Callable[[Msg], Any]) -> None:
        self.client, self.life, self.queue, self._cb = client, client.life, queue, cb
        self._tokens = subject.split(".")
        self._plain = subject if "*" not in subject and ">" not in subject else None
        self.context = client.context

    def matches(self, subject: str) -> bool:
        if self._plain is not None:
            return self._plain == subject
        tokens = subject.split(".")
        return len(tokens) == len(self._tokens) and all(
            mine in ("*", theirs) for mine, theirs in zip(self._tokens, tokens, strict=True)
        )

    def take(self, *messages: Msg) -> None:
        if not self.life.alive or self.client.is_closed:
            return
        self.client.loop.create_task(self._each(messages), context=self.context)

    async def _each(self, messages: tuple[Msg, ...]) -> None:
        for message in messages:
            await self._cb(message)

    async def unsubscribe(self) -> None:
        self.client.drop(self)


class Client:
    """The part of nats.aio.client.Client that Headway uses."""

    def __init__(self, server: Server) -> None:
        self.server, self.loop = server, server.loop
        life = LIFE.get()
        assert life is not None
        self.life = life
        self.context = contextvars.copy_context()
        self.is_closed, self._inboxes = False, 0
        self._mine: list[Subscription] = []

    @property
    def is_connected(self) -> bool:
        return self.server.reaches(self.life)

    def jetstream(self, timeout: float) -> JetStream:
        return JetStream(self)

    def new_inbox(self) -> str:
        self._inboxes += 1
        return f"_INBOX.{self.life.name}.{id(self)}.{self._inboxes}"

    async def close(self) -> None:
        self.is_closed = True
        for subscription in list(self._mine):
            self.drop(subscription)

    async def subscribe(self, subject: str, queue: str = "", *, cb: Callable[[Msg], Any]) -> Subscription:
        subscription = Subscription(self, subject, queue, cb)
        self._mine.append(subscription)
        if not subject.startswith("_INBOX"):
            self.server.subscriptions.append(subscription)
        return subscription

    async def listen(self, subject: str, take: Callable[[str, dict[str, str], bytes], None]) -> Subscription:
        async def hand(message: Msg) -> None:
            take(message.subject, dict(message.headers or {}), message.data)

        return await self.subscribe(subject, cb=hand)

    def drop(self, subscription: Subscription) -> None:
        self._mine.remove(subscription)
        if subscription in self.server.subscriptions:
            self.server.subscriptions.remove(subscription)

    def open_subscriptions(self) -> int:
        return len(self._mine)

    def send(self, act: Callable[..., None], *args: Any) -> None:
        self.server.send(self.life, act, *args)

    async def within(self, future: asyncio.Future[Any], timeout_s: float) -> Any:
        """The future's result. Raises nats.errors.TimeoutError."""

        def expire() -> None:
            if not future.done():
                future.set_exception(nats.errors.TimeoutError())

        timer = self.loop.call_later(timeout_s, expire)
        try:
            return await future
        finally:
            timer.cancel()

    async def ask(self, act: Callable[[], Any], timeout_s: float) -> Any:
        """What `act` returns or raises at the server. Raises nats.errors.TimeoutError."""
        self.server.requests += 1
        future = self.loop.create_future()

        def answer(result: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def arrive() -> None:
            try:
                result, error = act(), None
            except Exception as refusal:
                result, error = None, refusal
            self.server.reply(self.life, answer, result, error)

        self.send(arrive)
        return await self.within(future, timeout_s)

    async def publish(self, subject: str, body: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        self.server.requests += 1
        if headers is not None:
            self.send(self._append, subject, headers, body, reply)
        elif subject.startswith("$JS.API.DIRECT.GET."):
            stream = self.server.by_name[subject.removeprefix("$JS.API.DIRECT.GET.")]
            self.send(self._get, stream, json.loads(body), reply)
        elif subject.startswith("_INBOX."):
            self.send(self._answered, subject, body)
        elif ".beat." not in subject:
            self.send(self.server.route, subject, body, None, reply)

    def _append(self, subject: str, headers: dict[str, str], body: bytes, reply: str) -> None:
        try:
            answer: dict[str, Any] = {"seq": self.server.store(subject, headers, body)}
        except APIError as error:
            answer = {"error": {"code": error.code, "err_code": error.err_code, "description": error.description}}
        self._hear(reply, Msg(subject=reply, data=json.dumps(answer).encode(), headers=None, reply=""))

    def _get(self, stream: Stream, request: dict[str, Any], reply: str) -> None:
        self._hear(reply, *self.server.direct_get(stream, request))

    def _hear(self, inbox: str, *messages: Msg) -> None:
        """What the server sends to one of this client's own inboxes."""
        for subscription in self._mine:
            if subscription.matches(inbox):
                self.server.reply(self.life, subscription.take, *messages)

    def _answered(self, inbox: str, body: bytes) -> None:
        waiting = self.server.waiting.pop(inbox, None)
        if waiting is not None:
            client, future = waiting
            self.server.reply(client.life, _resolve, future, Msg(subject=inbox, data=body, headers=None, reply=""))

    async def request(self, subject: str, body: bytes, timeout: float) -> Msg:
        self.server.requests += 1
        inbox, future = self.new_inbox(), self.loop.create_future()
        self.server.waiting[inbox] = (self, future)

        def arrive() -> None:
            if not self.server.route(subject, body, None, inbox):
                self.server.reply(self.life, _fail, future, nats.errors.NoRespondersError())

        self.send(arrive)
        try:
            found: Msg = await self.within(future, timeout)
            return found
        finally:
            self.server.waiting.pop(inbox, None)


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class JetStream:
    """The part of nats.js.JetStreamContext that Headway uses."""

    def __init__(self, client: Client) -> None:
        self._client, self._server = client, client.server

    async def get_last_msg(self, stream: str, subject: str, direct: bool) -> Any:
        def last() -> Any:
            messages = self._server.by_name[stream].messages
            if not messages:
                raise NotFoundError(404, "no message")
            found = messages[-1]
            return SimpleNamespace(subject=found.subject, seq=len(messages), headers=found.headers, data=found.body)

        return await self._client.ask(last, 5.0)

    async def consumer_info(self, stream: str, consumer: str) -> Any:
        pending, unacked = await self._client.ask(self._server.counts, 5.0)
        return SimpleNamespace(num_pending=pending, num_ack_pending=unacked)

    async def pull_subscribe_bind(self, consumer: str, stream: str) -> Pull:
        return Pull(self._client)


class Pull:
    def __init__(self, client: Client) -> None:
        self._client, self._server = client, client.server

    async def fetch(self, limit: int, timeout: float) -> list[Msg]:
        future = self._client.loop.create_future()

        def take(batch: list[Msg]) -> None:
            _resolve(future, batch)

        self._client.send(self._server.pull, self._client, limit, timeout, take)
        found: list[Msg] = await self._client.within(future, timeout)
        return found
