"""One attempt at a task: a multi-turn session, token in, token out.

Invariants: every prompt is the previous prompt + the completion + the new observation's ids, or the task and a
summary that was sampled, which begins a new segment; nothing sampled is ever decoded and encoded again; only
sampled tokens carry loss; whatever fails outside the model is raised and never becomes a reward, and what was
sampled until then stays in `recorder`.
Deadlines nest: command < turn < session (all turns) < rollout (the box's start and the grade, too).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from headway.rollout_agent.client import Completion, Sampling
from headway.rollout_agent.environments.base import Dialogue, Environment
from headway.rollout_agent.environments.expr import ExprEnvironment
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.recorder import Recorder
from headway.rollout_agent.tool_formats import CALLS_MAX, Call, Malformed, ToolResult
from headway.rollout_agent.tools import Box, Sandbox
from headway.schemas.errors import InputError, UnavailableError
from headway.schemas.ids import segment_seed
from headway.schemas.messages import COMMANDS_MAX, Command, Signed, Task
from headway.schemas.sections import AgentConfig
from headway.schemas.trajectory import TURNS_MAX, StopReason, Trajectory

DESTROY_S = 5.0


class Interrupted(UnavailableError):
    """A deadline passed, the engine gave the request up, or the session was told to leave."""


class OutOfTime(Interrupted):
    """The session's own deadline passed."""


class Diverged(UnavailableError):
    """A saved session cannot be gone on with: start again."""


