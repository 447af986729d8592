"""Watching and steering a run on a real bus with scripted agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.bus.service import Service, Settings, reachable
from headway.deploy import control, dead, drift, inspect, tail, top
from headway.deploy.fleet import Fleet
from headway.deploy.local import embedded_bus, topology
from headway.deploy.run_folder import RunFolder
from headway.deploy.watchdog import Watchdog
from headway.schemas.config import parse_config
from headway.schemas.errors import InputError, UnavailableError, WireError
from headway.schemas.messages import Rollout, Task
from headway.schemas.version import Version
from headway.trainer import dispatcher
from headway.trainer.audit import audit

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "listen", lambda bus: _listen(bus))


async def _listen(bus: Any) -> Fleet:
    from headway.deploy.fleet import listen

    return await listen(bus, 1.2)


def answer_of(run: Any) -> Any:
    def answer(task: Task, head: Version) -> Any:
        rollout = run.graded(task, float(task.sampling_seed % 2), head)
        return rollout.model_copy(update={"reward": 0.5}) if (task.group, task.sample) == (0, 0) else rollout

    return answer


def reachably(main: Any) -> Any:
    async def run(service: Any) -> None:
        async with reachable(service):
            await main(service)

    return run


async def test_a_paused_dispatcher_issues_nothing_until_resumed_and_a_drained_one_ends(make_run: Make) -> None:
    run, said = make_run(steps=200), list[str]()
    async with (
        run.agent(answer_of(run)),
        run.trainer(),
        run.service("dispatcher", reachably(dispatcher.main)) as service,
    ):
        await run.wait_for_step(2)
        await control.tell(run.bus, "dispatcher", None, "pause", said.append)
        await asyncio.sleep(0.3)
        before = (await run.bus.last("TASKS")).seq
        await asyncio.sleep(0.7)
        assert (await run.bus.last("TASKS")).seq == before
        assert service.status["phase"] == "paused"
        await control.tell(run.bus, "dispatcher", "one", "resume", said.append)
        while (await run.bus.last("TASKS")).seq == before:
            await asyncio.sleep(0.05)
        await control.tell(run.bus, "dispatcher", None, "drain", said.append)
        assert service.stop.is_set()
        with pytest.raises(UnavailableError, match="no sandbox of run test is heard"):
            await control.tell(run.bus, "sandbox", None, "drain", said.append)
    assert [line.split(",")[0] for line in said] == [f"dispatcher one: {v} taken" for v in ("pause", "resume", "drain")]


async def test_a_stalled_run_names_the_paused_or_missing_dispatcher(make_run: Make) -> None:
    run, said = make_run(steps=200), list[str]()
    fleet = Fleet(clock=asyncio.get_running_loop().time)
    await fleet.hear(run.bus)
    dog = Watchdog(fleet=fleet, stall_s=4.0, say=said.append, expected=["one"])
    async with run.agent(answer_of(run)), run.trainer(), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(dog.run())
        async with run.service("dispatcher", reachably(dispatcher.main)):
            await run.wait_for_step(1)
            await control.tell(run.bus, "dispatcher", None, "pause", lambda line: None)
            async with asyncio.timeout(30):
                while not said:
                    await asyncio.sleep(0.1)
        async with asyncio.timeout(30):
            while len(said) < 2:
                await asyncio.sleep(0.1)
        watching.cancel()
    paused, missing = "one is paused: `headway resume` lets it issue again", "no heartbeat of one, last phase 'paused'"
    assert said == [f"no step, rollout or swap for 4 s: {why}" for why in (paused, missing)]


async def test_a_rollback_waits_for_the_trainer_to_stop_and_is_announced(make_run: Make) -> None:
    run, said = make_run(steps=3), list[str]()
    key = (run.folder / "keys" / "trainer.key").read_bytes()
    from headway.trainer import service as trainer_service

    async with run.agent(answer_of(run)), run.dispatcher(), run.service("trainer", reachably(trainer_service.main)):
        await run.wait_for_step(3)
        with pytest.raises(InputError, match="trainer one is running"):
            await control.rollback(run.bus, key, Version(0, 1), said.append)
    await control.rollback(run.bus, key, Version(0, 1), said.append)
    assert said == ["version 1.1 has the weights of 0.1; training goes on from it at the next start"]
    assert (await run.history()).head == Version(1, 1)
    last = await run.bus.last("EVENTS")
    assert (await tail.line_of(run.bus, last, ())).split() == ["rolled_back", "headway/cli", "version=1.1", "base=0.1"]
    assert await tail.line_of(run.bus, last, ["step"]) is None


async def test_what_is_known_of_a_run_is_shown_escaped(make_run: Make) -> None:
    run = make_run(steps=2)
    async with run.agent(answer_of(run)), run.dispatcher(), run.trainer():
        await run.wait_for_step(2)
        while len([s async for s in read_all(run.bus, "EVENTS", filter_subject="rl.test.event.trainer.step")]) < 2:
            await asyncio.sleep(0.05)
        said: list[str] = []
        watching = asyncio.create_task(top.watch(run.bus, run.config, said.append, once=True, screen=False))
        await asyncio.sleep(0.5)
        await run.bus.beat("agent", "scripted", {"phase": "rolling\x1b[2J out", "served": "0.2", "sessions": 4})
        await watching
    screen = said[0]
    assert "step 2/2   version 0.2   term 1" in screen
    assert "trained 8   dropped 2 (bad_verdict 1, group_incomplete 1)   dead letters 1" in screen
    assert "(bound 2, masked 0)" in screen
    assert "scripted              0.2" in screen
    assert r"rolling\x1b[2J out  sessions=4" in screen
    assert "\x1b" not in screen

    trained = (await run.history()).last_step.consumed[0].rollout_id
    found = await inspect.rollout(run.bus, trained)
    assert found["fate"].startswith("trained by step 0.")
    assert found["task"]["group"] == int(trained[1:8])
    text = "\n".join(inspect.lines(found))
    assert "transcript:" in text
    assert "verdict:" in text
    assert text.replace("\n", "").isprintable()
    assert "dropped as bad_verdict" in (await inspect.rollout(run.bus, "g0000000s000"))["fate"]
    step = await inspect.step(run.bus, Version(0, 2))
    assert (step["parent"], len(step["trained on"])) == ("0.1", 4)
    assert step["event"]["step"] == 2
    version = await inspect.version(run.bus, Version(0, 2))
    assert version["bound by"].startswith("step, ledger sequence")
    assert (await inspect.version(run.bus, Version(0, 0)))["bound by"].startswith("genesis")
    for look, what in ((inspect.rollout, "nobody"), (inspect.step, Version(0, 9)), (inspect.version, Version(3, 0))):
        with pytest.raises(InputError):
            await look(run.bus, what)


async def test_dead_letters_are_listed_shown_retried_once_and_dropped(make_run: Make) -> None:
    run, said = make_run(steps=2), list[str]()
    async with run.agent(answer_of(run)), run.dispatcher(), run.trainer():
        await run.wait_for_step(2)
    await dead.show_all(run.bus, said.append)
    assert "bad_signature" in said[0]
    assert said[-1] == "1 dead letters"
    seq = int(said[0].split()[0])
    await dead.show(run.bus, seq, said.append)
    assert "follows from its verdict" in said[-1]
    before = [s async for s in read_all(run.bus, "ROLLOUTS")]
    await dead.retry(run.bus, seq, said.append)
    await dead.retry(run.bus, seq, said.append)
    assert "is published again" in said[-2]
    assert "was published again before" in said[-1]
    after = [s async for s in read_all(run.bus, "ROLLOUTS")]
    assert len(after) == len(before) + 1
    assert (await run.bus.open(Rollout, after[-1])).rollout_id == "g0000000s000"
    assert after[-1].body == next(s.body for s in before if s.seq == int(said[0].split()[3]))
    report = await audit(run.bus)
    assert (report.violations, report.duplicates) == ([], 1)
    await dead.drop(run.bus, seq, said.append)
    with pytest.raises(InputError, match="no dead letter"):
        await dead.show(run.bus, seq, said.append)


@pytest.mark.parametrize("suffix", ["TASKS", "LEDGER"])
async def test_what_is_continued_from_its_last_message_is_never_published_again(make_run: Make, suffix: str) -> None:
    run = make_run(steps=1)
    async with run.agent(answer_of(run)), run.dispatcher(), run.trainer():
        await run.wait_for_step(1)
    stored = await run.bus.last(suffix)
    await run.bus.bury(stored, WireError("invalid", "scripted"))
    letter = await run.bus.last("EVENTS")
    with pytest.raises(InputError, match="cannot be published again"):
        await dead.retry(run.bus, letter.seq, print)
    assert (await run.bus.last(suffix)).seq == stored.seq
    other = await run.bus.last("EVENTS", "rl.test.event.>")
    with pytest.raises(InputError, match="no dead letter"):
        await dead.drop(run.bus, other.seq, print)


async def test_the_operator_hears_and_steers_services_across_the_accounts_of_a_runs_own_server(tmp_path: Path) -> None:
    config, said = parse_config("[run]\nname = 'r'\n[model]\nbase = '/base'\n", "x"), list[str]()
    folder = RunFolder(tmp_path / "r")
    folder.prepare(config)
    async with asyncio.TaskGroup() as tasks, embedded_bus(config, folder, tasks, said.append) as (_, children, bus):
        await drift.apply(bus, topology(config))
        env = folder.environment("dispatcher", config) | {
            "HEADWAY_NATS_URL": children.nats_url,
            "HEADWAY_RUN_DIR": str(folder.path),
            "HEADWAY_INSTANCE": "d",
        }
        login = Settings.from_env(config, "dispatcher", env)
        names = {"user": login.nats_user, "password": login.nats_password}
        async with await Bus.connect(children.nats_url, "r", **names) as own, asyncio.TaskGroup() as serving:
            service = Service(
                name="dispatcher", config=config, settings=login, bus=own, store=bus.store, tasks=serving,
                stop=asyncio.Event(), status={"phase": "issuing"},
            )  # fmt: skip
            async with reachable(service):
                await control.tell(bus, "dispatcher", None, "drain", said.append)
            assert service.stop.is_set()
    assert said[-1] == "dispatcher d: drain taken, phase issuing"
