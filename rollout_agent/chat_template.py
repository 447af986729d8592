"""Prompts by a model's own chat template, one append at a time.

What follows a completion is the difference of two renderings: of the messages before it, and of those with it and
what is new. Only the template's own text is rendered: every message's content, name and id is a placeholder, filled
in after rendering, so nothing that a task, a tool or a model says can steer the template or become a control token,
and nothing sampled is rendered at all.

A template fits when it is append-only: what it renders of a conversation begins with what it rendered before. That
is checked when an agent starts, on conversations of every shape that a session can have, and again at each append.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

from headway.rollout_agent.tokenizer import Glue, Piece, Tokenizer, encode_pieces
from headway.rollout_agent.tool_formats import Message
from headway.schemas.errors import ConfigError, PromiseViolated

MARK, END = "\ue000", "\ue001"
"""Around a placeholder's number: private code points, which no template may contain."""
_PLACEHOLDER = re.compile(f"{MARK}([0-9]+){END}")
FIELDS = ("content", "name", "tool_call_id")
ROUNDS = 3
"""Exchanges that the start-up check appends one after the other."""


class ChatTemplate:
    """A Jinja template as transformers renders it, and the ids of what it appends."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, tools: Sequence[dict[str, Any]] = (), bos: str = "", eos: str = ""
    ) -> None:
        """`tools` are JSON schemas for the template, from the environment. Raises ConfigError when it does not fit."""
        self._tokenizer = tokenizer
        self._variables = {"tools": list(tools) or None, "bos_token": bos, "eos_token": eos}
        self._render = _compiled(source)
        self.end_id = self._check()

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The first prompt."""
        return encode_pieces(self._tokenizer, self._pieces(self._text(messages), messages))

    def append(self, before: Sequence[Message], new: Sequence[Message], *, ended: bool) -> list[int]:
        """What stands between a completion after `before` and the next: its end unless it was `ended`, then `new`."""
        said = Message(role="assistant", content=("",))
        everything = [*before, said, *new]
        prompt, text = self._text(before), self._text(everything)
        mark = _placeholder(len(before), "content")
        head, _, tail = text.partition(mark)
        if head != prompt or not tail or mark in tail:
            raise PromiseViolated("the chat template is not append-only", why=_first_difference(prompt, head))
        ids = encode_pieces(self._tokenizer, self._pieces(tail, everything))
        return ids[1:] if ended else ids

    def _text(self, messages: Sequence[Message]) -> str:
        """What the template writes, with placeholders and the prompt for the next turn."""
        shown = [
            {"role": message.role, "content": _placeholder(n, "content")}
            | ({"name": _placeholder(n, "name")} if message.name else {})
            | ({"tool_call_id": _placeholder(n, "tool_call_id")} if message.call_id else {})
            for n, message in enumerate(messages)
        ]
        return str(self._render(messages=shown, add_generation_prompt=True, **self._variables))

    def _pieces(self, text: str, messages: Sequence[Message]) -> list[Piece]:
        pieces: list[Piece] = []
        for part, number in itertools.zip_longest(*[iter(_PLACEHOLDER.split(text))] * 2):
            pieces.append(Glue(part))
            if number is not None:
                message, field = messages[int(number) // len(FIELDS)], FIELDS[int(number) % len(FIELDS)]
                pieces += {"content": message.content, "name": (message.name,), "tool_call_id": (message.call_id,)}[
                    field
                ]
        return pieces

    def _check(self) -> int:
        """The control id that ends a turn. Raises ConfigError when the template is not append-only."""
        ends = set()
        for head in ([_probe("system"), _probe("user")], [_probe("user")]):
            for shape in (["tool"], ["tool", "tool"], ["user"], ["tool", "user"]):
                messages = list(head)
                for _ in range(ROUNDS):
                    new = [_probe(role) for role in shape]
                    ends.add(self._probe_append(messages, new))
                    messages += [_probe("assistant"), *new]
        if len(ends) != 1 or not ends <= set(self._tokenizer.controls.values()):
            raise ConfigError(
                "the chat template ends a turn of the model with no control token",
                why="where a turn ends, and so what was sampled, could not be told",
                hint="its tokenizer must know the token that the template writes after an assistant's content",
            )
        return ends.pop()

    def _probe_append(self, messages: list[Message], new: list[Message]) -> int:
        """The first id that is appended."""
        try:
            ids = self.append(messages, new, ended=False)
            text = self._text([*messages, *new])
            for n in range(len(messages) + len(new)):
                if text.count(_placeholder(n, "content")) != 1:
                    raise PromiseViolated("the chat template does not show each message once")
            return ids[0]
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"the chat template cannot be used: {str(error)[:200]}",
                why=f"probed with {', '.join(m.role for m in messages)}, a completion, "
                f"{', '.join(m.role for m in new)}; {getattr(error, 'why', '')}"[:400],
                hint="each turn's prompt must be the last one and what followed: take a template without "
                "look-back (one that does not strip earlier turns), or edit it",
            ) from None


def _placeholder(number: int, field: str) -> str:
    return f"{MARK}{number * len(FIELDS) + FIELDS.index(field)}{END}"


def _probe(role: str) -> Message:
    tool = {"name": "tool", "call_id": "functions.tool:0"} if role == "tool" else {}
    return Message(role=role, content=("",), **tool)


def _first_difference(one: str, other: str) -> str:
    pairs = enumerate(itertools.zip_longest(one, other))
    at = next((n for n, (a, b) in pairs if a != b), len(one))
    return f"at character {at}: {one[at : at + 40]!r} became {other[at : at + 40]!r}"


def _compiled(source: str) -> Any:
    """The template's render function, in the environment that transformers renders in. Raises ConfigError."""
    try:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError(
            "a chat template needs jinja2", why=str(error), hint="pip install 'headway-rl[chat]'"
        ) from None
    if MARK in source or END in source:
        raise ConfigError("the chat template contains a private code point", why="placeholders are marked with those")

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source).render
    except jinja2.TemplateError as error:
        raise ConfigError("the chat template is no Jinja template", why=str(error)[:300]) from None
