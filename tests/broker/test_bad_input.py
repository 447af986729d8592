"""P11: what is malformed, too large, too new or in the way is refused; it is never trained on and crashes nothing."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import structlog

from headway.bus import rpc
from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.reader import read_all, read_at, read_batch
from headway.bus.server import find_nats_server, free_port, wait_listening
from headway.deploy import summary
from headway.deploy.cli import main as cli
from headway.schemas.errors import UnavailableError, WireError
from headway.schemas.messages import Dead, Event, Rollout
from headway.schemas.version import Version
from headway.schemas.wire import BODY_BYTES_MAX, H_CLAIM, H_DIGEST, H_SCHEMA, Envelope, digest_of
from headway.trainer.audit import audit
from headway.trainer.dispatcher import Plan, TaskSet

Make = Callable[..., Any]
GARBAGE = (b"", b"\xc1", b"\x81", b"\x91" * 4000, msgpack.packb({"rollout_id": "../../x"}), b"{}")


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """Commands configure logging for their process, which here is the tests'."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def reward_of(task: Any) -> float:
    return float(task.sample)


def task_of(run: Any, group: int, sample: int) -> Any:
    return Plan(config=run.config, tasks=TaskSet.load(run.folder / "tasks")).group(group, 0)[sample]


async def litter(bus: Bus) -> None:
    """Garbage among the tasks, again and again."""
    while True:
        await bus.js.publish(bus.subjects.task("expr"), b"\xc1")
        await asyncio.sleep(0.05)


async def finish(run: Any, steps: int) -> Any:
    async with run.dispatcher(), run.trainer(), run.agent(lambda task, head: run.graded(task, reward_of(task), head)):
        return await run.wait_for_step(steps)


async def dead(bus: Bus) -> list[Dead]:
    return [await bus.open(Dead, stored) async for stored in read_all(bus, "EVENTS", filter_subject="rl.test.dead.>")]


async def test_garbage_among_the_tasks_fences_no_dispatcher_out(make_run: Make) -> None:
    run = make_run(steps=3)
    littering = asyncio.create_task(litter(run.bus))
    try:
        await finish(run, 1)
        await finish(run, 3)  # both recover from a stream that ends in garbage
    finally:
        littering.cancel()
    report = await audit(run.bus)
    assert (report.violations, report.trained) == ([], 12)
    assert {letter.reason for letter in await dead(run.bus)} == {"wrong_kind"}


async def send(bus: Bus, subject: str, envelope: Envelope) -> None:
    await bus.js.publish(subject, envelope.body, headers=envelope.headers)


async def test_garbage_on_every_subject_changes_nothing_about_a_run(make_run: Make) -> None:
    run = make_run(steps=3)
    bus, s = run.bus, run.bus.subjects
    stored = [
        s.task("expr"), s.rollout("east", "x"), s.stamp("east", "x"), s.trainer_stamp, s.weights(Version(0, 1)),
        s.weights(Version(9, 9)), s.applied("east", "x"), s.event("x", "step"), s.dead("invalid"),
    ]  # fmt: skip
    heard = [s.beat("agent", "x"), s.ctl("trainer", "one", "status"), s.ctl("dispatcher", "one", "drain")]
    heard += [s.sandbox_create("east"), s.sandbox_verb("east", "h", "tool")]
    for body in GARBAGE:
        for subject in stored:
            kind = subject.split(".")[2].replace("stamp", "trainer_stamp")
            for headers in ({}, {"Headway-Kind": kind, H_SCHEMA: "1", H_DIGEST: digest_of(body)}):
                await bus.js.publish(subject, body, headers=headers)
        for subject in heard:
            await bus.client.publish(subject, body, reply="nobody")
    hostile = Event(service="trainer", instance="x", name="step", fields={"reward_mean": "\x1b[2J", "step": "one"})
    await bus.publish(s.event("trainer", "step"), hostile)
    history = await finish(run, 3)
    report = await audit(bus)
    assert report.violations == []
    assert (report.trained, report.dropped, history.head) == (12, {}, Version(0, 3))
    reading = await summary.read(bus)
    assert sorted(reading.events) == [1, 2, 3]
    found = summary.figures(reading, run.config, rollouts={}, wall_s=1.0)
    assert "\x1b" not in summary.table(found)


async def test_a_rollout_of_a_future_schema_is_kept_aside_and_its_group_ends(make_run: Make) -> None:
    run = make_run(steps=2)
    future = Envelope.seal(run.failed(task_of(run, 0, 0)))
    await send(run.bus, run.bus.subjects.rollout("east", "x"), Envelope({**future.headers, H_SCHEMA: "2"}, future.body))
    await finish(run, 2)
    [refused] = [one for one in await dead(run.bus) if one.subject.startswith("rl.test.rollout")]
    assert refused.reason == "unknown_schema"
    assert "reads 1" in refused.detail
    assert "upgrade the reader" in refused.detail
    assert (await audit(run.bus)).dropped == {"invalid": 1, "group_incomplete": 1}


