"""Typed messages against plain nats-py with hand-packed msgpack, on one embedded server, alternating in one process.

    python -P tests/bench/bus.py [--rounds 9] [--mib 16]

Bodies of 2, 20 and 200 KB are rollouts, each with one header field for whatever ours have, so that both sides put the
same bytes on the wire; "no headers" is plain nats-py without them. Publishing: `Bus.publish_all` against
`publish_async`; consuming: `read_all` and `Bus.open` against `fetch` and `ack` of the same messages. Above 64 KiB a
body goes through the object store on our side and through the server on the other. Besides: a hand-written ack
window, two outstanding pulls, and what each check of a message costs.
Ratios are medians over the rounds, of wall time and of the CPU time of this process and the server together; the
targets are of CPU time.
The last line is JSON: name, figures, targets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import statistics
import subprocess
import tempfile
import time
import timeit
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import nats
import numpy as np
import uvloop
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.bus.server import ServerSettings, free_port, wait_listening
from headway.bus.topology import Topology
from headway.schemas import signing
from headway.schemas.messages import Rollout, Signed, Verdict
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import Envelope, digest_of, open_envelope, pack, unpack

SIZES = (2_000, 20_000, 200_000)
TOKEN_BYTES = 9
OTHER_BYTES = 700
WINDOW = 512
FETCH = 256
PULL = 64
TARGET = 0.8
TOUCHED_MIB = 512
SUBJECT = "rl.bench.rollout.west.raw"
Plain = tuple[dict[str, Any], dict[str, str] | None]
"""What somebody without schemas packs, and the headers to send it with."""


def rollout(size_bytes: int, number: int) -> Rollout:
    """A graded attempt whose body has about `size_bytes`."""
    tokens = max(4, (size_bytes - OTHER_BYTES) // TOKEN_BYTES)
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    trajectory = Trajectory(
        token_ids=np.arange(tokens, dtype=np.int32) % 256, loss_mask=mask,
        logprobs=np.where(mask == 1, -0.5, 0).astype(np.float32),
        spans=[Span(start=1, end=tokens, version=Version(0, 0))], routes=np.zeros((0, 1, 1), np.uint8),
        route_spans=[], layer_map=[0], temperature=1.0, turns=1, stop_reason="submitted",
    )  # fmt: skip
    verdict = Verdict(
        run="bench", rollout_id="r", attempt="a", task_id="t", host="h", workspace_digest="0" * 64, reward=1.0, parts={}
    )
    return Rollout(
        rollout_id=f"g{number:07d}s000", attempt=secrets.token_hex(8), purpose="train", outcome="ok", terminal=True,
        group=number, sample=0, task_id="t", task_seq=1, delivery=1, region="east", agent="one", reward=1.0,
        trajectory=trajectory, verdict=Signed.seal(b"k" * signing.KEY_BYTES, pack(verdict)),
    )  # fmt: skip


def plain(message: Rollout, *, headers: bool = True) -> Plain:
    fields = message.model_dump()
    assert message.trajectory is not None
    fields["trajectory"] |= {
        name: getattr(message.trajectory, name) for name in ("token_ids", "loss_mask", "logprobs", "routes")
    }
    sealed = Envelope.seal(message).headers | {"Nats-Msg-Id": secrets.token_hex(16)}
    return fields, sealed if headers else None


def pack_by_hand(fields: dict[str, Any]) -> bytes:
    return msgpack.packb(fields, default=lambda array: array.tobytes())  # type: ignore[no-any-return]


async def typed_publish(bus: Bus, messages: list[Rollout]) -> None:
    await bus.publish_all((bus.subjects.rollout("east", "one"), message) for message in messages)


async def raw_publish(client: Client, messages: list[Plain]) -> None:
    js = client.jetstream()
    for fields, headers in messages:
        await js.publish_async(SUBJECT, pack_by_hand(fields), headers=headers)
    await js.publish_async_completed()


async def window_publish(client: Client, messages: list[Plain]) -> None:
    """Acks counted by hand on one inbox: the fastest that nats-py's public interface allows."""
    inbox, done, left = client.new_inbox(), asyncio.Event(), len(messages)
    room = asyncio.Semaphore(WINDOW)

    async def acked(_: Any) -> None:
        nonlocal left
        left -= 1
        room.release()
        if not left:
            done.set()

    subscription = await client.subscribe(inbox, cb=acked)
    for fields, headers in messages:
        await room.acquire()
        await client.publish(SUBJECT, pack_by_hand(fields), reply=inbox, headers=headers)
    await done.wait()
    await subscription.unsubscribe()


