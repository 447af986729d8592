"""A turn's reply brings the rows of its own tokens; those before are known, unless a swap came in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headway.rollout_agent.client import EngineTrouble
from headway.rollout_agent.replies import Completion, Sampling
from headway.rollout_agent.rotation import Rotation, SessionEngine
from headway.schemas.trajectory import Span
from headway.schemas.version import Version

SAMPLING = Sampling(max_new_tokens=4, temperature=1.0, seed=1, stop_ids=())
OLD, NEW = Version(0, 1), Version(0, 2)


def rows(start: int, end: int, version: Version) -> Any:
    """[end - start, 2 layers, 1 expert], other ones under each version."""
    return (np.arange(start, end, dtype=np.uint8)[:, None, None] + 10 * version.n) % 200 + np.zeros((1, 2, 1), np.uint8)


def span(start: int, end: int, version: Version) -> Span:
    return Span(start=start, end=end, version=version)


class Engine:
    """Serves `version`; `swaps_to` takes its place while a request runs, and computes the prompt anew."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.version, self.swaps_to, self.fails_after = OLD, [], 1 << 30
        self.asked: list[tuple[str, int, int]] = []

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, rid: str, timeout_s: float, routes_from: int = 0
    ) -> Completion:
        self.asked.append((rid, routes_from, sampling.max_new_tokens))
        if len(self.asked) > self.fails_after:
            raise EngineTrouble("it is gone")
        if self.swaps_to:
            self.version = self.swaps_to.pop()
        end = len(prompt) + 3 - 1
        return Completion(
            token_ids=[7, 8, 9], logprobs=np.zeros(3, np.float32), spans=[span(0, 3, self.version)],
            routes=rows(routes_from, end, self.version), route_spans=[span(routes_from, end, self.version)],
            stop="stop", cached_tokens=0,
        )  # fmt: skip


class Session:
    """Turns of three tokens that are answered with two."""

    def __init__(self, rotation: Rotation) -> None:
        self.engine, self.prompt, self.turns = SessionEngine(rotation), [1, 2, 3, 4, 5], 0

    async def turn(self) -> Completion:
        self.turns += 1
        found = await self.engine.generate(self.prompt, SAMPLING, rid=str(self.turns), timeout_s=5.0)
        self.prompt = [*self.prompt, *found.token_ids, 20, 21]
        return found


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def session(engine: Engine) -> Session:
    rotation = Rotation([engine], occupancy_max=0.9, session_tokens=100)  # type: ignore[list-item]
    rotation.places[0].version = str(OLD)
    asyncio.run(rotation.admit(rotation.places[0]))
    return Session(rotation)


def place_of(session: Session) -> Any:
    return session.engine._rotation.places[0]


def assert_whole(found: Completion, end: int, version: Version) -> None:
    assert found.routes is not None
    assert found.routes.tolist() == rows(0, end, version).tolist()
    assert found.route_spans == [span(0, end, version)]


async def test_each_turn_brings_the_rows_of_its_own_tokens_alone(engine: Engine, session: Session) -> None:
    for end in (7, 12, 17):
        assert_whole(await session.turn(), end, OLD)
    assert engine.asked == [("1", 0, 4), ("2", 7, 4), ("3", 12, 4)]


async def test_after_a_swap_all_rows_are_asked_for(engine: Engine, session: Session) -> None:
    await session.turn()
    engine.version, place_of(session).version = NEW, str(NEW)
    assert_whole(await session.turn(), 12, NEW)
    assert_whole(await session.turn(), 17, NEW)
    assert engine.asked == [("1", 0, 4), ("2", 0, 4), ("3", 12, 4)]


async def test_a_prompt_that_does_not_go_on_from_the_last_is_asked_for_whole(engine: Engine, session: Session) -> None:
    await session.turn()
    session.prompt = [1, 2, 3, 9, 9, 9, 9, 9, 9]
    await session.turn()
    assert [start for _, start, _ in engine.asked] == [0, 0]


async def test_rows_that_a_swap_computed_anew_meanwhile_are_fetched(engine: Engine, session: Session) -> None:
    await session.turn()
    engine.swaps_to = [NEW]
    assert_whole(await session.turn(), 12, NEW)
    assert engine.asked == [("1", 0, 4), ("2", 7, 4), ("2-rows", 0, 1)]


async def test_rows_of_yet_another_version_are_unknown(engine: Engine, session: Session) -> None:
    await session.turn()
    engine.swaps_to = [Version(0, 3), NEW]
    found = await session.turn()
    assert found.route_spans == [span(0, 12, NEW)]
    assert found.routes is not None
    assert (found.routes[:7] == 255).all()
    assert found.routes[7:].tolist() == rows(7, 12, NEW).tolist()


async def test_rows_that_a_swap_kept_are_those_of_the_version_before(engine: Engine, session: Session) -> None:
    """A swap in place leaves the KV cache and its rows as they are."""
    await session.turn()
    engine.swaps_to = [OLD, NEW]
    found = await session.turn()
    assert found.route_spans == [span(0, 7, OLD), span(7, 12, NEW)]
    assert found.routes is not None
    assert found.routes.tolist() == [*rows(0, 7, OLD).tolist(), *rows(7, 12, NEW).tolist()]


async def test_rows_that_cannot_be_fetched_are_unknown_and_asked_for_with_the_next_turn(
    engine: Engine, session: Session
) -> None:
    await session.turn()
    engine.swaps_to, engine.fails_after = [NEW], 2
    found = await session.turn()
    assert found.routes is not None
    assert (found.routes[:7] == 255).all()
    assert found.routes[7:].tolist() == rows(7, 12, NEW).tolist()
    engine.fails_after, place_of(session).version = 1 << 30, str(NEW)
    assert_whole(await session.turn(), 17, NEW)
