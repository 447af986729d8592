"""How models write tool calls. `parse` takes what a model said, which may be anything, and never raises.

    hermes        <tool_call>{"name": N, "arguments": {...}}</tool_call>                 Hermes, Qwen
    qwen3_coder   <tool_call><function=N><parameter=K>V</parameter></function></tool_call>
    kimi_k2       <|tool_call_begin|>functions.N:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    compact       `r`, `w x*2`, `t`, `s`, one a line: the demo's

What stands before the first call is for the reader of the session; what stands inside a `<think>` is no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.schemas import expr_protocol as p

CALLS_MAX = 16
"""Calls of one turn."""
WHY_CHARS_MAX = 200

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call. `id` is what the model named it, where its format does."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Malformed:
    """What a model wrote is no call: `why`, in words it can learn from, without a character of its own."""

    why: str

    def __post_init__(self) -> None:
        assert len(self.why) <= WHY_CHARS_MAX, "reasons are ours, so they are short"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a call gave. `text` is hostile."""

    call: Call
    text: str
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message as chat templates know it. Nothing in `content`, `name` and `call_id` is trusted.

    A part of `content` is text, or ids that were sampled before and stay as they are.
    """

    role: str
    content: tuple[str | tuple[int, ...], ...]
    name: str = ""
    call_id: str = ""


class ToolFormat(Protocol):
    """One way to write calls, and how their results come back."""

    begin: str
    """What opens a call; empty where the whole line is one."""

    def parse(self, text: str) -> tuple[Call, ...] | Malformed:
        """The calls in `text`, none if it has none."""

    def render(self, results: Sequence[ToolResult]) -> list[Message]:
        """The results as messages, in the order of the calls."""


class _Refused(Exception):
    """Becomes Malformed."""


class _Tagged:
    """Calls between an opening and a closing mark."""

    def __init__(self, begin: str, one: Callable[[str, int], tuple[Call, int]]) -> None:
        self.begin, self._one = begin, one

    def parse(self, text: str) -> tuple[Call, ...] | Malformed:
        said = text.rpartition("</think>")[2]
        try:
            return tuple(self._calls(said))
        except _Refused as refused:
            return Malformed(str(refused)[:WHY_CHARS_MAX])
        except (ValueError, RecursionError):
            return Malformed("the arguments are no JSON")

    def render(self, results: Sequence[ToolResult]) -> list[Message]:
        return [
            Message(role="tool", content=(result.text,), name=result.call.name, call_id=result.call.id)
            for result in results
        ]

    def _calls(self, text: str) -> Iterator[Call]:
        at, count = text.find(self.begin), 0
        while at >= 0:
            if (count := count + 1) > CALLS_MAX:
                raise _Refused(f"more than {CALLS_MAX} calls")
            call, at = self._one(text, at + len(self.begin))
            if _NAME.fullmatch(call.name) is None:
                raise _Refused("the name of a tool is letters, digits and _ . -")
            _check_text(call.arguments)
            yield call
            at = text.find(self.begin, at)


def _check_text(value: Any) -> None:
    """Raises ValueError (of which UnicodeEncodeError is one) for what is no text: JSON can spell half a character."""
    json.dumps(value, ensure_ascii=False).encode()


def _after(text: str, at: int, due: str, what: str) -> int:
    """The place behind `due`, which must be next but for blanks."""
    while at < len(text) and text[at].isspace():
        at += 1
    if not text.startswith(due, at):
        raise _Refused(what)
    return at + len(due)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_constant)


def _object(text: str, at: int) -> tuple[dict[str, Any], int]:
    at = _after(text, at, "", "")
    value, at = _JSON.raw_decode(text, at)
    if not isinstance(value, dict):
        raise _Refused("a JSON object is due")
    return value, at


def _hermes(text: str, at: int) -> tuple[Call, int]:
    value, at = _object(text, at)
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise _Refused('a call is {"name": a string, "arguments": an object}')
    return Call(name=name, arguments=arguments), _after(text, at, "</tool_call>", "a call ends with </tool_call>")


_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,64})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,64})>\n?(.*?)\n?</parameter>", re.DOTALL)


def _qwen3_coder(text: str, at: int) -> tuple[Call, int]:
    found = _FUNCTION.match(text, at)
    if found is None:
        raise _Refused("a call begins with <function=NAME>")
    name, at, arguments = found[1], found.end(), {}
    while (found := _PARAMETER.match(text, at)) is not None:
        arguments[found[1]], at = found[2], found.end()
    at = _after(text, at, "</function>", "parameters are <parameter=KEY>VALUE</parameter>, then </function>")
    return Call(name=name, arguments=arguments), _after(text, at, "</tool_call>", "a call ends with </tool_call>")


_KIMI_ID = re.compile(r"\s*((?:functions\.)?([A-Za-z0-9_.-]{1,64}):[0-9]{1,6})\s*")


def _kimi_k2(text: str, at: int) -> tuple[Call, int]:
    found = _KIMI_ID.match(text, at)
    if found is None:
        raise _Refused("a call begins with functions.NAME:NUMBER")
    at = _after(text, found.end(), "<|tool_call_argument_begin|>", "<|tool_call_argument_begin|> is due")
    arguments, at = _object(text, at)
    at = _after(text, at, "<|tool_call_end|>", "a call ends with <|tool_call_end|>")
    return Call(name=found[2].removeprefix("functions."), arguments=arguments, id=found[1]), at


class Compact:
    """The demo's: one line is one call."""

    begin = ""

    def parse(self, text: str) -> tuple[Call, ...] | Malformed:
        action = p.parse_action(text.encode("utf-8", "surrogatepass"))
        if action is None:
            return Malformed("a line is r, w EXPRESSION, t or s")
        return (Call(name=action.tool, arguments={"expression": action.argument} if action.tool == "w" else {}),)

    def render(self, results: Sequence[ToolResult]) -> list[Message]:
        return [Message(role="tool", content=(p.observation(result.text).decode(),)) for result in results]


FORMATS: dict[str, ToolFormat] = {
    "hermes": _Tagged("<tool_call>", _hermes),
    "qwen3_coder": _Tagged("<tool_call>", _qwen3_coder),
    "kimi_k2": _Tagged("<|tool_call_begin|>", _kimi_k2),
    "compact": Compact(),
}