async def typed_consume(bus: Bus, first: int) -> None:
    """What `typed_publish` left from `first` on, up to the end, and nothing that others published behind it."""
    async for stored in read_all(bus, "ROLLOUTS", first, filter_subject=bus.subjects.rollout("east", "one")):
        await bus.open(Rollout, stored)


def consumer(first: int) -> ConsumerConfig:
    return ConsumerConfig(
        ack_policy=AckPolicy.EXPLICIT, deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=first,
        max_ack_pending=100_000,
    )  # fmt: skip


async def raw_consume(client: Client, stream: str, first: int, count: int) -> None:
    pull = await client.jetstream().pull_subscribe(
        "rl.bench.rollout.>", durable=secrets.token_hex(4), stream=stream, config=consumer(first)
    )
    seen = 0
    while seen < count:
        for message in await pull.fetch(min(FETCH, count - seen), timeout=5):
            msgpack.unpackb(message.data)
            await message.ack()
            seen += 1


async def two_pulls(client: Client, stream: str, first: int, count: int) -> None:
    """Two outstanding pull requests and a callback."""
    name, config = secrets.token_hex(4), consumer(first)
    config.durable_name = name
    await client.jetstream().add_consumer(stream, config)
    inbox, done, seen = client.new_inbox(), asyncio.Event(), 0
    request = json.dumps({"batch": PULL, "expires": 5_000_000_000}).encode()
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"

    async def take(message: Any) -> None:
        nonlocal seen
        if message.headers and "Status" in message.headers:
            return
        msgpack.unpackb(message.data)
        await message.ack()
        seen += 1
        if seen % PULL == 0:
            await client.publish(subject, request, reply=inbox)
        if seen >= count:
            done.set()

    subscription = await client.subscribe(inbox, cb=take)
    for _ in range(2):
        await client.publish(subject, request, reply=inbox)
    await done.wait()
    await subscription.unsubscribe()


class Bench:
    """Both clients on one server."""

    def __init__(self, bus: Bus, client: Client, server_pid: int) -> None:
        self.bus, self.client, self._pid = bus, client, server_pid
        self.stream = bus.subjects.stream("ROLLOUTS")

    def _cpu_s(self) -> float:
        """Of this process and the server, which has threads; the kernel counts each in nanoseconds."""
        threads = Path(f"/proc/{self._pid}/task").glob("*/schedstat")
        return time.process_time() + sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    async def _cost(self, act: Awaitable[None]) -> tuple[float, float]:
        """Wall and CPU seconds."""
        began_s, cpu_s = time.perf_counter(), self._cpu_s()
        await act
        return time.perf_counter() - began_s, self._cpu_s() - cpu_s

    async def _last(self) -> int:
        return int((await self.bus.js.stream_info(self.stream)).state.last_seq)

    async def round(self, size: int, number: int, count: int) -> dict[str, tuple[float, float]]:
        """What was done -> seconds of wall and CPU for `count` messages."""
        bus, client, cost = self.bus, self.client, {}
        typed = [rollout(size, number * count + n) for n in range(count)]
        bare = [plain(message, headers=False) for message in typed]
        same, others = ([plain(message) for message in typed] for _ in range(2))
        acts: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("typed publish", lambda: typed_publish(bus, typed)),
            ("publish_async", lambda: raw_publish(client, same)),
            ("publish_async, no headers", lambda: raw_publish(client, bare)),
            ("ack window", lambda: window_publish(client, others)),
        ]
        at: dict[str, int] = {}
        for name, act in acts[number % 2 :] + acts[: number % 2]:  # no one is always first
            at[name] = await self._last() + 1
            cost[name] = await self._cost(act())
        ours, theirs, bare_at = at["typed publish"], at["publish_async"], at["publish_async, no headers"]
        cost["typed consume"] = await self._cost(typed_consume(bus, ours))
        cost["fetch + ack"] = await self._cost(raw_consume(client, self.stream, theirs, count))
        cost["fetch + ack, no headers"] = await self._cost(raw_consume(client, self.stream, bare_at, count))
        cost["two pulls"] = await self._cost(two_pulls(client, self.stream, theirs, count))
        await bus.js.purge_stream(self.stream)
        return cost