class Engine(Protocol):
    """What a session needs of an engine."""

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, rid: str, timeout_s: float
    ) -> Completion: ...

    async def abort(self, rid: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """A graded session."""

    trajectory: Trajectory
    verdict: Signed
    reward: float
    commands: list[Command]
    timings_ms: dict[str, float]


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """Runs one task once, from its start or from where a saved one was left.

    `turn_gate` is held while a request is at the engine (a swap may close it). `keep`, if given, is awaited after
    every turn that was answered.
    """

    task: Task
    attempt: str
    engine: Engine
    sandbox: Sandbox
    config: AgentConfig
    shape: ModelShape
    turn_gate: Callable[[], AbstractAsyncContextManager[object]]
    clock: Callable[[], float]
    keep: Callable[[Session], Awaitable[None]] | None = None
    environment: Environment = field(default_factory=ExprEnvironment)
    recorder: Recorder = field(default_factory=lambda: Recorder(ids=[0]))
    """Until the first turn it holds nothing: the environment writes the first prompt once the box is there."""
    commands: list[Command] = field(default_factory=list)
    timings_ms: dict[str, float] = field(default_factory=dict)
    _left: bool = False
    _summarising: bool = False
    """A summary is what was asked for last."""
    _asked: str = ""

    async def run(self) -> SessionResult:
        """Raises UnavailableError or WireError when the attempt failed for reasons outside the model."""
        with self._timed("total"):
            async with self._deadline(self.config.rollout_timeout_s, "rollout"):
                with self._timed("boot"):
                    box = await self.sandbox.create(self.task, self.attempt)
                async with self._destroyed(box):
                    reason = await self._converse(box)
                    trajectory = self.recorder.trajectory(self.shape, self.task.temperature, reason)
                    with self._timed("grade"):
                        graded = await box.grade(submitted=reason == "submitted", malformed=reason == "malformed")
        return SessionResult(
            trajectory=trajectory,
            verdict=graded.verdict,
            reward=graded.reward,
            commands=self.commands,
            timings_ms=self.timings_ms,
        )

    async def leave(self) -> None:
        """End `run` with Interrupted before the next turn; a turn at the engine is cut off, what it sampled is kept."""
        self._left = True
        if self._asked:
            with contextlib.suppress(UnavailableError, InputError):
                await self.engine.abort(self._asked)

    async def _converse(self, box: Box) -> StopReason:
        """Every turn. Why the session ends."""
        try:
            async with self._deadline(self.config.session_timeout_s, "session", OutOfTime):
                dialogue = self.environment.begin(box.statement)
                if self.recorder.turns:
                    with self._timed("resume"):
                        await self._rebuild(box, dialogue)
                else:
                    self.recorder = Recorder(ids=dialogue.opening())
                while (reason := await self._turn(box, dialogue)) is None:
                    pass
                return reason
        except OutOfTime:
            if self.config.at_deadline == "retry" or not self.recorder.turns:
                raise
            return "deadline"

    async def _rebuild(self, box: Box, dialogue: Dialogue) -> None:
        """Do in a fresh box what the session did before. Raises Diverged when it looks different now."""
        opening = dialogue.opening()
        if self.recorder.ids[: len(opening)] != opening:
            raise Diverged("a saved session began with another prompt")
        summaries = 0
        for held, line, seen in self.recorder.exchanges():
            if self._summarising:
                self._summarising, summaries = False, summaries + 1
                if dialogue.restart(line) != seen:
                    raise Diverged("a saved session went on from another summary")
                continue
            heard = dialogue.read(line)
            over = dialogue.malformed_ends if isinstance(heard, Malformed) else any(map(dialogue.ends, heard))
            if over:
                raise Diverged("a saved session goes on after its end")
            results = heard if isinstance(heard, Malformed) else [await dialogue.act(box, call) for call in heard]
            self._summarising = self._is_long(held, summaries)
            if dialogue.answer(line, results, summarise=self._summarising) != seen:
                raise Diverged("a tool shows something else than before")

    def _is_long(self, held_tokens: int, summaries: int) -> bool:
        """Whether a summary is due, after so many, once a segment of so many tokens is answered."""
        limit = self.config.summarise_at_tokens
        return bool(limit) and held_tokens > limit and summaries < self.config.max_summaries

    async def _turn(self, box: Box, dialogue: Dialogue) -> StopReason | None:
        """Sample an answer, or the rest of one, and act on it. Why the session ends, if it does."""
        config, recorder = self.config, self.recorder
        line = recorder.line()
        spent = recorder.turns >= min(config.max_turns, TURNS_MAX) or len(self.commands) + CALLS_MAX > COMMANDS_MAX
        if not line and spent:
            return "turn_limit"
        async with self._deadline(config.turn_timeout_s, "turn"):
            room = min(config.max_action_tokens - len(line), config.max_session_tokens - len(recorder.prompt))
            if not (line and line[-1] in dialogue.stop_ids) and room > 0:
                await self._sample(room, dialogue.stop_ids)
                line = recorder.line()
            if not line:
                return "length"
            if (reason := await self._answer(box, dialogue, line)) is not None:
                return reason
        if self.keep is not None:
            await self.keep(self)
        return None

    async def _answer(self, box: Box, dialogue: Dialogue, line: Sequence[int]) -> StopReason | None:
        """Do what `line` asks for and show what came of it. Why the session ends, if it does."""
        recorder, config = self.recorder, self.config
        if self._summarising:
            self._summarising = False
            recorder.restart(dialogue.restart(line))
            return None
        heard = dialogue.read(line)
        held = len(recorder.prompt)
        if isinstance(heard, Malformed):
            if line[-1] not in dialogue.stop_ids and held >= config.max_session_tokens:
                return "length"
            if dialogue.malformed_ends:
                return "malformed"
            results: Sequence[ToolResult] | Malformed = heard
        else:
            done = await self._act(box, dialogue, heard)
            if done is None:
                return "submitted"
            results = done
        self._summarising = self._is_long(held, len(recorder.closed))
        recorder.observe(dialogue.answer(line, results, summarise=self._summarising))
        return None

    async def _sample(self, most_tokens: int, stop_ids: tuple[int, ...]) -> None:
        sampling = Sampling(
            max_new_tokens=most_tokens,
            temperature=self.task.temperature,
            seed=segment_seed(self.task.sampling_seed, len(self.recorder.closed)),
            stop_ids=stop_ids,
        )
        prompt, rid = self.recorder.prompt, f"{self.task.rollout_id}-{self.attempt}-{self.recorder.turns}"
        async with self.turn_gate():
            if self._left:
                raise Interrupted("the session was told to leave")
            self._asked = rid
            try:
                with self._timed("generate"):
                    completion = await self.engine.generate(
                        prompt, sampling, rid=rid, timeout_s=self.config.turn_timeout_s
                    )
            finally:
                self._asked = ""
        if completion.token_ids:
            self.recorder.add(prompt, completion, context_tokens_max=self.config.max_session_tokens)
        if completion.stop == "abort" or not completion.token_ids:
            raise Interrupted(f"the engine gave up request {rid}")

    async def _act(self, box: Box, dialogue: Dialogue, calls: Sequence[Call]) -> list[ToolResult] | None:
        """What the calls gave, one after the other; None once one of them submits."""
        results = []
        for call in calls:
            if dialogue.ends(call):
                return None
            started = self.clock()
            with self._timed("tool"):
                if self.config.tool_latency_ms:
                    await asyncio.sleep(self.config.tool_latency_ms / 1e3)
                results.append(await dialogue.act(box, call))
            self.commands.append(Command(tool=call.name, ms=(self.clock() - started) * 1e3, ok=results[-1].ok))
        return results

    @contextlib.contextmanager
    def _timed(self, what: str):  # type: ignore[no-untyped-def]
        started = self.clock()
        try:
            yield
        finally:
            self.timings_ms[what] = self.timings_ms.get(what, 0.0) + (self.clock() - started) * 1e3

    @contextlib.asynccontextmanager
    async def _deadline(self, seconds: float, what: str, over: type[Interrupted] = Interrupted) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise over(f"the {what} took longer than {seconds:g} s") from None

    @contextlib.asynccontextmanager
    async def _destroyed(self, box: Box) -> AsyncIterator[None]:
        """Destroy the box unless it was graded, which ends it too."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(UnavailableError, TimeoutError):
                async with asyncio.timeout(DESTROY_S):
                    await box.destroy()
            raise
