"""An in-memory NATS with JetStream (its client: `simulator.client`).

Semantics are those measured of nats-server 2.15: dedup by Nats-Msg-Id, appends that expect a last sequence,
acks that are forgotten when the server is killed, late acks that win, pushes back when full. Between client
and server lies a network that delays, loses, repeats, and can be cut.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nats.js.errors import APIError

from headway.bus.connection import WRONG_LAST_SEQUENCE
from simulator.loop import Life, SimLoop

if TYPE_CHECKING:
    from simulator.client import Client, Subscription

STREAM_FULL = 10077
BATCH_BYTES = 8 << 20
PERSIST_S = 0.3
"""A killed server has forgotten what consumers did for up to this long."""


@dataclass(slots=True)
class Rates:
    """Per message: the chance that a request, or only its reply, is lost, or that a request arrives twice."""

    lost_request: float = 0.0
    lost_reply: float = 0.0
    lost_delivery: float = 0.0
    twice: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.5
    delay_s: float = 0.002


@dataclass(slots=True)
class Stored:
    subject: str
    headers: dict[str, str]
    body: bytes
    time_s: float


@dataclass(slots=True)
class Stream:
    name: str
    prefixes: tuple[str, ...]
    messages: list[Stored] = field(default_factory=list)
    dedup: dict[str, int] = field(default_factory=dict)
    full: bool = False

    @property
    def last_seq(self) -> int:
        return len(self.messages)


@dataclass(slots=True)
class Consumer:
    """The agents' work queue."""

    delivered: int = 0
    deliveries: dict[int, int] = field(default_factory=dict)
    pending: dict[int, float] = field(default_factory=dict)
    """Sequence -> when it is delivered again."""
    acked: set[int] = field(default_factory=set)

    def copy(self) -> Consumer:
        return Consumer(self.delivered, dict(self.deliveries), dict(self.pending), set(self.acked))


class Msg(SimpleNamespace):
    """What nats-py hands to a consumer or subscriber."""

    subject: str
    data: bytes
    headers: dict[str, str] | None
    reply: str

    async def respond(self, data: bytes) -> None:
        await self.client.publish(self.reply, data)

    async def ack(self) -> None:
        self.client.send(self.server.on_ack, self.metadata.sequence.stream)

    async def nak(self, delay: float | None = None) -> None:
        self.client.send(self.server.on_nak, self.metadata.sequence.stream, delay or 0.0)

    async def in_progress(self) -> None:
        self.client.send(self.server.on_progress, self.metadata.sequence.stream)


