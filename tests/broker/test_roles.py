"""Each role on a real nats-server with its own credentials: its work passes, everything else the server refuses."""

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headway.bus import rpc
from headway.bus.connection import Bus, StreamFull
from headway.bus.leases import TaskQueue
from headway.bus.ledger import LedgerReader, LedgerTail, LedgerWriter
from headway.bus.reader import read_all, read_at
from headway.bus.server import ServerSettings, free_port, wait_listening
from headway.bus.topology import AGENTS_CONSUMER, Topology
from headway.deploy import keys
from headway.schemas.errors import ConfigError, FencedOut, UnavailableError
from headway.schemas.ledger import Open
from headway.schemas.messages import Event, Task
from headway.schemas.subjects import STREAM_SUFFIXES
from headway.schemas.version import Version
from headway.trainer.sweeper import Serving

RUN = "r"
QUIET_S = 0.2
VERSION = Version(0, 1)
OPENED = Open(instance="t", environment={})
SUBJECTS = {
    "task": f"rl.{RUN}.task.expr",
    "rollout": f"rl.{RUN}.rollout.east.a",
    "stamp": f"rl.{RUN}.stamp.east.a",
    "verdict": f"rl.{RUN}.stamp.trainer",
    "weights": f"rl.{RUN}.weights.0.1",
    "applied": f"rl.{RUN}.applied.east.a",
    "ledger": f"rl.{RUN}.ledger.0.1.step",
    "event of another": f"rl.{RUN}.event.nobody.x",
    "purge": f"$JS.API.STREAM.PURGE.HW-{RUN}-LEDGER",
    "purge of tasks": f"$JS.API.STREAM.PURGE.HW-{RUN}-TASKS",
    "delete": f"$JS.API.STREAM.DELETE.HW-{RUN}-LEDGER",
    "erase": f"$JS.API.STREAM.MSG.DELETE.HW-{RUN}-LEDGER",
    "consumer": f"$JS.API.CONSUMER.CREATE.HW-{RUN}-TASKS",
    "drain": f"rl.{RUN}.ctl.trainer.t.drain",
}
MAY = {
    "agent": {"rollout", "stamp", "applied"},
    "sandbox": set(),
    "trainer": {"ledger", "weights", "verdict", "purge of tasks"},
    "dispatcher": {"task"},
    "viewer": set(),
}


class Fleet:
    """A server with the roles' accounts. `refused` collects what it said no to."""

    def __init__(self, folder: Path) -> None:
        keys.create(folder / "keys", RUN)
        self.keys = folder / "keys"
        self.server = ServerSettings(
            folder=folder / "nats", port=free_port(), auth=keys.auth_block(folder / "keys", RUN)
        )
        self.refused: list[str] = []

    async def bus(self, role: str, within: contextlib.AsyncExitStack) -> Bus:
        login = keys.credentials(self.keys, role)
        bus = await within.enter_async_context(
            await Bus.connect(self.server.url, RUN, user=login[keys.USER], password=login[keys.PASSWORD])
        )

        async def on_error(error: Exception) -> None:
            self.refused.append(str(error))

        bus.client._error_cb = on_error
        return bus


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[tuple[Fleet, dict[str, Bus]]]:
    fleet = Fleet(tmp_path)
    with subprocess.Popen(fleet.server.command()) as process:  # noqa: ASYNC220
        try:
            await wait_listening(fleet.server.port)
            async with contextlib.AsyncExitStack() as stack:
                buses = {role: await fleet.bus(role, stack) for role in (*MAY, "operator")}
                await Topology(run=RUN).apply(buses["operator"].js)
                yield fleet, buses
        finally:
            process.terminate()


async def stored(operator: Bus) -> dict[str, int]:
    """Messages in each stream."""
    found = {}
    for suffix in STREAM_SUFFIXES:
        found[suffix] = (await operator.js.stream_info(operator.subjects.stream(suffix))).state.messages
    return found


def task(number: int) -> Task:
    return Task(
        rollout_id=f"t{number}", purpose="train", env="expr", task_set="0" * 64, task_id="t", group=0, sample=number,
        temperature=1.0, sampling_seed=1, pinned=None, groups_issued=1, eval_blocks_issued=0, last_of_unit=True,
    )  # fmt: skip


def event(service: str) -> Event:
    return Event(service=service, instance="i", name="x")


