"""The sandbox service on a real bus: an agent's view of it, from create to a signed verdict, and its drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headway.bus.connection import Bus
from headway.bus.service import Service, Settings
from headway.sandbox import service as sandbox_service
from headway.sandbox.tasks.build import build
from headway.sandbox.tasks.expr import load_task_set
from headway.schemas import expr_protocol as p
from headway.schemas import signing
from headway.schemas.config import Config
from headway.schemas.errors import UnavailableError
from headway.schemas.messages import Signed
from headway.schemas.sections import RunConfig, SandboxConfig


class Running:
    """A sandbox service in this process, and an agent that talks to it."""

    def __init__(self, bus: Bus, service: Service) -> None:
        self.bus, self.service, self.count = bus, service, 0
        self.task_set = load_task_set(service.settings.run_dir / "tasks")

    async def ask(self, verb: str, host: str = "", **fields: Any) -> dict[str, Any]:
        self.count += 1
        subjects = self.bus.subjects
        subject = subjects.sandbox_verb("local", host, verb) if host else subjects.sandbox_create("local")
        fields.setdefault("command_id", f"c{self.count}")
        return await self.bus.request(subject, fields, timeout_s=10.0)


@pytest.fixture
async def running(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setattr(sandbox_service, "DRAIN_S_MAX", 1.0)
    build(0, tmp_path / "tasks", sessions=0)
    config = Config(run=RunConfig(name="test"), sandbox=SandboxConfig(pool_size=2, max_boxes=4))
    settings = Settings(
        nats_url="", run_dir=tmp_path, keys_dir=tmp_path, store_url="", region="local", instance="sandbox-1"
    )
    signing.create_key(settings.sandbox_key())
    async with asyncio.TaskGroup() as tasks:
        stop = asyncio.Event()
        service = Service(
            name="sandbox", config=config, settings=settings, bus=bus, store=bus.store, tasks=tasks, stop=stop
        )
        serving = tasks.create_task(sandbox_service.serve(service))
        async with asyncio.timeout(10):
            while service.status.get("phase") != "serving":
                await asyncio.sleep(0.01)
        yield Running(bus, service)
        stop.set()
        await serving


async def create(running: Running, **changes: Any) -> dict[str, Any]:
    fields = {
        "rollout_id": "g1s1",
        "attempt": "a1",
        "task_set": running.task_set.digest,
        "task_id": "train-000-0",
        **changes,
    }
    return await running.ask("create", **fields)


async def test_an_agent_repairs_a_program_over_the_bus(running: Running) -> None:
    task = running.task_set.tasks["train-000-0"]
    place = await create(running)
    assert place["host"] == "sandbox-1"
    assert (await running.ask("tool", **place, name="r"))["text"] == task.text.rstrip("\n")
    assert (await running.ask("tool", **place, name="w", argument=task.gold))["text"] == "ok"
    assert (await running.ask("tool", **place, name="t"))["text"] == "pass"
    reply = await running.ask("grade", **place, submitted=True, malformed=False)
    key = signing.public_key(signing.load_key(running.service.settings.sandbox_key()))
    verdict = Signed.model_validate(reply["verdict"]).open_verdict(key)
    assert (verdict.reward, verdict.run, verdict.rollout_id, verdict.host) == (1.0, "test", "g1s1", "sandbox-1")
    assert (await running.ask("tool", **place, name="r"))["refused"] == "gone"


async def test_no_reply_before_the_verdict_carries_a_hidden_value(running: Running) -> None:
    place = await create(running)
    replies = [place, await running.ask("tool", **place, name="r"), await running.ask("tool", **place, name="t")]
    assert {key for reply in replies for key in reply} == {"host", "box", "statement", "text", "ok", "ms"}
    assert place["statement"] == ""


async def test_a_repeated_create_makes_one_box(running: Running) -> None:
    assert await create(running, command_id="same") == await create(running, command_id="same")


async def test_a_drain_lets_open_sessions_finish_and_takes_no_new_ones(running: Running) -> None:
    place = await create(running)
    running.service.stop.set()
    await asyncio.sleep(0.3)
    with pytest.raises(UnavailableError):
        await create(running)
    assert (await running.ask("tool", **place, name="t"))["text"].startswith("f(")
    reply = await running.ask("grade", **place, submitted=False, malformed=False)
    assert reply["reward"] == p.REWARD_INVALID


async def test_many_sessions_at_once_get_their_own_answers(running: Running) -> None:
    async def session(number: int) -> None:
        while "refused" in (place := await create(running, task_id=f"train-{number:03d}-1")):
            assert place["refused"] == "busy"
            await asyncio.sleep(0.02)
        await running.ask("tool", **place, name="w", argument=f"x*0+{number}")
        text = (await running.ask("tool", **place, name="t"))["text"]
        assert text.startswith((f"f(0)={number} want", f"f(1)={number} want"))
        await running.ask("destroy", **place)

    async with asyncio.timeout(20):
        await asyncio.gather(*(session(number) for number in range(100, 116)))