class Server:
    """One nats-server and the network around it."""

    def __init__(self, loop: SimLoop, rng: random.Random, rates: Rates, run: str, ack_wait_s: float) -> None:
        self.loop, self.rng, self.rates, self.ack_wait_s = loop, rng, rates, ack_wait_s
        layout = {
            "TASKS": ("task",),
            "ROLLOUTS": ("rollout",),
            "STAMPS": ("stamp",),
            "WEIGHTS": ("weights",),
            "LEDGER": ("ledger",),
            "EVENTS": ("event", "applied", "dead"),
        }
        self.streams = {
            name: Stream(f"HW-{run}-{name}", tuple(f"rl.{run}.{kind}." for kind in kinds))
            for name, kinds in layout.items()
        }
        self.by_name = {stream.name: stream for stream in self.streams.values()}
        self.consumer = Consumer()
        self._persisted: deque[tuple[float, Consumer]] = deque([(0.0, Consumer())])
        self._pulls: deque[tuple[Client, int, float, Callable[[list[Msg]], None]]] = deque()
        self.subscriptions: list[Subscription] = []
        self.up = True
        self.cut: set[str] = set()
        """Regions that reach nobody."""
        self.on_stored: Callable[[str, int, Stored], None] = lambda stream, seq, stored: None
        self.requests = 0
        self.waiting: dict[str, tuple[Client, asyncio.Future[Msg]]] = {}
        self._turn = 0

    # Faults

    def kill(self, down_s: float, *, forget_ids: bool) -> None:
        """SIGKILL: what was stored stays, what consumers did lately is forgotten, and so is who waited."""
        if not self.up:
            return
        self.up = False
        horizon = self.loop.now - self.rng.random() * PERSIST_S
        while len(self._persisted) > 1 and self._persisted[-1][0] > horizon:
            self._persisted.pop()
        self.consumer = self._persisted[-1][1].copy()
        self._pulls.clear()
        if forget_ids:
            for stream in self.streams.values():
                stream.dedup.clear()
        self.loop.after(down_s, self._start)

    def _start(self) -> None:
        self.up = True
        self._wake()

    def reaches(self, life: Life) -> bool:
        return self.up and life.region not in self.cut

    # The network: all of these happen in the world, not in a client's life

    def delay_s(self) -> float:
        rates = self.rates
        wait_s = rates.delay_s * (0.5 + self.rng.random())
        return wait_s + (self.rng.random() * rates.slow_s if self.rng.random() < rates.slow else 0.0)

    def send(self, life: Life, act: Callable[..., None], *args: Any) -> None:
        """From a client to the server."""
        if not self.reaches(life) or self.rng.random() < self.rates.lost_request:
            return
        for _ in range(1 + (self.rng.random() < self.rates.twice)):
            self.loop.after(self.delay_s(), self._arrive, act, *args)

    def _arrive(self, act: Callable[..., None], *args: Any) -> None:
        if self.up:
            act(*args)

    def reply(self, life: Life, act: Callable[..., None], *args: Any, lost: float | None = None) -> None:
        """From the server to a client."""
        if not self.reaches(life) or self.rng.random() < (self.rates.lost_reply if lost is None else lost):
            return
        self.loop.after(self.delay_s(), act, *args)

    # JetStream

    def stream_of(self, subject: str) -> Stream | None:
        return next((s for s in self.streams.values() if subject.startswith(s.prefixes)), None)

    def store(self, subject: str, headers: dict[str, str], body: bytes) -> int:
        """The sequence, of the first copy if it is a duplicate. Raises APIError."""
        stream = self.stream_of(subject)
        assert stream is not None, subject
        message_id = headers.get("Nats-Msg-Id")
        if message_id is not None and message_id in stream.dedup:
            return stream.dedup[message_id]
        expected = headers.get("Nats-Expected-Last-Sequence")
        if expected is not None and int(expected) != stream.last_seq:
            raise APIError(400, "wrong last sequence", WRONG_LAST_SEQUENCE)
        if stream.full:
            raise APIError(503, "maximum bytes exceeded", STREAM_FULL)
        kept = {key: value for key, value in headers.items() if key != "Nats-Expected-Last-Sequence"}
        stored = Stored(subject, kept, body, self.loop.now)
        stream.messages.append(stored)
        if message_id is not None:
            stream.dedup[message_id] = stream.last_seq
        self.on_stored(stream.name.rpartition("-")[2], stream.last_seq, stored)
        self.route(subject, body, headers, "")
        if stream is self.streams["TASKS"]:
            self._wake()
        return stream.last_seq

    def route(self, subject: str, body: bytes, headers: dict[str, str] | None, reply: str) -> int:
        """Hand a message to core subscribers, to one of each queue; how many."""
        queues: dict[str, list[Subscription]] = {}
        targets = []
        for subscription in self.subscriptions:
            if subscription.life.alive and subscription.matches(subject):
                if subscription.queue:
                    queues.setdefault(subscription.queue, []).append(subscription)
                else:
                    targets.append(subscription)
        for members in queues.values():
            self._turn += 1
            targets.append(members[self._turn % len(members)])
        for target in targets:
            message = Msg(subject=subject, data=body, headers=headers, reply=reply, client=target.client)
            self.reply(target.life, target.take, message, lost=self.rates.lost_delivery)
        return len(targets)

    def forget_the_dead(self) -> None:
        """Subscriptions go with the connection that made them."""
        self.subscriptions = [subscription for subscription in self.subscriptions if subscription.life.alive]

    def direct_get(self, stream: Stream, request: dict[str, Any]) -> list[Msg]:
        start = int(request["seq"])
        found = []
        size = 0
        for seq in range(start, min(stream.last_seq, start + int(request["batch"]) - 1) + 1):
            found.append(self._direct(stream, seq))
            size += len(found[-1].data)
            if size > BATCH_BYTES:
                break
        status = "204" if found else "404"
        return [*found, Msg(subject="", data=b"", headers={"Status": status}, reply="")]

    @staticmethod
    def _direct(stream: Stream, seq: int) -> Msg:
        stored = stream.messages[seq - 1]
        headers = {
            **stored.headers,
            "Nats-Stream": stream.name,
            "Nats-Subject": stored.subject,
            "Nats-Sequence": str(seq),
            "Nats-Time-Stamp": "2026-01-01T00:00:00+00:00",
        }
        return Msg(subject=stored.subject, data=stored.body, headers=headers, reply="")

    # The agents' consumer

    def pull(self, client: Client, limit: int, wait_s: float, act: Callable[[list[Msg]], None]) -> None:
        """A pull request expires here a little before its client gives up."""
        self._pulls.append((client, limit, self.loop.now + 0.9 * wait_s, act))
        self._wake()

    def on_ack(self, seq: int) -> None:
        self.consumer.pending.pop(seq, None)
        self.consumer.acked.add(seq)
        self._persist()

    def on_nak(self, seq: int, delay_s: float) -> None:
        if seq in self.consumer.pending:
            self.consumer.pending[seq] = self.loop.now + delay_s
            self.loop.after(delay_s + 1e-6, self._wake)

    def on_progress(self, seq: int) -> None:
        if seq in self.consumer.pending:
            self.consumer.pending[seq] = self.loop.now + self.ack_wait_s
            self.loop.after(self.ack_wait_s + 1e-6, self._wake)

    def counts(self) -> tuple[int, int]:
        """(tasks never delivered, tasks delivered and not acknowledged)."""
        return self.streams["TASKS"].last_seq - self.consumer.delivered, len(self.consumer.pending)

    def _persist(self) -> None:
        self._persisted.append((self.loop.now, self.consumer.copy()))
        while len(self._persisted) > 1 and self._persisted[1][0] < self.loop.now - PERSIST_S:
            self._persisted.popleft()

    def _due(self) -> int | None:
        consumer = self.consumer
        for seq, due_s in consumer.pending.items():
            if due_s <= self.loop.now:
                return seq
        while consumer.delivered < self.streams["TASKS"].last_seq:
            consumer.delivered += 1
            if consumer.delivered not in consumer.acked:
                return consumer.delivered
        return None

    def _wake(self) -> None:
        """Serve waiting pulls."""
        while self.up and self._pulls:
            client, limit, expires, act = self._pulls[0]
            if not client.life.alive or expires < self.loop.now:
                self._pulls.popleft()
                continue
            batch = []
            while len(batch) < limit and (seq := self._due()) is not None:
                consumer, stored = self.consumer, self.streams["TASKS"].messages[seq - 1]
                consumer.deliveries[seq] = consumer.deliveries.get(seq, 0) + 1
                consumer.pending[seq] = self.loop.now + self.ack_wait_s
                self.loop.after(self.ack_wait_s + 1e-6, self._wake)
                metadata = SimpleNamespace(sequence=SimpleNamespace(stream=seq), num_delivered=consumer.deliveries[seq])
                batch.append(
                    Msg(subject=stored.subject, data=stored.body, headers=stored.headers, reply="ack",
                        metadata=metadata, client=client, server=self)
                )  # fmt: skip
            if not batch:
                return
            self._pulls.popleft()
            self._persist()
            self.reply(client.life, act, batch, lost=self.rates.lost_delivery)