async def test_every_role_can_do_its_work(fleet: tuple[Fleet, dict[str, Bus]]) -> None:
    at, buses = fleet
    trainer, dispatcher, agent, sandbox = (buses[name] for name in ("trainer", "dispatcher", "agent", "sandbox"))
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def hear(message: object) -> None:
        heard.put_nowait(message.subject)  # type: ignore[attr-defined]

    await agent.client.subscribe(agent.subjects.every_weights, cb=hear)
    await buses["viewer"].client.subscribe(agent.subjects.everything, cb=hear)
    await asyncio.gather(*(bus.client.flush() for bus in buses.values()))

    writer = LedgerWriter(trainer, b"k" * 32, LedgerTail())
    await writer.append(OPENED, VERSION, term=1)
    with pytest.raises(FencedOut):
        await LedgerWriter(trainer, b"k" * 32, LedgerTail()).append(OPENED, VERSION, term=2)
    await trainer.publish(SUBJECTS["weights"], event("trainer"))
    assert {await asyncio.wait_for(heard.get(), 5) for _ in range(4)} == {
        SUBJECTS["weights"], trainer.subjects.ledger(VERSION, "open"),
    }  # fmt: skip

    assert await dispatcher.publish(SUBJECTS["task"], task(0), expect_last_seq=0) == 1
    tasks = dispatcher.subjects.stream("TASKS")
    assert (await dispatcher.js.consumer_info(tasks, AGENTS_CONSUMER)).num_pending == 1
    [lease] = await TaskQueue(agent).fetch(4)
    await lease.renew()
    await agent.publish(SUBJECTS["rollout"], event("agent"))
    await lease.ack()
    async with asyncio.timeout(5):
        while (await dispatcher.js.consumer_info(tasks, AGENTS_CONSUMER)).num_ack_pending:
            await asyncio.sleep(0.01)

    serving_versions = Serving(clock=time.monotonic, memory_s=60.0)
    await serving_versions.listen(trainer)
    await trainer.client.flush()
    assert (await trainer.js.consumer_info(tasks, AGENTS_CONSUMER)).ack_floor.stream_seq == 1
    assert await trainer.js.purge_stream(trainer.subjects.stream("ROLLOUTS"), seq=1)
    assert await trainer.js.purge_stream(tasks, seq=1)
    await agent.beat("agent", "i", {"served": "0.1"})
    async with asyncio.timeout(5):
        while serving_versions.versions() != {VERSION}:
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as serving:
        answer = sandbox.subjects.sandbox_create("east")
        await rpc.serve(sandbox.client, answer, _echo, tasks=serving, queue="sandbox")
        await rpc.serve(agent.client, agent.subjects.ctl("agent", "a", "status"), _echo, tasks=serving)
        await asyncio.gather(sandbox.client.flush(), agent.client.flush())
        assert await agent.request(answer, {"x": 1}, timeout_s=5) == {"x": 1}
        assert await buses["operator"].request(agent.subjects.ctl("agent", "a", "status"), {}, timeout_s=5) == {}

    for name, streams in {"trainer": STREAM_SUFFIXES, "viewer": STREAM_SUFFIXES, "agent": ("LEDGER",)}.items():
        for suffix in streams:
            last = await buses[name].last(suffix)
            found = [message.seq async for message in read_all(buses[name], suffix)]
            assert (found[-1] if found else None) == (last.seq if last else None)
    for name in ("agent", "dispatcher", "viewer"):
        assert len(await LedgerReader(buses[name]).read_new()) == 1
    assert (await read_at(trainer, "ROLLOUTS", 1)).subject == SUBJECTS["rollout"]
    for name in ("trainer", "dispatcher", "agent", "sandbox"):
        await buses[name].publish(buses[name].subjects.event(name, "x"), event(name))
        await buses[name].publish(buses[name].subjects.dead("malformed"), event(name))
        await buses[name].beat(name, "i", {})
    assert at.refused == []


async def _echo(fields: dict) -> dict:
    return fields


@pytest.mark.parametrize("role", MAY)
async def test_the_server_refuses_what_a_role_may_not_do(role: str, fleet: tuple[Fleet, dict[str, Bus]]) -> None:
    at, buses = fleet
    bus, operator = buses[role], buses["operator"]
    before = await stored(operator)
    forbidden = {name: subject for name, subject in SUBJECTS.items() if name not in MAY[role]}
    for subject in forbidden.values():
        await bus.client.publish(subject, b"{}")
    await bus.client.flush()
    await asyncio.sleep(QUIET_S)
    assert await stored(operator) == before
    assert len(at.refused) == len(forbidden)
    for subject in forbidden.values():
        assert any(f'violation for publish to "{subject}"'.lower() in text.lower() for text in at.refused), subject