def touch_pages(folder: Path) -> None:
    """Leave the kernel free pages that were in use before: the host of a virtual machine gives a page when it is first
    touched, which takes ten times as long as writing it, and only the stream's pages are freed and used again here."""
    path = folder / "touched"
    with path.open("wb") as file:
        for _ in range(TOUCHED_MIB):
            file.write(bytes(1 << 20))
    path.unlink()


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory() as name:
        touch_pages(Path(name))
        settings = ServerSettings(folder=Path(name) / "nats", port=free_port(), token="t")
        server = subprocess.Popen(settings.command(), stdin=subprocess.DEVNULL)  # noqa: ASYNC220
        try:
            await wait_listening(settings.port)
            store = ObstoreBlobs.open(str(Path(name) / "store"))
            async with (
                await Bus.connect(settings.url, "bench", token="t", store=store) as bus,
                await nats.connect(settings.url, token="t") as client,
            ):
                await Topology(run="bench", max_stream_bytes=1 << 30).apply(bus.js)
                yield Bench(bus, client, server.pid)
        finally:
            server.kill()
            server.wait()


def checks(size: int) -> dict[str, float]:
    """Microseconds of CPU that each part of a typed message costs beyond the bus; the least of many repeats."""
    message = rollout(size, 1)
    envelope, (fields, _) = Envelope.seal(message), plain(message)
    body = envelope.body
    parts: dict[str, Callable[[], object]] = {
        "pack": lambda: pack(message),
        "pack by hand": lambda: pack_by_hand(fields),
        "seal": lambda: Envelope.seal(message),
        "digest": lambda: digest_of(body),
        "unpack by hand": lambda: msgpack.unpackb(body),
        "unpack, validate": lambda: unpack(Rollout, body),
        "open": lambda: open_envelope(Rollout, envelope.headers, body),
    }
    return {name: min(timeit.repeat(act, number=20, repeat=200)) / 20 * 1e6 for name, act in parts.items()}


async def run(rounds: int, mib: int) -> tuple[dict[str, float], dict[str, list[Any]]]:
    figures: dict[str, float] = {}
    targets: dict[str, list[Any]] = {}
    print(f"{'body':>8}  {'what':<28}{'messages/s':>12}{'of plain':>10}{'spread':>14}{'by CPU':>10}")
    async with connected() as bench:
        for size in SIZES:
            count = max(48, min(2000, (mib << 20) // size))
            taken = [await bench.round(size, number, count) for number in range(rounds)]
            for ours, base, fast in (("typed publish", "publish_async", "ack window"),
                                     ("typed consume", "fetch + ack", "two pulls")):  # fmt: skip
                for what in (ours, base, f"{base}, no headers", fast):
                    rate = statistics.median(count / one[what][0] for one in taken)
                    wall = sorted(one[base][0] / one[what][0] for one in taken)
                    cpu = statistics.median(one[base][1] / one[what][1] for one in taken)
                    spread = f"{wall[len(wall) // 4]:.2f}-{wall[-1 - len(wall) // 4]:.2f}"
                    of_base = statistics.median(wall)
                    print(f"{size // 1000:>5} KB  {what:<28}{rate:>12,.0f}{of_base:>10.2f}{spread:>14}{cpu:>10.2f}")
                    key = f"{what.replace(' + ', '_').replace(', ', '_').replace(' ', '_')}_{size // 1000}kb"
                    figures |= {f"{key}_per_s": round(rate), f"{key}_ratio": round(of_base, 3)}
                    figures[f"{key}_cpu_ratio"] = round(cpu, 3)
                    if what == ours:
                        targets[f"{key}_cpu_ratio"] = [round(cpu, 3), ">=", TARGET, cpu >= TARGET]
    for size in SIZES:
        cost = checks(size)
        print(f"{size // 1000:>5} KB  " + "  ".join(f"{name} {us:.1f}" for name, us in cost.items()) + "  µs")
        figures |= {f"{name.replace(', ', '_').replace(' ', '_')}_{size // 1000}kb_us": round(us, 2)
                    for name, us in cost.items()}  # fmt: skip
    return figures, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=16, help="bytes a round and size")
    args = parser.parse_args()
    figures, targets = uvloop.run(run(args.rounds, args.mib))
    print(json.dumps({"name": "bus", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
