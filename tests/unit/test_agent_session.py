"""A session is token in, token out, and only the model can earn a reward."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from headway.rollout_agent.client import Completion, EngineTrouble, Sampling
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.outcomes import RETRY_S_FIRST, RETRY_S_MAX, Outcomes
from headway.rollout_agent.session import Interrupted, Session, SessionResult
from headway.rollout_agent.tools import SandboxTrouble
from headway.schemas import expr_protocol as p
from headway.schemas.config import Config
from headway.schemas.errors import UnavailableError
from headway.schemas.messages import Signed, Task
from headway.schemas.sections import AgentConfig
from headway.schemas.trajectory import Span
from headway.schemas.version import Version
from headway.schemas.vocab import BOS, EOS

SHAPE = ModelShape(vocab_size=260, layers=2, layer_map=(0, 1), experts=4, top_k=2)
START = [BOS, *p.PROMPT]
ZERO = "0" * 64


def task(temperature: float = 1.0) -> Task:
    return Task(
        rollout_id="r1",
        purpose="train",
        env="expr",
        task_set=ZERO,
        task_id="t1",
        group=0,
        sample=0,
        temperature=temperature,
        sampling_seed=7,
        groups_issued=1,
        eval_blocks_issued=0,
        last_of_unit=False,
    )


@dataclass
class ScriptedEngine:
    """Says `lines` one after the other; line number n under version 0.n."""

    lines: list[bytes | list[int] | Exception]
    delay_s: float = 0.0
    said: int = 0  # lines that were said before this engine came
    cut: dict[int, int] = field(default_factory=dict)  # line number -> tokens after which it is aborted
    aborted: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, rid: str, timeout_s: float) -> Completion:
        turn = self.said + len(self.prompts)
        self.prompts.append(list(prompt))
        self.samplings.append(sampling)
        await asyncio.sleep(self.delay_s)
        line = self.lines[turn]
        if isinstance(line, Exception):
            raise line
        ids = list(line)[: min(sampling.max_new_tokens, self.cut.get(turn, 999))]
        rows, version = len(prompt) + len(ids) - 1, Version(0, turn)
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.25 * (turn + 1), np.float32),
            spans=[Span(start=0, end=len(ids), version=version)] if ids else [],
            routes=np.full((rows, 2, 2), turn, np.uint8),
            route_spans=[Span(start=0, end=rows, version=version)],
            stop="abort" if turn in self.cut else "stop" if ids and ids[-1] in sampling.stop_ids else "length",
            cached_tokens=0,
        )

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)


@dataclass
class ScriptedBox:
    """A box, and the sandbox that gives it."""

    texts: list[str] = field(default_factory=lambda: ["seen"] * 9)
    fails: str = ""
    fails_at: int = -1  # number of the tool call
    tool_s: float = 0.0
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    statement: str = ""

    async def create(self, task: Task, attempt: str) -> ScriptedBox:
        return await self._note("create")

    async def tool(self, name: Literal["r", "w", "t"], argument: str) -> p.ToolReply:
        await asyncio.sleep(self.tool_s)
        await self._note("tool", name, argument)
        if sum(call[0] == "tool" for call in self.calls) == self.fails_at + 1:
            raise SandboxTrouble("scripted")
        return p.ToolReply(text=self.texts.pop(0), ok=True, ms=0.0)

    async def grade(self, *, submitted: bool, malformed: bool) -> p.GradeReply:
        await self._note("grade", submitted, malformed)
        reward = p.reward(right=True, submitted=submitted, malformed=malformed)
        return p.GradeReply(reward=reward, verdict=Signed(payload=b"", signature=b""))

    async def destroy(self) -> None:
        await self._note("destroy")

    async def _note(self, *call: Any) -> Any:
        self.calls.append(call)
        if call[0] == self.fails:
            raise SandboxTrouble("scripted")
        return self


def make_session(
    engine: ScriptedEngine, box: ScriptedBox, temperature: float = 1.0, attempt: str = "a1", **changes: Any
) -> Session:
    @contextlib.asynccontextmanager
    async def gate() -> AsyncIterator[None]:
        yield

    return Session(
        task=task(temperature),
        attempt=attempt,
        engine=engine,
        sandbox=box,
        config=AgentConfig(**changes),
        shape=SHAPE,
        turn_gate=gate,
        clock=time.perf_counter,
    )


async def run(engine: ScriptedEngine, box: ScriptedBox, temperature: float = 1.0, **changes: Any) -> SessionResult:
    return await make_session(engine, box, temperature, **changes).run()


async def test_every_prompt_is_the_last_one_and_what_followed() -> None:
    engine, box = ScriptedEngine([b"r\n", b"w x*2\n", b"t\n", b"s\n"]), ScriptedBox(["def f", "ok", "pass"])
    result = await run(engine, box)
    expected = list(START)
    assert engine.prompts[0] == expected
    for prompt, said, shown in zip(
        engine.prompts[1:], (b"r\n", b"w x*2\n", b"t\n"), ("def f", "ok", "pass"), strict=True
    ):
        expected = [*expected, *said, *p.observation(shown)]
        assert prompt == expected
    assert result.trajectory.token_ids.tolist() == [*expected, *b"s\n"]
    assert box.calls[1:] == [("tool", "r", ""), ("tool", "w", "x*2"), ("tool", "t", ""), ("grade", True, False)]
    assert (result.reward, result.trajectory.stop_reason, result.trajectory.turns) == (1.0, "submitted", 4)
    assert [c.tool for c in result.commands] == ["r", "w", "t"]
    assert set(result.timings_ms) == {"total", "boot", "generate", "tool", "grade"}
    assert {s.seed for s in engine.samplings} == {7}
    assert {s.stop_ids for s in engine.samplings} == {(10, EOS)}


async def test_only_sampled_tokens_carry_loss_and_each_turn_its_version() -> None:
    trajectory = (await run(ScriptedEngine([b"r\n", b"s\n"]), ScriptedBox(["abc"]))).trajectory
    first, second = len(START), len(START) + 2 + len(p.observation("abc"))
    mask = np.zeros(second + 2)
    mask[[first, first + 1, second, second + 1]] = 1
    assert trajectory.loss_mask.tolist() == mask.tolist()
    assert trajectory.logprobs[mask == 1].tolist() == [-0.25, -0.25, -0.5, -0.5]
    assert trajectory.spans == [
        Span(start=first, end=first + 2, version=Version(0, 0)),
        Span(start=second, end=second + 2, version=Version(0, 1)),
    ]
    assert (trajectory.routes == 1).all(), "rows are those of the last forward"
    assert trajectory.route_spans == [Span(start=0, end=second + 1, version=Version(0, 1))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"x\n", "malformed"),
        (b"r", "malformed"),
        (b"w " + b"1" * 40, "malformed"),
        (b"\n", "malformed"),
        ([ord("r"), EOS], "malformed"),
        ([BOS, 10], "malformed"),
        (b"w \xff\n", "malformed"),
        (b"s \n", "malformed"),
    ],
)
async def test_a_malformed_line_ends_the_session_with_its_penalty(line: bytes | list[int], reason: str) -> None:
    box = ScriptedBox()
    result = await run(ScriptedEngine([line]), box)
    assert (result.trajectory.stop_reason, result.reward) == (reason, p.REWARD_INVALID)
    assert box.calls[-1] == ("grade", False, True)


async def test_a_session_that_never_submits_ends_at_the_turn_limit() -> None:
    box = ScriptedBox()
    result = await run(ScriptedEngine([b"t\n"] * 6), box)
    assert (result.trajectory.stop_reason, result.trajectory.turns) == ("turn_limit", 6)
    assert result.reward == p.REWARD_INVALID
    assert box.calls[-1] == ("grade", False, False)
    assert result.trajectory.loss_mask[-1] == 1, "the last observation was answered by nobody"


async def test_a_session_that_runs_out_of_room_is_cut_off_and_graded_as_it_stands() -> None:
    box = ScriptedBox(["x" * 60] * 6)
    result = await run(ScriptedEngine([b"r\n"] * 6), box, max_session_tokens=len(START) + 100)
    assert result.trajectory.stop_reason == "length"
    assert box.calls[-1] == ("grade", False, False)
    tight = await run(ScriptedEngine([b"w 1234567\n"]), ScriptedBox(), max_session_tokens=len(START) + 5)
    assert tight.trajectory.stop_reason == "length"
    assert len(tight.trajectory.token_ids) == len(START) + 5


async def test_greedy_sessions_divide_by_one() -> None:
    engine = ScriptedEngine([b"s\n"])
    assert (await run(engine, ScriptedBox(), temperature=0.0)).trajectory.temperature == 1.0
    assert engine.samplings[0].temperature == 0.0


@pytest.mark.parametrize("verb", ["create", "tool", "grade"])
async def test_a_failing_sandbox_is_no_reward(verb: str) -> None:
    box = ScriptedBox(fails=verb)
    with pytest.raises(SandboxTrouble):
        await run(ScriptedEngine([b"r\n", b"s\n"]), box)
    assert verb == "create" or box.calls[-1] == ("destroy",), "a box was left behind"


async def test_a_failing_engine_is_no_reward() -> None:
    box = ScriptedBox()
    with pytest.raises(EngineTrouble):
        await run(ScriptedEngine([b"r\n", EngineTrouble("scripted")]), box)
    assert box.calls[-1] == ("destroy",)


async def test_an_aborted_request_is_no_reward() -> None:
    with pytest.raises(Interrupted):
        await run(ScriptedEngine([[]]), ScriptedBox())


async def test_a_slow_engine_meets_the_turn_deadline() -> None:
    with pytest.raises(Interrupted, match="the turn took longer"):
        await run(ScriptedEngine([b"r\n"], delay_s=5.0), ScriptedBox(), turn_timeout_s=0.05)


async def test_a_slow_tool_meets_the_turn_deadline_and_its_box_ends() -> None:
    box = ScriptedBox(tool_s=5.0)
    with pytest.raises(Interrupted, match="the turn took longer"):
        await run(ScriptedEngine([b"r\n"]), box, turn_timeout_s=0.05)
    assert box.calls[-1] == ("destroy",)


async def test_a_long_session_meets_its_own_deadline() -> None:
    with pytest.raises(Interrupted, match="the session took longer"):
        await run(ScriptedEngine([b"r\n"] * 6, delay_s=0.04), ScriptedBox(), session_timeout_s=0.1)


async def test_tool_latency_is_added_to_every_call() -> None:
    result = await run(ScriptedEngine([b"r\n", b"t\n", b"s\n"]), ScriptedBox(), tool_latency_ms=30.0)
    assert result.timings_ms["tool"] >= 60


async def test_a_task_that_failed_a_thousand_times_comes_back_as_late_as_one_that_failed_ten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def publish(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(Outcomes, "_publish_failure", publish)
    outcomes = Outcomes(Any, Config(), Any, Any, region="east", agent="a")  # type: ignore[arg-type]
    delays: list[float] = []

    class Leased(SimpleNamespace):
        async def give_back(self, delay_s: float) -> None:
            delays.append(delay_s)

    for delivery in (1, 2, 10, 2000):
        await outcomes.failed(Leased(delivery=delivery), "n", None, 0, UnavailableError("away"))  # type: ignore[arg-type]
    assert delays == [RETRY_S_FIRST, 2 * RETRY_S_FIRST, RETRY_S_MAX, RETRY_S_MAX]
