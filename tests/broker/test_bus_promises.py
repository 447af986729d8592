"""The bus against a real nats-server: what is acknowledged stays, what is wrong is buried."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import uvloop

from headway.bus import connection, rpc
from headway.bus.connection import Bus, StoredMessage, StreamFull
from headway.bus.leases import TaskQueue
from headway.bus.ledger import LedgerReader, LedgerTail, LedgerWriter
from headway.bus.reader import follow, read_all, read_batch
from headway.bus.server import ServerSettings, free_port, wait_listening
from headway.schemas.errors import FencedOut, InputError, PromiseViolated, UnavailableError, WireError
from headway.schemas.ledger import Open
from headway.schemas.messages import Dead, Event, Rollout, Signed, Task
from headway.schemas.signing import create_key, load_key, public_key
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version


def make_task(index: int) -> Task:
    return Task(
        rollout_id=f"g{index}",
        purpose="train",
        env="expr",
        task_set="0" * 64,
        task_id="t1",
        group=index,
        sample=0,
        temperature=1.0,
        sampling_seed=1,
        groups_issued=index + 1,
        eval_blocks_issued=0,
        last_of_unit=True,
    )


def make_rollout(tokens: int) -> Rollout:
    mask = np.ones(tokens, np.uint8)
    mask[0] = 0
    trajectory = Trajectory(
        token_ids=np.arange(tokens, dtype=np.int32) % 256,
        loss_mask=mask,
        logprobs=np.where(mask == 1, -0.5, 0).astype(np.float32),
        spans=[Span(start=1, end=tokens, version=Version(0, 0))],
        routes=np.zeros((tokens - 1, 3, 2), np.uint8),
        route_spans=[Span(start=0, end=tokens - 1, version=Version(0, 0))],
        layer_map=[0, 1, 2],
        temperature=1.0,
        turns=1,
        stop_reason="submitted",
    )
    return Rollout(
        rollout_id="g1",
        attempt="a1",
        purpose="train",
        outcome="ok",
        terminal=True,
        group=1,
        sample=0,
        task_id="t1",
        task_seq=1,
        delivery=1,
        region="east",
        agent="a",
        reward=1.0,
        trajectory=trajectory,
        verdict=Signed(payload=b"", signature=b""),
    )


async def test_acknowledged_messages_survive_a_killed_server(bus: Bus, nats_process) -> None:
    for index in range(50):
        await bus.publish(bus.subjects.task("expr"), make_task(index))
    nats_process.kill()
    await nats_process.start()
    seen = [stored.seq async for stored in read_all(bus, "TASKS")]
    assert seen == list(range(1, 51))


async def test_publish_waits_for_a_server_that_comes_back_and_stores_once(bus: Bus, nats_process) -> None:
    await bus.publish(bus.subjects.task("expr"), make_task(0))
    nats_process.kill()
    publishing = asyncio.create_task(bus.publish(bus.subjects.task("expr"), make_task(1)))
    await asyncio.sleep(0.3)
    await nats_process.start()
    assert await publishing == 2
    assert await bus.publish(bus.subjects.task("expr"), make_task(1)) == 2


def many_tasks(bus: Bus, count: int) -> Iterator[tuple[str, Task]]:
    return ((bus.subjects.task("expr"), make_task(index)) for index in range(count))


async def test_many_are_published_in_order_with_few_acknowledgements_awaited(bus: Bus, monkeypatch) -> None:
    monkeypatch.setattr(connection, "ACKS_WAITED_MAX", 8)
    begun = []

    def drawn() -> Iterator[tuple[str, Task]]:
        for one in many_tasks(bus, 50):
            begun.append(len(bus._acks._waiting))
            yield one

    assert await bus.publish_all(drawn()) == list(range(1, 51))
    assert max(begun) < 8
    found = [(await bus.open(Task, stored)).group async for stored in read_all(bus, "TASKS")]
    assert found == list(range(50))
    assert not bus._acks._waiting


async def test_many_are_published_although_the_server_dies_meanwhile(bus: Bus, nats_process) -> None:
    await bus.publish(bus.subjects.task("expr"), make_task(0))
    nats_process.kill()
    publishing = asyncio.create_task(bus.publish_all(many_tasks(bus, 20)))
    await asyncio.sleep(0.3)
    await nats_process.start()
    assert sorted(await publishing) == list(range(1, 21))


async def test_many_bodies_go_through_the_store_together_and_arrive_in_order(bus: Bus, monkeypatch) -> None:
    subject, big = bus.subjects.rollout("east", "a"), make_rollout(40_000)
    many = [big if n % 3 else make_rollout(40) for n in range(20)]
    under_way, put = [0], bus.store.put

    async def counted(key: str, data: bytes) -> None:
        under_way.append(under_way[-1] + 1)
        await put(key, data)
        under_way.append(under_way[-1] - 1)

    monkeypatch.setattr(bus.store, "put", counted)
    made = [(subject, one.model_copy(update={"attempt": f"a{n}"})) for n, one in enumerate(many)]
    assert await bus.publish_all(made) == list(range(1, 21))
    assert 1 < max(under_way) <= connection.CLAIMS_AT_ONCE
    assert [(await bus.open(Rollout, one)).attempt async for one in read_all(bus, "ROLLOUTS")] == [
        f"a{n}" for n in range(20)
    ]
    monkeypatch.setattr(bus, "store", None)
    with pytest.raises(UnavailableError, match="object store"):
        await bus.publish_all([(subject, big)])


async def test_a_stream_that_is_full_ends_the_publishing_of_many(bus: Bus) -> None:
    config = (await bus.js.stream_info(bus.subjects.stream("TASKS"))).config
    await bus.js.update_stream(config.evolve(max_msgs=10))
    with pytest.raises(StreamFull):
        await bus.publish_all(many_tasks(bus, 30))
    assert not bus._acks._waiting


async def test_big_messages_are_read_without_tripping_the_servers_pending_limit(bus: Bus) -> None:
    subject, body, count = bus.subjects.rollout("east", "a"), b"x" * 600_000, 160  # 96 MB, and 64 MiB may be pending
    for _ in range(count):
        await bus.js.publish(subject, body)

    async def read() -> list[int]:
        return [stored.seq async for stored in read_all(bus, "ROLLOUTS")]

    reading = asyncio.create_task(read())
    await bus.client.flush()
    time.sleep(1.0)  # noqa: ASYNC251  # the reader is busy, and everything that it asked for waits at the server
    assert await reading == list(range(1, count + 1))
    assert bus.client.stats["reconnects"] == 0


async def test_a_large_body_travels_as_claim_check_and_a_changed_object_is_refused(bus: Bus, tmp_path) -> None:
    rollout = make_rollout(40_000)
    await bus.publish(bus.subjects.rollout("east", "a"), rollout)
    [stored] = await read_batch(bus, "ROLLOUTS", 1)
    assert len(stored.body) < 1000
    assert np.array_equal((await bus.open(Rollout, stored)).trajectory.token_ids, rollout.trajectory.token_ids)
    [blob] = (tmp_path / "store" / "test" / "blobs").iterdir()
    blob.write_bytes(blob.read_bytes()[:-1] + b"\xff")
    with pytest.raises(WireError, match="digest"):
        await bus.open(Rollout, stored)
    blob.unlink()
    with pytest.raises(WireError, match="gone"):
        await bus.open(Rollout, stored)


async def test_what_cannot_be_decoded_lands_in_dead_with_its_reason(bus: Bus) -> None:
    await bus.js.publish(bus.subjects.task("expr"), b"\xc1garbage", headers={"Headway-Kind": "task"})
    assert await TaskQueue(bus).fetch(1) == []
    dead = await bus.last("EVENTS")
    assert dead is not None
    assert dead.subject == "rl.test.dead.unknown_schema"
    assert (await bus.open(Dead, dead)).body == b"\xc1garbage"


async def test_a_header_that_disagrees_with_its_body_is_refused(bus: Bus) -> None:
    await bus.publish(bus.subjects.task("expr"), make_task(3))
    [stored] = await read_batch(bus, "TASKS", 1)
    lying = StoredMessage(stored.subject, 1, {**stored.headers, "Headway-Rollout": "g4"}, stored.body)
    with pytest.raises(WireError) as caught:
        await bus.open(Task, lying)
    assert caught.value.reason == "header_mismatch"


async def test_a_lease_that_is_not_renewed_is_delivered_again(bus: Bus) -> None:
    await bus.publish(bus.subjects.task("expr"), make_task(0))
    first, second = TaskQueue(bus), TaskQueue(bus)
    [lease] = await first.fetch(1)
    assert await second.fetch(1, 0.3) == []
    [again] = await second.fetch(1, 3)
    assert (again.seq, again.delivery) == (lease.seq, 2)
    await again.ack()


async def test_a_renewed_lease_is_not_delivered_again(bus: Bus) -> None:
    await bus.publish(bus.subjects.task("expr"), make_task(0))
    [lease] = await TaskQueue(bus).fetch(1)
    with lease.keeping(0.3):
        assert await TaskQueue(bus).fetch(1, 2.5) == []


async def test_a_task_that_is_delivered_again_to_who_works_on_it_is_not_begun_again(bus: Bus) -> None:
    await bus.publish(bus.subjects.task("expr"), make_task(0))
    queue = TaskQueue(bus)
    [lease] = await queue.fetch(1)
    with lease.keeping(60):  # as if the server had stood still: it hears of no renewal in time
        first = lease._message
        assert await queue.fetch(1, 3) == []
        assert lease._message is not first, "nothing was delivered again"
        await lease.ack()
    assert await TaskQueue(bus).fetch(1, 2.5) == []


async def test_a_task_that_comes_again_before_work_on_it_began_is_handed_out_once(bus: Bus) -> None:
    await bus.publish(bus.subjects.task("expr"), make_task(0))
    queue = TaskQueue(bus)
    [lease] = await queue.fetch(1)
    assert await queue.fetch(1, 3) == []
    await lease.ack()


@pytest.mark.parametrize("others", [0, 2])
async def test_a_task_whose_acknowledgement_was_lost_is_acknowledged_again(bus: Bus, monkeypatch, others: int) -> None:
    await bus.publish(bus.subjects.task("expr"), make_task(0))
    queue = TaskQueue(bus)
    [lease] = await queue.fetch(1)
    with monkeypatch.context() as lost:
        lost.setattr(type(lease._message), "ack", lambda _: asyncio.sleep(0))
        await lease.ack()
    for index in range(others):
        await bus.publish(bus.subjects.task("expr"), make_task(1 + index))
        [other] = await queue.fetch(1)
        await other.ack()
    assert len(queue._leases) == 1, "of tasks that ended before the last fetch their sequences are enough"
    assert await queue.fetch(1, 3) == []
    assert await TaskQueue(bus).fetch(1, 2.5) == []


async def test_a_task_that_was_given_back_or_left_is_begun_again(bus: Bus) -> None:
    for index in range(2):
        await bus.publish(bus.subjects.task("expr"), make_task(index))
    queue = TaskQueue(bus)
    given, left = await queue.fetch(2)
    with left.keeping(60):
        pass
    await given.give_back()
    again = []
    while len(again) < 2:
        for lease in await queue.fetch(1, 20):
            again.append(lease.seq)
            await lease.ack()  # else its own deadline would race with the other's
    assert sorted(again) == [1, 2]


async def test_follow_survives_a_killed_server(bus: Bus, nats_process) -> None:
    await bus.publish(bus.subjects.task("expr"), make_task(0))
    seen = []

    async def watch() -> None:
        async for stored in follow(bus, "TASKS", 1):
            seen.append(stored.seq)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.2)
    nats_process.kill()
    await nats_process.start()
    await bus.publish(bus.subjects.task("expr"), make_task(1))
    await asyncio.sleep(1.0)
    watching.cancel()
    assert seen == [1, 2]


@pytest.fixture
def key(tmp_path) -> bytes:
    create_key(tmp_path / "key")
    return load_key(tmp_path / "key")


def opening(name: str) -> Open:
    return Open(instance=name, environment={})


async def test_an_older_term_can_no_longer_append(bus: Bus, key: bytes) -> None:
    old = LedgerWriter(bus, key, LedgerTail())
    await old.append(opening("old"), Version(0, 0), term=1)
    new = LedgerWriter(bus, key, old.tail)
    await new.append(opening("new"), Version(0, 0), term=2)
    with pytest.raises(FencedOut):
        await old.append(opening("old"), Version(0, 0))
    links = await LedgerReader(bus, public_key(key)).read_new()
    assert [link.record.term for link in links] == [1, 2]


async def test_a_lost_acknowledgement_of_an_append_is_recognised(bus: Bus, key: bytes, monkeypatch) -> None:
    writer = LedgerWriter(bus, key, LedgerTail())
    real = bus.publish

    async def stored_but_unacknowledged(*args, **kwargs):
        await real(*args, **kwargs)
        raise UnavailableError("no acknowledgement")

    monkeypatch.setattr(bus, "publish", stored_but_unacknowledged)
    link = await writer.append(opening("a"), Version(0, 0), term=1)
    assert link.seq == 1


async def test_a_reader_hands_out_what_it_passed_when_the_server_goes_away_midway(bus: Bus, key: bytes) -> None:
    writer, reader = LedgerWriter(bus, key, LedgerTail()), LedgerReader(bus, public_key(key))
    await writer.append(opening("a"), Version(0, 0), term=1)
    real, away = bus.read_batch, False

    async def once_then_away(*args):
        nonlocal away
        if away:
            raise UnavailableError("the server went away")
        away = True
        return await real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bus, "read_batch", once_then_away)
        assert [link.seq for link in await reader.read_new()] == [1]
        with pytest.raises(UnavailableError):
            await reader.read_new()
    await writer.append(opening("b"), Version(0, 0), term=2)
    assert [link.seq for link in await reader.read_new()] == [2]


async def test_a_forged_or_unchained_record_stops_every_reader(bus: Bus, key: bytes, tmp_path) -> None:
    writer = LedgerWriter(bus, key, LedgerTail())
    await writer.append(opening("a"), Version(0, 0), term=1)
    create_key(tmp_path / "other")
    forger = LedgerWriter(bus, load_key(tmp_path / "other"), writer.tail)
    await forger.append(opening("b"), Version(0, 0), term=2)
    with pytest.raises(PromiseViolated, match="signature"):
        await LedgerReader(bus, public_key(key)).read_new()
    unchained = LedgerWriter(bus, key, dataclasses.replace(forger.tail, digest="1" * 64))
    await unchained.append(opening("c"), Version(0, 0), term=3)
    reader = LedgerReader(bus, None)
    with pytest.raises(PromiseViolated, match="chain"):
        await reader.read_new()


async def test_a_failed_request_reaches_the_caller_as_what_why_and_hint(bus: Bus) -> None:
    async def handler(fields):
        if fields.get("x") == 1:
            raise InputError("x is 1", why="because", hint="use 2")
        raise ZeroDivisionError

    async with asyncio.TaskGroup() as tasks:
        await rpc.serve(bus.client, "rl.test.sandbox.east.create", handler, tasks=tasks)
        with pytest.raises(InputError, match="because"):
            await rpc.call(bus.client, "rl.test.sandbox.east.create", {"x": 1}, timeout_s=2)
        with pytest.raises(UnavailableError, match="ZeroDivisionError"):
            await rpc.call(bus.client, "rl.test.sandbox.east.create", {"x": 2}, timeout_s=2)
    with pytest.raises(UnavailableError):
        await rpc.call(bus.client, "rl.test.sandbox.west.create", {}, timeout_s=0.5)


async def test_a_reader_tells_when_the_server_stored_a_message(bus: Bus) -> None:
    before_s = time.time()
    for index in range(2):
        await bus.publish(bus.subjects.task("expr"), make_task(index))
    first, second = [stored.time_s async for stored in read_all(bus, "TASKS")]
    assert before_s - 1e-3 <= first <= second <= time.time() + 1e-3


async def test_an_event_round_trips(bus: Bus) -> None:
    event = Event(service="trainer", instance="t", name="step", fields={"a": 1, "b": 0.5, "c": "x"})
    await bus.publish(bus.subjects.event("trainer", "step"), event)
    stored = await bus.last("EVENTS")
    assert stored is not None
    assert await bus.open(Event, stored) == event


def test_a_bus_closes_quietly_after_its_server_went_away(tmp_path: Path) -> None:
    async def main() -> None:
        settings = ServerSettings(folder=tmp_path, port=free_port(), token="t")
        with subprocess.Popen(settings.command()) as server:  # noqa: ASYNC220
            await wait_listening(settings.port)
            async with await Bus.connect(settings.url, "r", token="t") as bus:
                server.kill()
                while bus.client.is_connected:
                    await asyncio.sleep(0.01)
                await bus.client.publish("rl.r.x", b"pending")

    uvloop.run(main())  # as services do: asyncio's own loop ignores such a write
