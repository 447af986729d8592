"""Where a session's turns go: to the engine that holds its prefix, while that one may be asked and has room."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headway.rollout_agent import engine_watch
from headway.rollout_agent import rotation as rotations
from headway.rollout_agent.client import EngineBusy, EngineTrouble
from headway.rollout_agent.replies import Completion, Load, Sampling, read_load
from headway.rollout_agent.rotation import Place, Rotation

CAPACITY, SESSION = 1000, 100
SAMPLING = Sampling(max_new_tokens=4, temperature=1.0, seed=1, stop_ids=())


class Engine:
    """Answers at once, unless it has a `fault`; remembers who asked."""

    def __init__(self, url: str) -> None:
        self.url, self.asked = url, list[str]()
        self.fault: Exception | None = None

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, rid: str, timeout_s: float) -> Completion:
        self.asked.append(rid)
        if self.fault is not None:
            raise self.fault
        await asyncio.sleep(0)
        return Completion(
            token_ids=[1], logprobs=np.zeros(1, np.float32), spans=[], routes=None, route_spans=[], stop="stop",
            cached_tokens=0,
        )  # fmt: skip

    async def abort(self, rid: str) -> None: ...


def load(tokens: int) -> Load:
    return Load(running=0, waiting=0, tokens=tokens, capacity_tokens=CAPACITY, prefilled_tokens=0)


async def rotation_of(*tokens: int | None) -> tuple[Rotation, list[Any]]:
    """Engines that hold so many tokens; None: one that does not say."""
    engines: list[Any] = [Engine(f"http://127.0.0.1:{n}") for n in range(len(tokens))]
    found = Rotation(engines, occupancy_max=0.9, session_tokens=SESSION)
    for place, held in zip(found.places, tokens, strict=True):
        place.read(None if held is None else load(held))
        await found.admit(place)
    return found, engines


async def turn(session: Any, rid: str = "r", timeout_s: float = 5.0) -> Completion:
    found: Completion = await session.generate([1], SAMPLING, rid=rid, timeout_s=timeout_s)
    return found


async def test_sessions_spread_and_each_stays_where_its_prefix_is() -> None:
    rotation, engines = await rotation_of(0, 0)
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(rotation.session()) for _ in range(6)]
        for n in (1, 2, 3):
            for number, session in enumerate(sessions):
                await turn(session, f"{number}-{n}")
        assert [place.sessions for place in rotation.places] == [3, 3]
        for number in range(6):
            assert sorted(sum(rid.startswith(f"{number}-") for rid in e.asked) for e in engines) == [0, 3]
    assert [place.sessions for place in rotation.places] == [0, 0]
    assert rotation.sessions_moved == 0


async def test_a_session_leaves_an_engine_that_is_full_or_out_and_a_full_fleet_is_asked_all_the_same() -> None:
    rotation, (one, two) = await rotation_of(0, 0)
    with rotation.session() as session:
        await turn(session)
        home, other = rotation.places
        home.read(load(CAPACITY))
        await turn(session)
        assert (len(one.asked), len(two.asked)) == (1, 1)
        other.read(load(CAPACITY + 50))
        await turn(session)
        assert (len(one.asked), len(two.asked)) == (1, 2), "it left its prefix for an engine that is full as well"
        rotation.fail(other, "scripted")
        await turn(session)
        assert (len(one.asked), len(two.asked)) == (2, 2)
    assert rotation.sessions_moved == 2


async def test_no_session_begins_while_every_engine_is_above_the_occupancy() -> None:
    rotation, _ = await rotation_of(901, 950)
    assert rotation.room() == 0
    rotation.places[1].read(load(500))
    assert rotation.room() == 5
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(rotation.session())
        assert rotation.room() == 0, "sessions that no reading knows of were not counted"
        assert [place.sessions for place in rotation.places] == [0, 5], "a session began at a full engine"
        rotation.places[1].read(load(500))
        assert rotation.room() == 5
    assert rotation.room() == 5, "sessions that the reading knows of were taken off it"
    with rotation.session():
        assert rotation.room() == 4
    assert rotation.room() == 5, "a session that came and went is still counted"


async def test_an_idle_engine_takes_one_session_however_small_it_is() -> None:
    rotation, _ = await rotation_of(0)
    rotation.places[0].read(Load(running=0, waiting=0, tokens=0, capacity_tokens=50, prefilled_tokens=0))
    assert rotation.room() == 1
    with rotation.session():
        assert rotation.room() == 0


async def test_an_engine_that_does_not_say_how_full_it_is_takes_what_comes() -> None:
    rotation, _ = await rotation_of(None)
    assert rotation.room() > 1000


async def test_a_request_that_fails_is_asked_of_another_engine_and_the_first_is_out() -> None:
    rotation, (one, two) = await rotation_of(0, 0)
    one.fault = EngineTrouble("scripted")
    with rotation.session() as session:
        await turn(session, "r7")
        assert (one.asked, two.asked) == (["r7"], ["r7-1"])
        assert [place.serving for place in rotation.places] == [False, True]
        assert rotation.places[0].look.is_set(), "nobody was told to look at it"
        two.fault = EngineTrouble("scripted")
        rotation.places[0].serving = True
        with pytest.raises(EngineTrouble):
            await turn(session)
    assert len(one.asked) + len(two.asked) == 4


async def test_a_turn_waits_for_an_engine_to_come_back_and_no_longer_than_its_deadline() -> None:
    rotation, (one,) = await rotation_of(0)
    place: Place = rotation.places[0]
    with rotation.session() as session:
        rotation.fail(place, "scripted")
        waiting = asyncio.create_task(turn(session))
        await asyncio.sleep(0.05)
        assert not one.asked
        await rotation.admit(place)
        assert (await waiting).stop == "stop"
        rotation.fail(place, "scripted")
        with pytest.raises(EngineTrouble, match="in rotation"):
            await turn(session, timeout_s=0.05)
        waiting = asyncio.create_task(turn(session))
        await asyncio.sleep(0.05)
        await session.abort("r")
        with pytest.raises(EngineTrouble, match="told to leave"):
            await waiting


async def test_a_request_that_fails_late_does_not_put_out_an_engine_that_was_proven_since() -> None:
    rotation, (one,) = await rotation_of(0)
    place, gate = rotation.places[0], asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Completion:
        await gate.wait()
        raise EngineTrouble("scripted")

    one.generate, kept = slow, one.generate
    with rotation.session() as session:
        asking = asyncio.create_task(turn(session))
        await asyncio.sleep(0.01)
        rotation.fail(place, "scripted")
        await rotation.admit(place)
        one.generate = kept
        gate.set()
        await asking
        assert place.serving


async def test_a_busy_engine_is_asked_again_and_stays_in_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotations, "BUSY_WAIT_S", 0.01)
    rotation, (one,) = await rotation_of(0)
    one.fault = EngineBusy("scripted")
    with rotation.session() as session:
        asking = asyncio.create_task(turn(session))
        await asyncio.sleep(0.05)
        one.fault = None
        await asking
        assert len(one.asked) > 2
        assert rotation.places[0].serving
        one.fault = EngineBusy("scripted")
        with pytest.raises(EngineBusy):
            await turn(session, timeout_s=0.1)


SGLANG_SAID = """{"timestamp":"2026-11-30T05:52:57.142393+00:00","version":"0.5.23","accelerator":null,
"num_accelerators":1,"loads":[{"timestamp":1796017977.1238172,"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":0,
"num_waiting_uncached_tokens":0,"num_used_tokens":33,"num_total_tokens":33,"num_active_tokens":33,
"num_prealloc_ready_tokens":0,"max_total_num_tokens":16384,"max_running_requests":8,"token_usage":0.002,
"gen_throughput":0.0,"cache_hit_rate":0.0,"utilization":0.0,"total_prefill_uncached_tokens":3,
"total_prefill_busy_us":53713,"decode_moments":[28.0,28.0,121190.0,28.0,121190.0,28.0]}]}"""


def test_what_sglang_says_of_its_load_is_read() -> None:
    found = read_load(json.loads(SGLANG_SAID))
    assert (found.running, found.waiting, found.tokens, found.capacity_tokens, found.prefilled_tokens) == (
        1, 0, 33, 16384, 3,
    )  # fmt: skip


RANK = {
    "dp_rank": 0,
    "num_running_reqs": 1,
    "num_waiting_reqs": 2,
    "num_total_tokens": 33,
    "max_total_num_tokens": 16384,
    "total_prefill_uncached_tokens": 3,
}


def test_a_load_is_summed_over_ranks_and_read_strictly() -> None:
    found = read_load({"loads": [RANK, RANK | {"dp_rank": 1}]})
    assert (found.running, found.waiting, found.tokens, found.capacity_tokens) == (2, 4, 66, 32768)
    assert found.occupancy == pytest.approx(66 / 32768)
    lies: list[Any] = [{}, {"loads": []}, {"loads": [{}]}, {"loads": 3}]
    lies += [{"loads": [RANK | {"num_total_tokens": value}]} for value in (-1, 0.5, "1", None)]
    lies += [{"loads": [RANK | {"max_total_num_tokens": 0}]}]
    for lie in lies:
        with pytest.raises((ValueError, KeyError, TypeError)):
            read_load(lie)


async def test_a_request_at_an_engine_that_stops_answering_goes_on_elsewhere_at_once() -> None:
    rotation, (one, two) = await rotation_of(0, 0)
    place = rotation.places[0]

    async def hang(*args: Any, **options: Any) -> Completion:
        await asyncio.sleep(60)
        raise AssertionError

    one.generate = hang
    with rotation.session() as session:
        asking = asyncio.create_task(turn(session, timeout_s=60))
        await asyncio.sleep(0.01)
        for _ in range(2):
            place.lose("scripted")
            rotation.fail(place, "scripted")
        async with asyncio.timeout(5):
            await asking
    assert len(two.asked) == 1


async def test_an_engine_that_is_away_is_looked_at_now_and_then_not_all_the_time() -> None:
    rotation, [engine] = await rotation_of(0)
    looks = 0

    async def refused() -> str:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)
        raise EngineTrouble("connection refused")

    engine.served, clock = refused, asyncio.get_running_loop().time
    began_s = clock()
    watching = asyncio.create_task(engine_watch.watch(rotation, rotation.places[0], asyncio.Event()))
    rotation.fail(rotation.places[0], "a session says so")
    await asyncio.sleep(2.5 * engine_watch.RETRY_S)
    watching.cancel()
    assert 2 <= looks <= 2 + (clock() - began_s) / engine_watch.RETRY_S
