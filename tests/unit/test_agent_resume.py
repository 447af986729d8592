"""A session that is given up goes on elsewhere: nothing sampled is lost, and nothing is sampled again."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.rollout_agent.recorder import Recorder
from headway.rollout_agent.session import Diverged, Interrupted, Session
from headway.rollout_agent.session_log import SessionLog
from headway.schemas import expr_protocol as p
from headway.schemas.errors import UnavailableError
from headway.schemas.subjects import Keys
from headway.schemas.trajectory import Trajectory
from tests.unit.test_agent_session import ScriptedBox, ScriptedEngine, make_session, task

LINES: list[Any] = [b"r\n", b"w x*2\n", b"t\n", b"s\n"]
TEXTS = ["def f", "ok", "pass"]


@pytest.fixture
def log() -> SessionLog:
    return SessionLog(ObstoreBlobs.open("memory://"), Keys("run"))


async def go_on(log: SessionLog, engine: ScriptedEngine, box: ScriptedBox, **changes: Any) -> Session:
    saved = await log.latest(task())
    assert saved is not None
    session = make_session(engine, box, attempt="a2", **changes)
    session.recorder, session.commands = Recorder.resumed(saved.trajectory), list(saved.commands)
    return session


def without_routes(trajectory: Trajectory) -> dict[str, Any]:
    fields = {k: v for k, v in trajectory.model_dump().items() if k not in ("routes", "route_spans", "layer_map")}
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in fields.items()}


@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("fault", ["engine", "tool", "grade"])
async def test_a_session_cut_off_anywhere_ends_as_if_it_had_not_been(log: SessionLog, turn: int, fault: str) -> None:
    whole = await make_session(ScriptedEngine(LINES), ScriptedBox(list(TEXTS))).run()
    engine, box = ScriptedEngine(list(LINES)), ScriptedBox(list(TEXTS))
    if fault == "engine":
        engine.lines[turn] = UnavailableError("gone")
    elif fault == "grade":
        box.fails = "grade"
    else:
        box.fails_at = turn
    first = make_session(engine, box)
    if fault == "tool" and turn == 3:
        return  # the last turn calls no tool
    with pytest.raises(UnavailableError):
        await first.run()
    await log.save(first, 0)
    sampled = first.recorder.turns
    assert sampled == {"engine": turn, "tool": turn + 1, "grade": 4}[fault]

    engine = ScriptedEngine(list(LINES), said=sampled)
    box = ScriptedBox(list(TEXTS))
    result = await (await go_on(log, engine, box)).run()
    assert without_routes(result.trajectory) == without_routes(whole.trajectory)
    assert len(engine.prompts) == 4 - sampled, "a turn was sampled again"
    assert [c.tool for c in result.commands] == ["r", "w", "t"]
    assert box.calls[1:-1] == [("tool", "r", ""), ("tool", "w", "x*2"), ("tool", "t", "")]
    rows = len(result.trajectory.routes)
    assert rows == (len(result.trajectory.token_ids) - 1 if sampled < 4 else 0)


async def test_a_turn_that_was_cut_off_goes_on_where_it_was(log: SessionLog) -> None:
    engine = ScriptedEngine([b"r\n", b"w x*2\n", b"s\n"], cut={1: 3})
    first = make_session(engine, ScriptedBox(list(TEXTS)))
    with pytest.raises(Interrupted):
        await first.run()
    assert bytes(first.recorder.line()) == b"w x"
    await log.save(first, 1)
    engine = ScriptedEngine([b"*2\n", b"s\n"])
    result = await (await go_on(log, engine, ScriptedBox(list(TEXTS)))).run()
    assert engine.samplings[0].max_new_tokens == 20 - 3
    assert bytes(result.trajectory.token_ids[1:].tolist()) == p.PROMPT + b"r\ndef f\n>w x*2\nok\n>s\n"
    assert [(s.end - s.start) for s in result.trajectory.spans] == [2, 3, 3, 2]
    assert result.trajectory.turns == 3
    assert [c.tool for c in result.commands] == ["r", "w"]


async def test_a_session_told_to_leave_stops_before_the_next_turn_and_cuts_one_off(log: SessionLog) -> None:
    engine, box = ScriptedEngine(list(LINES), delay_s=0.05), ScriptedBox(list(TEXTS))
    session = make_session(engine, box)
    running = asyncio.create_task(session.run())
    while not engine.prompts:
        await asyncio.sleep(0.001)
    await session.leave()
    with pytest.raises(Interrupted):
        await running
    assert engine.aborted == ["r1-a1-0"]
    assert len(engine.prompts) == 1
    assert box.calls[-1] == ("destroy",)


async def test_a_box_that_shows_something_else_than_before_ends_the_saved_session(log: SessionLog) -> None:
    engine = ScriptedEngine([b"r\n", UnavailableError("gone")])
    first = make_session(engine, ScriptedBox(list(TEXTS)))
    with pytest.raises(UnavailableError):
        await first.run()
    await log.save(first, 0)
    with pytest.raises(Diverged):
        await (await go_on(log, ScriptedEngine([b"s\n"]), ScriptedBox(["def g"]))).run()


async def test_the_longest_saved_session_counts_and_none_outlives_its_rollout(log: SessionLog) -> None:
    for turns in (2, 1, 3):
        session = make_session(ScriptedEngine([*LINES[:turns], UnavailableError("gone")]), ScriptedBox(list(TEXTS)))
        with pytest.raises(UnavailableError):
            await session.run()
        await log.save(session, turns)
    saved = await log.latest(task())
    assert saved is not None
    assert (saved.trajectory.turns, saved.handed_back) == (3, 3)
    await log.clear(task())
    assert await log.latest(task()) is None


async def test_a_saved_session_of_another_draw_or_of_broken_bytes_is_not_gone_on_with(log: SessionLog) -> None:
    session = make_session(ScriptedEngine([b"r\n", UnavailableError("gone")]), ScriptedBox(list(TEXTS)))
    with pytest.raises(UnavailableError):
        await session.run()
    session.task = session.task.model_copy(update={"sampling_seed": 8})
    await log.save(session, 0)
    assert await log.latest(task()) is None
    key = Keys("run").session("r1", "99999999-0000-a")
    await log._store.put(key, b"\xff\x00 no message")
    assert await log.latest(task()) is None
