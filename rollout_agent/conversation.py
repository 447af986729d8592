"""A session's conversation as requests bring it: messages in, ids as sampled, a reply out.

Invariants: a request's messages are those that the session recorded and new ones behind them, else it is refused and
nothing changes; nothing sampled is encoded again, so whatever a client makes of a reply, the next prompt holds the
sampled ids; a request that was answered before gets the same answer, so a client may ask again after a lost reply.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.rollout_agent.chat_template import END, MARK, ChatTemplate
from headway.rollout_agent.openai_protocol import (
    ChatMessage,
    ChatRequest,
    Refused,
    Reply,
    Sampled,
    ToolCall,
    first_difference,
)
from headway.rollout_agent.recorder import Recorder
from headway.rollout_agent.session import Diverged
from headway.rollout_agent.tokenizer import Tokenizer
from headway.rollout_agent.tool_formats import Call, Malformed, Message, ToolFormat, ToolResult
from headway.schemas.errors import ConfigError, UnavailableError
from headway.schemas.trajectory import StopReason

WAITING_MAX = 4
"""Requests of one session that may wait for the one that is being answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """How the model is spoken to. `template_for` makes the template for a request's tools; `stop_ids` end a turn."""

    model: str
    tokenizer: Tokenizer
    tool_format: ToolFormat
    template_for: Callable[[tuple[dict[str, Any], ...]], tuple[ChatTemplate, tuple[int, ...]]]

    def text_of(self, token: int) -> str:
        return self.tokenizer.decode([token])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of a session: tokens of its context, of one turn, and turns."""

    session_tokens_max: int
    turn_tokens_max: int
    turns_max: int
    temperature: float


@dataclass(slots=True, kw_only=True, eq=False)
class Conversation:
    """`sample` adds up to so many tokens to the recorder, which `record` returns; it raises UnavailableError."""

    name: str
    chat: Chat
    bounds: Bounds
    record: Callable[[], Recorder]
    begin: Callable[[list[int]], None]
    sample: Callable[[int, tuple[int, ...]], Awaitable[None]]
    now: Callable[[], float]
    over: StopReason | None = None
    """Why the session takes no further turn."""
    failed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Gets the exception that ended the session from outside the model."""
    _messages: list[ChatMessage] = field(default_factory=list)
    _shown: list[Message] = field(default_factory=list)
    """The same for the template, where what was sampled is empty."""
    _replies: dict[int, Reply] = field(default_factory=dict)
    _calls: dict[str, Call] = field(default_factory=dict)
    """Of the last reply, by the ids that the client was told."""
    _tools: tuple[dict[str, Any], ...] = ()
    _template: ChatTemplate | None = None
    _stop_ids: tuple[int, ...] = ()
    _at: int = 0
    """How much of the record these messages account for; the rest was sampled by an earlier attempt."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: int = 0

    async def answer(self, request: ChatRequest) -> Reply:
        """Raises Refused, UnavailableError (the session is over then)."""
        if self._waiting >= WAITING_MAX:
            raise Refused("too many requests of this session are waiting", status=429)
        self._waiting += 1
        try:
            async with self._turn:
                return await self._answer(request)
        except UnavailableError as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise
        finally:
            self._waiting -= 1

    async def _answer(self, request: ChatRequest) -> Reply:
        if request.temperature not in (None, self.bounds.temperature):
            raise Refused(
                f"temperature = {request.temperature:g}: this session samples at {self.bounds.temperature:g}",
                param="temperature",
            )
        if (known := self._answered(request.messages)) is not None:
            return known
        template, stop_ids = self._template_for(request.tools)
        new = self._new(request.messages)
        if self.over is not None:
            raise self._ended()
        if self._messages:
            record = self.record()
            ended = record.ids[self._at - 1] == template.end_id
            ids = template.append(self._shown[:-1], new, ended=ended)
        else:
            ids = template.opening(new)
        self._check_room(len(ids))
        self._put(ids)
        self._messages, self._shown = list(request.messages), [*self._shown, *new]
        self._tools, self._template, self._stop_ids = request.tools, template, stop_ids
        return await self._speak(request.max_tokens)

    def _answered(self, messages: Sequence[ChatMessage]) -> Reply | None:
        """The answer that these very messages got."""
        reply = self._replies.get(len(messages))
        same = reply is not None and first_difference(messages, self._messages) is None
        return reply if same else None

    def _template_for(self, tools: tuple[dict[str, Any], ...]) -> tuple[ChatTemplate, tuple[int, ...]]:
        """The first request decides which tools there are: they stand in the prompt."""
        if self._template is not None:
            if tools != self._tools:
                raise Refused("tools differ from those of this session's first request", param="tools")
            return self._template, self._stop_ids
        try:
            written = json.dumps(tools, ensure_ascii=False)
            if any(text in written for text in (*self.chat.tokenizer.controls, MARK, END)):
                raise Refused("tools: the text of a control token cannot stand there", param="tools")
            return self.chat.template_for(tools)
        except (ConfigError, RecursionError) as error:
            raise Refused(f"tools: the chat template cannot show them: {str(error)[:200]}", param="tools") from None

    def _new(self, messages: Sequence[ChatMessage]) -> list[Message]:
        """What follows the recorded messages. Raises Refused, naming the first message that differs."""
        if (where := first_difference(self._messages, messages)) is not None:
            raise Refused(
                f"{where} differs from what this session recorded: its messages can only be extended",
                code="conversation_forked",
                param=where,
            )
        start, found, due = len(self._messages), list[Message](), dict(self._calls)
        if start == len(messages):
            raise Refused("there is no new message", param="messages")
        for n, message in enumerate(messages[start:], start):
            where = f"messages[{n}]"
            if message.role == "assistant":
                raise Refused(f"{where}: the assistant did not say that in this session", param=where)
            if message.role != "tool":
                if due:
                    break
                found.append(Message(role=message.role, content=(message.text,)))
                continue
            if (call := due.pop(message.call_id, None)) is None:
                raise Refused(f"{where}: no open call has this id", param=f"{where}.tool_call_id")
            found += self.chat.tool_format.render([ToolResult(call=call, text=message.text, ok=True)])
        if due:
            raise Refused(f"the call {next(iter(due))} was not answered", param="messages")
        return found

    def _check_room(self, more: int) -> None:
        """Raises Refused, and ends the session, where no turn fits any more."""
        record = self.record()
        if not self._messages:
            if more >= self.bounds.session_tokens_max:
                raise self._ended("length")
        elif self._at >= len(record.ids):  # nothing lies ahead from an earlier attempt
            if record.turns >= self.bounds.turns_max:
                self.over = "turn_limit"
            elif self._at + more >= self.bounds.session_tokens_max:
                self.over = "length"
        if self.over is not None:
            raise self._ended()

    def _ended(self, over: StopReason | None = None) -> Refused:
        if (over or self.over) == "length":
            limit = self.bounds.session_tokens_max
            return Refused(f"the context of {limit} tokens is full", code="context_length_exceeded", param="messages")
        return Refused(f"the session's {self.bounds.turns_max} turns are over", code="turn_limit", param="messages")

    def _put(self, ids: list[int]) -> None:
        """Append to the record, or find there what an earlier attempt appended."""
        record = self.record()
        if not record.turns and not self._messages:
            self.begin(ids)
        elif self._at == len(record.ids):
            record.observe(ids)
        elif record.ids[self._at : self._at + len(ids)] != ids:
            raise Diverged("the harness asks for something else than before", why=f"after {self._at} tokens")
        self._at += len(ids)

    async def _speak(self, tokens_max: int | None) -> Reply:
        """Sample the rest of a line, which may be all of it or nothing, and tell what it says."""
        start, stop_ids = self._at, self._stop_ids
        line = self._line(start)
        most = min(tokens_max or self.bounds.turn_tokens_max, self.bounds.turn_tokens_max)
        room = min(most, self.bounds.session_tokens_max - start) - len(line)
        is_last = start + len(line) == len(self.record().ids)
        if is_last and not (line and line[-1] in stop_ids) and room > 0:
            await self.sample(room, stop_ids)
            line = self._line(start)
        self._at = start + len(line)
        reply = self._reply(start, line)
        self._replies[len(self._messages)] = reply
        self._messages.append(reply.message())
        self._shown.append(Message(role="assistant", content=("",)))
        return reply

    def _line(self, start: int) -> list[int]:
        record = self.record()
        end = start
        while end < len(record.ids) and record.mask[end]:
            end += 1
        return record.ids[start:end]

    def _reply(self, start: int, line: list[int]) -> Reply:
        record, number = self.record(), len(self._replies)
        ended = bool(line) and line[-1] in self._stop_ids
        text = self.chat.tokenizer.decode(line[:-1] if ended else line)
        heard = self.chat.tool_format.parse(text)
        calls = () if isinstance(heard, Malformed) else heard
        self._calls = {call.id or f"call_{number}_{n}": call for n, call in enumerate(calls)}
        if len(self._calls) < len(calls):  # the model gave one id twice
            self._calls = {f"call_{number}_{n}": call for n, call in enumerate(calls)}
        told = tuple(
            ToolCall(id=name, name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
            for name, call in self._calls.items()
        )
        begin = self.chat.tool_format.begin
        content = text[: text.index(begin, text.rfind("</think>") + 1)] if calls and begin else "" if calls else text
        return Reply(
            id=f"chatcmpl-{self.name}-{number}",
            created_s=int(self.now()),
            model=self.chat.model,
            content=content.encode("utf-8", "replace").decode(),
            calls=told,
            finish_reason="length" if not ended else "tool_calls" if told else "stop",
            tokens=tuple(
                Sampled(text=self.chat.text_of(token), logprob=record.logprobs[start + n])
                for n, token in enumerate(line)
            ),
            prompt_tokens=start,
            cached_tokens=0,
        )
