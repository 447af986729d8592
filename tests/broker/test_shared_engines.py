"""An agent on an engine that answers others, too: it yields while they need it, and goes on afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest

from headway.rollout_agent import engine_watch, tenancy
from headway.rollout_agent.window import Window
from headway.schemas.config import parse_config
from headway.schemas.errors import ConfigError
from headway.schemas.sections import RegionConfig

from .agent_stand import in_phase
from .stand_ins import LocalEngine
from .test_agent_long_sessions import LONG, SESSIONS, TURNS, assert_begins_with

SHARED = {"yield_above": 2, "lent_exclusively": True}


@contextlib.asynccontextmanager
async def users(engine: LocalEngine, count: int) -> AsyncIterator[None]:
    """`count` users, each of whom asks again as soon as it is answered."""
    body = {"input_ids": [65, 66, 67], "sampling_params": {"max_new_tokens": 200, "temperature": 1.0}}

    async def ask(http: aiohttp.ClientSession) -> None:
        while True:
            async with http.post(f"{engine.url}/generate", json=body) as reply:
                await reply.read()

    async with aiohttp.ClientSession() as http:
        asking = [asyncio.create_task(ask(http)) for _ in range(count)]
        try:
            yield
        finally:
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr(tenancy, "QUIET_S", 0.5)


async def test_an_agent_yields_to_users_and_goes_on_with_its_sessions_when_they_are_quiet(make_stand: Any) -> None:
    stand = await make_stand(letters=b"rt", sure=3.0, **LONG)
    stand.sandbox.tool_s = 0.2
    await stand.tasks(SESSIONS)
    async with stand.agent(**SHARED) as service:
        await stand.until(lambda: _asked(stand.engine, SESSIONS * 4))
        async with users(stand.engine, 6):
            await stand.until(lambda: in_phase(service, "yielding to users"))
            saved = await stand.saved()
            assert len(saved) == SESSIONS
            assert len([r for r in await stand.rollouts() if r.outcome == "handed_back"]) == SESSIONS
            await asyncio.sleep(1.0)
            assert service.status["sessions"] == 0, "it begins a session while users need the engine"
        stand.sandbox.tool_s = 0.0
        done = [r for r in await stand.until(lambda: stand.all_ended(SESSIONS)) if r.terminal]
    for rollout in done:
        assert rollout.outcome == "ok"
        assert_begins_with(rollout.trajectory, saved[rollout.rollout_id])
        stand.assert_replays(rollout.trajectory)
    assert max(rollout.trajectory.turns for rollout in done) == TURNS


async def test_as_many_users_as_are_allowed_disturb_nobody(make_stand: Any) -> None:
    stand = await make_stand()
    async with stand.agent(**SHARED), users(stand.engine, 2):
        await stand.tasks(12)
        done = await stand.until(lambda: stand.all_ended(12))
    assert {rollout.outcome for rollout in done} == {"ok"}
    for rollout in done:
        stand.assert_replays(rollout.trajectory)


async def test_outside_its_window_an_engine_holds_no_weights_and_is_loaded_again_in_the_next_one(
    make_stand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour, day = 23, datetime(2026, 11, 29, tzinfo=UTC)
    night = Window.of(RegionConfig(window="22:00-06:00"), now=lambda: day + timedelta(hours=hour))
    monkeypatch.setattr(Window, "of", lambda region: night)
    stand = await make_stand()
    stand.sandbox.tool_s = 0.3
    await stand.tasks(8)
    async with stand.agent(window="22:00-06:00", release_memory=True) as service:
        await stand.until(stand.sandbox.is_working)
        hour = 6
        await stand.until(lambda: _released(stand.engine))
        await stand.step(1)
        await stand.until(lambda: in_phase(service, "outside its window"))
        await asyncio.sleep(0.5)
        assert stand.engine.core.weights is None, "the agent wrote to an engine that was given back"
        assert not stand.has_ended(service)
        stand.sandbox.tool_s, hour = 0.0, 22
        done = [r for r in await stand.until(lambda: stand.all_ended(8)) if r.terminal]
        await stand.until_served(1)
    assert {rollout.outcome for rollout in done} == {"ok"}
    for rollout in done:
        stand.assert_replays(rollout.trajectory)
    assert stand.sampled_once(done)


async def _released(engine: LocalEngine) -> bool:
    return bool(engine.core is not None and engine.core.weights is None)


def test_memory_that_others_requests_need_is_not_released() -> None:
    for more in ("", 'window = "22:00-06:00"\nyield_above = 4\nengine_urls = ["http://127.0.0.1:1"]'):
        with pytest.raises(ConfigError) as caught:
            parse_config(f"[regions.east]\nrelease_memory = true\nlent_exclusively = true\n{more}", "test")
        assert "regions.east.release_memory needs window, and no yield_above" in str(caught.value)


async def _asked(engine: LocalEngine, times: int) -> bool:
    return bool(engine.core is not None and engine.core.counters.requests >= times)


@pytest.mark.parametrize("missing", ["engine_urls", "lent_exclusively"])
def test_weights_of_an_engine_that_is_not_lent_exclusively_are_never_touched(missing: str) -> None:
    lines = {"engine_urls": 'engine_urls = ["http://127.0.0.1:1"]', "lent_exclusively": "lent_exclusively = true"}
    whole = "[regions.east]\nyield_above = 4\n" + "\n".join(lines.values())
    assert parse_config(whole, "test").regions["east"].yield_above == 4
    with pytest.raises(ConfigError) as caught:
        parse_config(whole.replace(lines[missing], ""), "test")
    assert "regions.east.yield_above needs engine_urls and lent_exclusively = true" in str(caught.value)