@pytest.mark.parametrize("role", MAY)
async def test_no_reply_subject_carries_a_message_where_the_role_may_not_send_one(
    role: str, fleet: tuple[Fleet, dict[str, Bus]]
) -> None:
    _, buses = fleet
    await buses["trainer"].publish(SUBJECTS["ledger"], event("trainer"))
    await buses["dispatcher"].publish(SUBJECTS["task"], task(0))
    before = await stored(buses["operator"])
    requests = {
        f"$JS.API.DIRECT.GET.HW-{RUN}-LEDGER": {"seq": 1},
        f"$JS.API.DIRECT.GET.HW-{RUN}-LEDGER.>": {},
        f"$JS.API.CONSUMER.MSG.NEXT.HW-{RUN}-TASKS.{AGENTS_CONSUMER}": {"batch": 1, "expires": 100_000_000},
        "$JS.API.INFO": {},
    }
    for subject, fields in requests.items():
        for name in SUBJECTS.keys() - MAY[role] - {"purge", "purge of tasks", "delete", "erase", "consumer", "drain"}:
            await buses[role].client.publish(subject, json.dumps(fields).encode(), reply=SUBJECTS[name])
    await buses[role].client.flush()
    await asyncio.sleep(QUIET_S)
    assert await stored(buses["operator"]) == before


@pytest.mark.parametrize("role", [*MAY, "operator"])
async def test_nobody_hears_what_was_said_to_another(role: str, fleet: tuple[Fleet, dict[str, Bus]]) -> None:
    _, buses = fleet
    heard = []

    async def hear(message: object) -> None:
        heard.append(message)

    for subject in ("_INBOX.>", buses[role].subjects.sandbox_create("east")):
        await buses[role].client.subscribe(subject, cb=hear)
    await buses[role].client.flush()
    others = [bus for name, bus in buses.items() if name != role]
    for bus in others:
        await bus.js.account_info()
    if role != "sandbox":
        with pytest.raises(UnavailableError):
            await buses["agent" if role != "agent" else "viewer"].request(
                buses[role].subjects.sandbox_create("east"), {}, timeout_s=QUIET_S
            )
    await asyncio.sleep(QUIET_S)
    assert heard == []


async def test_an_agent_learns_at_once_that_no_sandbox_answers(fleet: tuple[Fleet, dict[str, Bus]]) -> None:
    _, buses = fleet
    await buses["viewer"].client.subscribe(buses["viewer"].subjects.everything)
    await buses["viewer"].client.flush()
    async with asyncio.timeout(2):
        with pytest.raises(UnavailableError, match="no answer"):
            await buses["agent"].request(buses["agent"].subjects.sandbox_create("east"), {}, timeout_s=60)


async def test_a_full_stream_still_pushes_back_across_accounts(fleet: tuple[Fleet, dict[str, Bus]]) -> None:
    _, buses = fleet
    await Topology(run=RUN, max_stream_bytes=10).apply(buses["operator"].js)
    with pytest.raises(StreamFull):
        await buses["agent"].publish(SUBJECTS["rollout"], event("agent"))


async def test_a_wrong_password_is_refused(fleet: tuple[Fleet, dict[str, Bus]]) -> None:
    at, _ = fleet
    with pytest.raises(UnavailableError, match="cannot connect"):
        await Bus.connect(at.server.url, RUN, user="agent", password="x", wait_s=1.0)


def test_the_server_forgets_in_time_who_asked(tmp_path: Path) -> None:
    keys.create(tmp_path, RUN)
    block = json.loads(keys.auth_block(tmp_path, RUN).removeprefix("accounts: "))
    services = [export for account in block.values() for export in account["exports"] if "service" in export]
    assert services
    assert all(export["response_threshold"] in ("30s", "120s") for export in services)


def test_a_second_call_keeps_every_secret_and_follows_another_run_name(tmp_path: Path) -> None:
    keys.create(tmp_path, "one")
    before = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    keys.create(tmp_path, "two")
    changed = {path.name for path, data in before.items() if path.read_bytes() != data}
    assert changed == {"accounts.conf"}
    assert "HW-two-LEDGER" in (tmp_path / "nats" / "accounts.conf").read_text()


def test_a_role_without_credentials_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        keys.credentials(tmp_path, "agent")
    assert "keys init" in caught.value.hint