async def test_a_claim_of_more_than_a_body_may_have_is_refused_before_it_is_fetched(bus: Bus) -> None:
    claim = {"key": f"test/blobs/{'0' * 64}", "sha256": "0" * 64, "size_bytes": BODY_BYTES_MAX + 1}
    await bus.js.publish(bus.subjects.rollout("east", "x"), msgpack.packb(claim), headers={H_CLAIM: "1"})
    [stored] = await read_batch(bus, "ROLLOUTS", 1)
    with pytest.raises(WireError) as caught:
        await bus.open(Rollout, stored)
    assert caught.value.reason != "blob_lost"


async def test_a_request_that_is_too_large_is_answered_with_an_error(bus: Bus) -> None:
    async def handler(_: Any) -> Any:
        raise AssertionError("must not be called")

    async with asyncio.TaskGroup() as tasks:
        await rpc.serve(bus.client, "rl.test.sandbox.east.create", handler, tasks=tasks)
        reply = await bus.client.request("rl.test.sandbox.east.create", b"\0" * (rpc.RPC_BYTES_MAX + 1), timeout=5)
    error = msgpack.unpackb(reply.data)["error"]
    assert (error["kind"], f"{rpc.RPC_BYTES_MAX + 1} bytes" in error["what"]) == ("input", True)


async def test_a_message_above_the_streams_limit_is_refused_by_the_server(bus: Bus) -> None:
    with pytest.raises(Exception, match=r"10054|maximum"):
        await bus.js.publish(bus.subjects.rollout("east", "x"), b"\0" * (2 << 20))
    assert await bus.last("ROLLOUTS") is None


@pytest.mark.parametrize("url", ["foo://x", "s3://", "/proc/none/store", __file__ + "/store"])
def test_a_store_that_cannot_be_opened_is_named_with_what_to_set(url: str) -> None:
    with pytest.raises(UnavailableError, match="cannot open the store") as caught:
        ObstoreBlobs.open(url)
    assert caught.value.why
    assert "store.url" in caught.value.hint


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening.getsockname()[1]


def test_an_engine_whose_port_is_taken_says_so(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "--port", str(taken), "--set", "engine.numerics=off"]) == 69
    said = capsys.readouterr().err
    assert f"headway: the engine cannot listen on 127.0.0.1:{taken}" in said
    assert "why: " in said
    assert "try: " in said


def test_a_run_whose_embedded_server_finds_its_port_taken_says_so(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headway.deploy import local

    monkeypatch.setattr(local, "free_port", lambda: taken)
    assert cli.main(["up", "--run-dir", str(tmp_path / "r")]) == 69
    said = capsys.readouterr().err
    assert "headway: nats ended with exit code 1" in said
    assert "address already in use" in said
    assert "Traceback" not in said


async def test_a_server_without_jetstream_or_without_the_runs_streams_is_named(tmp_path: Path) -> None:
    port = free_port()
    server = subprocess.Popen([find_nats_server(), "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        await wait_listening(port)
        async with await Bus.connect(f"nats://127.0.0.1:{port}", "test") as bus:
            with pytest.raises(UnavailableError, match="LEDGER from 1") as caught:
                await read_batch(bus, "LEDGER", 1)
    finally:
        server.terminate()
        server.wait(10)
    assert "JetStream is off" in caught.value.why
    assert "headway topology" in caught.value.hint


@pytest.mark.parametrize("status", ["204", "404", "408", "503"])
async def test_a_message_that_poses_as_the_end_of_a_batch_is_a_message(bus: Bus, status: str) -> None:
    subject = bus.subjects.rollout("east", "x")
    posing = {"Status": status, "Nats-Subject": bus.subjects.rollout("west", "y"), "Nats-Sequence": "99"}
    for headers in ({}, posing, {}):
        await bus.js.publish(subject, b"\xc1", headers=headers)
    found = await read_batch(bus, "ROLLOUTS", 1)
    assert [(one.subject, one.seq) for one in found] == [(subject, seq) for seq in (1, 2, 3)]
    posed = await read_at(bus, "ROLLOUTS", 2)
    assert posed is not None
    assert (posed.subject, posed.seq, posed.headers) == (subject, 2, {"Status": status})
    assert await read_at(bus, "ROLLOUTS", 4) is None


async def test_a_listing_of_a_store_that_is_away_says_so_as_every_other_call() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/bucket"
        with pytest.raises(UnavailableError, match=r"^list r/sessions failed 1 time; why: .*try: "):
            _ = [key async for key, _ in ObstoreBlobs.open(address).list("r/sessions")]


@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize("url", ["memory://", "store"])
async def test_a_body_that_was_torn_ends_its_rollout_and_not_who_reads_it(
    bus: Bus, tmp_path: Path, url: str, left: int
) -> None:
    digest = "ab" * 32
    bus.store = ObstoreBlobs.open(url if ":" in url else str(tmp_path / url))
    await bus.store.put(f"test/blobs/{digest}", b"x" * left)
    claim = {"key": f"test/blobs/{digest}", "sha256": digest, "size_bytes": 100_000}
    headers = {H_CLAIM: "1", "Headway-Kind": "rollout", H_SCHEMA: "1", H_DIGEST: digest}
    await bus.js.publish(bus.subjects.rollout("east", "x"), msgpack.packb(claim), headers=headers)
    [stored] = await read_batch(bus, "ROLLOUTS", 1)
    with pytest.raises(WireError) as caught:
        await bus.open(Rollout, stored)
    assert caught.value.reason == "digest_mismatch"
