"""Sessions that an agent cannot finish: saved, handed back, and gone on with by whoever leases them next."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from nats.js.api import StreamConfig

from headway.bus.service import Service
from headway.deploy import control
from headway.rollout_agent import attempts
from headway.rollout_agent.window import Window
from headway.schemas.sections import RegionConfig

from .agent_stand import in_phase


async def test_a_drained_agent_hands_back_what_it_cannot_finish_and_another_goes_on_with_it(
    make_stand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "GRACE_S", 0.2)
    stand = await make_stand()
    stand.sandbox.tool_s = 1.5
    async with stand.agent("first") as service:
        await stand.tasks(8)
        await stand.until(stand.sandbox.is_working)
        await stand.step(1)  # what the first agent sampled is of 0.0, the rest of 0.1
        service.stop.set()
        await stand.ended(service)
    given = [r for r in await stand.rollouts() if r.outcome == "handed_back"]
    assert given, "no session was open"
    assert not any(r.terminal for r in given)
    assert len(await stand.saved_sessions()) == len(given)
    stand.sandbox.tool_s = 0.0
    async with stand.agent("second"):
        done = [r for r in await stand.until(lambda: stand.all_ended(8)) if r.terminal]
        await stand.until_all_acked()
        await stand.until(stand.none_saved)
    assert all(r.outcome == "ok" for r in done)
    assert stand.sampled_once(done), "tokens were lost or sampled again"
    resumed = [r for r in done if len({s.version for s in r.trajectory.spans}) > 1]
    assert resumed, "no session went on under another version"
    for rollout in resumed:
        stand.assert_replays(rollout.trajectory)


async def test_handing_back_is_no_failed_attempt(make_stand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "GRACE_S", 0.0)
    stand = await make_stand()  # max_attempts 2
    stand.sandbox.tool_s = 0.7
    await stand.tasks(8)
    for name in ("first", "second", "third"):
        async with stand.agent(name) as service:
            await stand.until(stand.sandbox.is_working)
            service.stop.set()
            await stand.ended(service)
        stand.sandbox.tools = 0
    stand.sandbox.tool_s = 0.0
    async with stand.agent("last"):
        done = [r for r in await stand.until(lambda: stand.all_ended(8)) if r.terminal]
    given = Counter(r.rollout_id for r in await stand.rollouts() if r.outcome == "handed_back")
    assert max(given.values()) == 3
    assert all(r.outcome == "ok" for r in done)
    assert stand.sampled_once(done)


async def test_with_a_session_log_a_killed_agents_sessions_go_on_elsewhere(make_stand: Any) -> None:
    stand = await make_stand(agent__session_log=True)
    stand.sandbox.tool_s = 0.4
    async with stand.agent("first"):
        await stand.tasks(8)
        await stand.until(stand.some_saved)
    ended = {r.rollout_id for r in await stand.rollouts()}  # leaving cancels it like a kill: it says nothing more
    stand.sandbox.tool_s, before = 0.0, stand.engine.core.counters.sampled_tokens
    async with stand.agent("second"):
        done = [r for r in await stand.until(lambda: stand.all_ended(8)) if r.rollout_id not in ended]
        await stand.until(stand.none_saved)
    kept = sum(int(r.trajectory.loss_mask.sum()) for r in done)
    assert stand.engine.core.counters.sampled_tokens - before < kept, "no session went on"
    for rollout in done:
        stand.assert_replays(rollout.trajectory)


async def test_at_the_end_of_its_window_an_agent_hands_back_at_once_and_works_in_the_next_one(
    make_stand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = 23
    night = Window.of(
        RegionConfig(window="22:00-06:00"), now=lambda: datetime(2026, 11, 29, tzinfo=UTC) + timedelta(hours=hour)
    )
    monkeypatch.setattr(Window, "of", lambda region: night)
    stand = await make_stand()
    stand.sandbox.tool_s = 1.5
    await stand.tasks(8)
    async with stand.agent() as service:
        await stand.until(stand.sandbox.is_working)
        hour = 6
        await stand.until(lambda: in_phase(service, "outside its window"))
        assert service.status["sessions"] == 0
        given = [r for r in await stand.rollouts() if r.outcome == "handed_back"]
        assert given
        assert len(await stand.saved_sessions()) == len(given)
        stand.sandbox.tool_s, hour = 0.0, 22
        done = [r for r in await stand.until(lambda: stand.all_ended(8)) if r.terminal]
        await stand.until(stand.none_saved)
    assert all(r.outcome == "ok" for r in done)
    assert stand.sampled_once(done)


async def test_a_drain_within_a_time_ends_in_it_and_saves_what_it_cannot_finish(make_stand: Any) -> None:
    stand, said = await make_stand(), list[str]()
    stand.sandbox.tool_s = 5.0
    async with stand.agent("first") as service:
        await stand.tasks(8)
        await stand.until(stand.sandbox.is_working)
        await control.drain_agents(stand.bus, "first", 4.0, said.append)
        await stand.ended(service)
    given = [r for r in await stand.rollouts() if r.outcome == "handed_back"]
    assert given
    assert len(await stand.saved_sessions()) == len(given)
    assert said[1].endswith(f"{len(given)} handed back")
    stand.sandbox.tool_s = 0.0
    async with stand.agent("second"):
        done = [r for r in await stand.until(lambda: stand.all_ended(8)) if r.terminal]
    assert all(r.outcome == "ok" for r in done)
    assert stand.sampled_once(done), "tokens were lost or sampled again"


async def test_a_drain_ends_in_time_although_the_bus_takes_nothing_and_what_was_sampled_is_only_graded_again(
    make_stand: Any,
) -> None:
    stand, said = await make_stand(), list[str]()
    stream = stand.bus.subjects.stream("ROLLOUTS")
    config: StreamConfig = (await stand.bus.js.stream_info(stream)).config
    await stand.bus.js.update_stream(config.evolve(max_msgs=2))
    await stand.tasks(8)
    async with stand.agent("first") as service:
        await stand.until(lambda: _unpublished(service, 6))
        await control.drain_agents(stand.bus, "first", 4.0, said.append)
        await stand.ended(service)
    assert len(await stand.rollouts()) == 2
    assert len(await stand.saved_sessions()) == 6
    await stand.bus.js.update_stream(config.evolve(max_msgs=-1))
    sampled = stand.sampled_tokens()
    async with stand.agent("second"):
        done = await stand.until(lambda: stand.all_ended(8))
    assert {r.outcome for r in done} == {"ok"}
    assert stand.sampled_tokens() == sampled
    assert stand.sampled_once(done)


async def _unpublished(service: Service, count: int) -> bool:
    return bool(service.status.get("pushed_back")) and service.status["sessions"] == count


async def test_a_drained_agent_finishes_short_sessions(make_stand: Any) -> None:
    stand = await make_stand()
    stand.sandbox.tool_s = 0.2
    await stand.tasks(4)
    async with stand.agent() as service:
        await stand.until(lambda: in_phase(service, "rolling out"))
        service.stop.set()
        await stand.ended(service)
    assert {r.outcome for r in await stand.rollouts()} == {"ok"}
