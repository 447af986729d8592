"""Sessions that an agent harness of somebody else drives: it asks for turns over OpenAI's protocol.

`[agent] harness = "module:attribute"` names an async function of a HarnessTask. It may use OpenAI's client, start a
process, or both; when it returns, the session is submitted and the box is graded as it stands. What it asks for is
recorded as the built-in loop would have: the same ids, log-probabilities, spans and routes for the same turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from headway.rollout_agent.chat_endpoint import ChatEndpoint
from headway.rollout_agent.chat_template import ChatTemplate
from headway.rollout_agent.conversation import Bounds, Chat, Conversation
from headway.rollout_agent.environments.base import environment_of
from headway.rollout_agent.environments.chat import read_chat
from headway.rollout_agent.recorder import Recorder
from headway.rollout_agent.session import OutOfTime, Session
from headway.rollout_agent.tokenizer import Tokenizer
from headway.rollout_agent.tool_formats import FORMATS
from headway.rollout_agent.tools import Box
from headway.schemas.config import Config
from headway.schemas.errors import UnavailableError
from headway.schemas.plugs import load
from headway.schemas.trajectory import TURNS_MAX, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessTask:
    """What a harness is given: a task, where to ask for turns, and a box to run what the model wants to run."""

    statement: str
    base_url: str
    api_key: str
    model: str
    box: Box


Harness = Callable[[HarnessTask], Awaitable[None]]
TOOL_SETS_MAX = 16
"""Templates kept: a harness that draws its tools anew for every session makes each of its sessions compile one."""


def chat_of(config: Config) -> Chat:
    """How the run's model is spoken to, by whatever tools a request brings. Raises ConfigError."""

    @functools.lru_cache(TOOL_SETS_MAX)
    def made(tools: str) -> tuple[Tokenizer, ChatTemplate, tuple[int, ...]]:
        tokenizer, template, eos = read_chat(config, json.loads(tools))
        return tokenizer, template, tuple(sorted({template.end_id, *eos}))

    def template_for(tools: tuple[dict[str, Any], ...]) -> tuple[ChatTemplate, tuple[int, ...]]:
        return made(json.dumps(tools))[1:]

    return Chat(
        model=config.run.name,
        tokenizer=made("[]")[0],
        tool_format=FORMATS[config.agent.tool_format],
        template_for=template_for,
    )


class HarnessFailed(UnavailableError):
    """The harness raised, or asked for nothing: nobody's fault but the infrastructure's."""


@dataclass(slots=True, kw_only=True, eq=False)
class HarnessSession(Session):
    """A session without turns of its own."""

    harness: Harness
    endpoint: ChatEndpoint
    chat: Chat

    async def _converse(self, box: Box) -> StopReason:
        conversation = self._conversation()
        try:
            async with self._deadline(self.config.session_timeout_s, "session", OutOfTime):
                await self._hand_over(conversation, box)
        except OutOfTime:
            if self.config.at_deadline == "retry" or not self.recorder.turns:
                raise
            return "deadline"
        if not self.recorder.turns:
            raise HarnessFailed("the harness ended without asking for a turn")
        return conversation.over or "submitted"

    def _conversation(self) -> Conversation:
        config = self.config

        def begin(ids: list[int]) -> None:
            self.recorder = Recorder(ids=ids)

        return Conversation(
            name=f"{self.task.rollout_id}-{self.attempt}",
            chat=self.chat,
            bounds=Bounds(
                session_tokens_max=config.max_session_tokens,
                turn_tokens_max=config.max_action_tokens,
                turns_max=min(config.max_turns, TURNS_MAX),
                temperature=self.task.temperature,
            ),
            record=lambda: self.recorder,
            begin=begin,
            sample=self._sample_turn,
            now=self.endpoint.now,
        )

    async def _sample_turn(self, most_tokens: int, stop_ids: tuple[int, ...]) -> None:
        async with self._deadline(self.config.turn_timeout_s, "turn"):
            await self._sample(most_tokens, stop_ids)
        if self.keep is not None:
            await self.keep(self)

    async def _hand_over(self, conversation: Conversation, box: Box) -> None:
        """Run the harness until it ends or the session does."""
        with self.endpoint.bound(conversation) as key:
            task = HarnessTask(
                statement=box.statement,
                base_url=self.endpoint.base_url,
                api_key=key,
                model=self.chat.model,
                box=box,
            )
            running = asyncio.ensure_future(self.harness(task))
            try:
                await asyncio.wait((running, conversation.failed), return_when=asyncio.FIRST_COMPLETED)
                if conversation.failed.done():
                    conversation.failed.result()
                error = asyncio.CancelledError() if running.cancelled() else running.exception()
                if error is not None and conversation.over is None:
                    raise HarnessFailed("the harness failed", why=repr(error)[:400]) from error
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def sessions_of(config: Config, now: Callable[[], float]) -> AsyncIterator[Callable[..., Session]]:
    """How an agent makes a session: of the run's environment or of its harness. Raises ConfigError."""
    if not config.agent.harness:
        yield functools.partial(Session, environment=environment_of(config))
        return
    harness, chat = load(config.agent.harness, "agent.harness"), chat_of(config)
    endpoint = ChatEndpoint(chat.model, now=now)
    await endpoint.start()
    try:
        yield functools.partial(HarnessSession, harness=harness, endpoint=endpoint, chat=chat)
    finally:
        await endpoint.stop()
