"""Sessions of twenty turns, given up twice: what was sampled stays as it was, in whichever region they end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from headway.bus.connection import Bus
from headway.bus.service import Service
from headway.rollout_agent import tools
from headway.rollout_agent.window import Window
from headway.schemas.sections import RegionConfig
from headway.schemas.trajectory import Trajectory
from headway.schemas.version import Version

from .agent_stand import Stand, in_phase
from .stand_ins import Cable, LocalEngine

SESSIONS, TURNS, MORE_TURNS = 4, 20, 5
ROLLOUTS = tuple(f"r{number}" for number in range(SESSIONS))
LINE_TOKENS_MAX = 20
LONG = {
    "agent__max_turns": TURNS,
    "agent__max_action_tokens": LINE_TOKENS_MAX,
    "agent__max_session_tokens": 512,
    "model__max_position_embeddings": 512,
    "dispatch__max_attempts": 8,
    "sandbox__command_timeout_s": 0.5,
}


def assert_begins_with(whole: Trajectory, part: Trajectory) -> None:
    """Ids, masks, log-probabilities and spans of `part` are the first of `whole`, bit for bit."""
    end = len(part.token_ids)
    for name in ("token_ids", "loss_mask", "logprobs"):
        assert np.array_equal(getattr(whole, name)[:end], getattr(part, name)), name
    assert whole.spans[: len(part.spans)] == part.spans
    assert whole.turns >= part.turns


class Interruption:
    """A way in which an agent's sessions end before they are done. `sudden`: a turn under way is lost."""

    sudden = False

    def __init__(self, stand: Stand, port: int, token: str) -> None:
        self.stand, self._port, self._token = stand, port, token

    @contextlib.asynccontextmanager
    async def agent(self, name: str, region: str, engine: LocalEngine) -> AsyncIterator[Service]:
        async with self.stand.agent(name, region=region, engines=[engine]) as service:
            yield service

    async def strike(self, service: Service) -> None:
        """Leaving `agent` afterwards is a kill."""


class Drain(Interruption):
    async def strike(self, service: Service) -> None:
        service.drain({"within_s": 2.0})
        await self.stand.ended(service)


class Kill(Interruption):
    sudden = True


class WindowEnd(Interruption):
    hour = 23

    @contextlib.asynccontextmanager
    async def agent(self, name: str, region: str, engine: LocalEngine) -> AsyncIterator[Service]:
        self.hour = 23
        day = datetime(2026, 11, 29, tzinfo=UTC)
        night = Window.of(RegionConfig(window="22:00-06:00"), now=lambda: day + timedelta(hours=self.hour))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Window, "of", lambda region: night)
            async with super().agent(name, region, engine) as service:
                yield service

    async def strike(self, service: Service) -> None:
        self.hour = 6
        await self.stand.until(lambda: in_phase(service, "outside its window"))


class Partition(Interruption):
    """The region is cut off from the bus and learns nothing of the others, which go on; it comes back at the end."""

    sudden = True

    def __init__(self, stand: Stand, port: int, token: str) -> None:
        super().__init__(stand, port, token)
        self._left = contextlib.AsyncExitStack()
        self._cables: list[Cable] = []

    @contextlib.asynccontextmanager
    async def agent(self, name: str, region: str, engine: LocalEngine) -> AsyncIterator[Service]:
        cable = Cable(self._port)
        await cable.heal()
        self._cables.append(cable)
        url = f"nats://127.0.0.1:{cable.port}"
        connecting = Bus.connect(url, "test", token=self._token, store=self.stand.bus.store)
        bus = await self._left.enter_async_context(await connecting)
        yield await self._left.enter_async_context(self.stand.agent(name, region=region, engines=[engine], bus=bus))

    async def strike(self, service: Service) -> None:
        self._cables[-1].cut()

    async def come_back(self) -> None:
        for cable in self._cables:
            await cable.heal()
        await self.stand.until(self._late)
        await self._left.aclose()
        for cable in self._cables:
            cable.cut()

    async def _late(self) -> bool:
        """Whether both have published something again: sessions that had ended elsewhere."""
        return {r.agent for r in await self.stand.rollouts() if r.outcome != "handed_back"} == {"one", "two", "three"}


@pytest.mark.parametrize("kind", [Drain, Kill, WindowEnd, Partition])
async def test_a_session_given_up_twice_ends_in_another_region_with_all_that_was_sampled(
    make_stand: Any, nats_process: Any, monkeypatch: pytest.MonkeyPatch, kind: type[Interruption]
) -> None:
    monkeypatch.setattr(tools, "ROUND_TRIP_S", 0.5)
    stand = await make_stand(letters=b"rt", sure=3.0, agent__session_log=kind.sudden, **LONG)
    settings = nats_process.settings
    how = kind(stand, settings.port, settings.token)
    await stand.tasks(SESSIONS)
    before: dict[str, Trajectory] = {}
    places = [("one", "east", stand.engine), ("two", "west", await stand.another_engine())]
    for n, (name, region, engine) in enumerate(places, 1):
        stand.sandbox.called.clear()
        stand.sandbox.halt = {r: (before[r].turns if r in before else 0) + MORE_TURNS for r in ROLLOUTS}
        async with how.agent(name, region, engine) as service:
            await stand.until(lambda: _at_their_halts(stand))
            await how.strike(service)
        saved = await stand.saved()
        assert len(saved) == SESSIONS, "a session had ended, or was not saved"
        for rollout_id, trajectory in saved.items():
            assert 0 < trajectory.turns < TURNS
            if rollout_id in before:
                assert_begins_with(trajectory, before[rollout_id])
                assert trajectory.turns > before[rollout_id].turns, "it did not get on"
        before = saved
        await stand.step(n)
    stand.sandbox.halt.clear()
    async with stand.agent("three", region="east", engines=[await stand.another_engine()]):
        done = await stand.until(lambda: stand.all_ended(SESSIONS))
        await stand.until(stand.none_saved)  # what a region saves that comes back later, the trainer's sweep takes
    if isinstance(how, Partition):
        await how.come_back()
        done = await stand.rollouts()
    ended = list({r.rollout_id: r for r in reversed(done) if r.outcome == "ok"}.values())  # the first of each counts
    assert len(ended) == SESSIONS
    assert len(ended) == len([r for r in done if r.outcome == "ok"]) or isinstance(how, Partition)
    for rollout in ended:
        assert_begins_with(rollout.trajectory, before[rollout.rollout_id])
        assert {span.version for span in rollout.trajectory.spans} == {Version(0, n) for n in range(3)}
        stand.assert_replays(rollout.trajectory)
    assert max(rollout.trajectory.turns for rollout in ended) == TURNS
    kept = sum(int(r.trajectory.loss_mask.sum()) for r in ended)
    lost_max = 2 * SESSIONS * LINE_TOKENS_MAX if kind is Kill else 0  # a turn each time
    assert kept <= stand.sampled_tokens() <= kept + lost_max or isinstance(how, Partition)


async def _at_their_halts(stand: Stand) -> bool:
    """Whether all sessions have gone on by MORE_TURNS, so that none ends and none is too late."""
    return all(stand.sandbox.called[rollout_id] > turns for rollout_id, turns in stand.sandbox.halt.items())
