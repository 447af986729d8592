"""OpenAI's chat completions as JSON: requests read strictly, replies, chunks of a stream, errors.

An option that would make the recorded log-probability something else than that of the whole distribution at the
task's temperature is refused, never ignored; so is a key that is unknown here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headway.schemas.errors import InputError

MESSAGES_MAX = 4096
TOOLS_MAX = 128
CALLS_MAX = 64
TEXT_CHARS_MAX = 4 << 20
NAME_CHARS_MAX = 256
SHOWN_CHARS_MAX = 60

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "top_p": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "stop": (None, []),
    "seed": (None,),
    "top_logprobs": (None, 0),
    "tool_choice": (None, "auto"),
    "parallel_tool_calls": (None, True),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
}
"""Options that are accepted only with a value that changes nothing."""
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
READ = {
    "model",
    "messages",
    "tools",
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "stream",
    "stream_options",
}
ROLES = ("system", "developer", "user", "assistant", "tool")


class Refused(InputError):
    """Answered with `status` and OpenAI's shape of an error. OpenAI's own client asks again after 409, 429 and 5xx."""

    def __init__(self, what: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(what)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.what, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as OpenAI writes it: `arguments` is JSON in a string."""

    id: str
    name: str
    arguments: str

    def same(self, other: ToolCall) -> bool:
        """Whether only the spelling of the arguments differs."""
        if (self.id, self.name) != (other.id, other.name):
            return False
        try:
            return self.arguments == other.arguments or bool(json.loads(self.arguments) == json.loads(other.arguments))
        except (ValueError, RecursionError):
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message of a request. Nothing in it is trusted."""

    role: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""

    def difference(self, other: ChatMessage) -> str | None:
        """The field in which `other` says something else."""
        if self.role != other.role:
            return "role"
        if self.text != other.text:
            return "content"
        if self.call_id != other.call_id:
            return "tool_call_id"
        same = len(self.calls) == len(other.calls) and all(map(ToolCall.same, self.calls, other.calls))
        return None if same else "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One checked request."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...]
    temperature: float | None
    max_tokens: int | None
    logprobs: bool
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A token of a reply: its text, its bytes and its log-probability."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said. `content` is the text before the first call, all of it where there is none."""

    id: str
    created_s: int
    model: str
    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: str
    tokens: tuple[Sampled, ...]
    prompt_tokens: int
    cached_tokens: int

    def message(self) -> ChatMessage:
        return ChatMessage(role="assistant", text=self.content, calls=self.calls)

    def body(self, *, logprobs: bool) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": self._content(), "refusal": None}
        if self.calls:
            said["tool_calls"] = [_call(call) for call in self.calls]
        choice = {
            "index": 0,
            "message": said,
            "finish_reason": self.finish_reason,
            "logprobs": self._logprobs() if logprobs else None,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    def chunks(self, *, logprobs: bool, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The same as a stream. An engine's answer is checked whole before any of it is told, so it comes in one go."""
        told = self._logprobs() if logprobs else None
        deltas: list[tuple[dict[str, Any], str | None]] = [({"role": "assistant", "content": ""}, None)]
        if self.content or told:
            deltas.append(({"content": self.content}, None))
        if self.calls:
            deltas.append(({"tool_calls": [{"index": n, **_call(c)} for n, c in enumerate(self.calls)]}, None))
        deltas.append(({}, self.finish_reason))
        extra = {"usage": None} if include_usage else {}
        for delta, reason in deltas:
            shown = told if "content" in delta and "role" not in delta else None
            choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": shown}
            yield {**self._head("chat.completion.chunk"), "choices": [choice], **extra}
        if include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _content(self) -> str | None:
        return self.content or (None if self.calls else "")

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}

    def _usage(self) -> dict[str, Any]:
        sampled = len(self.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _logprobs(self) -> dict[str, Any]:
        entries = [
            {"token": t.text, "logprob": t.logprob, "bytes": list(t.text.encode()), "top_logprobs": []}
            for t in self.tokens
        ]
        return {"content": entries, "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def models_body(name: str, created_s: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_body(name, created_s)]}


def model_body(name: str, created_s: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "headway"}


def parse_request(data: bytes, model: str) -> ChatRequest:
    """The body of `/v1/chat/completions`. Raises Refused."""
    try:
        fields = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise Refused("the body is no JSON object")
    if unknown := sorted(fields.keys() - READ - IGNORED - NEUTRAL.keys()):
        raise Refused(f"unknown key {unknown[0][:SHOWN_CHARS_MAX]!r}", param=unknown[0][:SHOWN_CHARS_MAX])
    if fields.get("model") != model:
        shown = str(fields.get("model"))[:SHOWN_CHARS_MAX]
        raise Refused(f"there is no model {shown!r}, only {model!r}", status=404, code="model_not_found", param="model")
    for key, allowed in NEUTRAL.items():
        if not any(_equal(fields.get(key), value) for value in allowed):
            raise Refused(
                f"{key} = {str(fields[key])[:SHOWN_CHARS_MAX]} is not possible: what is recorded must be drawn from "
                "the whole distribution; leave it out",
                param=key,
            )
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise Refused("stream_options: include_usage is known", param="stream_options")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MESSAGES_MAX:
        raise Refused(f"messages: a list of 1 to {MESSAGES_MAX} is due", param="messages")
    limits = [_count(fields, key) for key in ("max_tokens", "max_completion_tokens")]
    return ChatRequest(
        messages=tuple(_message(message, f"messages[{n}]") for n, message in enumerate(messages)),
        tools=_tools(fields.get("tools")),
        temperature=_temperature(fields.get("temperature")),
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        logprobs=_flag(fields, "logprobs"),
        stream=_flag(fields, "stream"),
        include_usage=_flag(options, "include_usage"),
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _equal(given: Any, allowed: Any) -> bool:
    """Without True being 1."""
    return bool(given == allowed) and isinstance(given, bool) == isinstance(allowed, bool)


def _flag(fields: dict[str, Any], key: str) -> bool:
    value = fields.get(key)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{key} = {str(value)[:SHOWN_CHARS_MAX]}: true or false is due", param=key)
    return bool(value)


def _count(fields: dict[str, Any], key: str) -> int | None:
    value = fields.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise Refused(f"{key} = {str(value)[:SHOWN_CHARS_MAX]}: a positive number is due", param=key)
    return value


def _temperature(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise Refused(f"temperature = {str(value)[:SHOWN_CHARS_MAX]}: a number is due", param="temperature")
    try:
        return None if value is None else float(value)
    except OverflowError:
        raise Refused("temperature: a number that is none of a sampler's", param="temperature") from None


def _text(value: Any, where: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """A string, or the parts of type text of a list, joined."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        if any(part is None for part in parts):
            raise Refused(f"{where}: only parts of type text are possible", param=where)
        value = "".join(map(str, parts))
    if not isinstance(value, str) or len(value) > chars_max:
        raise Refused(f"{where}: text of at most {chars_max} characters is due", param=where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused(f"{where}: half of a surrogate pair is no text", param=where) from None
    return value


_MESSAGE_KEYS = {
    "assistant": {"content", "tool_calls", "refusal", "audio", "annotations", "function_call", "name"},
    "tool": {"content", "tool_call_id", "name"},
}


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict) or value.get("role") not in ROLES:
        raise Refused(f"{where}: role is one of {', '.join(ROLES)}", param=where)
    role = value["role"]
    unknown = sorted(value.keys() - {"role"} - _MESSAGE_KEYS.get(role, {"content", "name"}))
    for key in ("refusal", "audio", "annotations", "function_call", "name"):
        if value.get(key) and not (key == "name" and role == "tool"):
            unknown.append(key)
    if unknown:
        raise Refused(f"{where}: {unknown[0][:SHOWN_CHARS_MAX]!r} is not possible", param=where)
    content = value.get("content")
    calls = _calls(value.get("tool_calls"), f"{where}.tool_calls")
    if content is None and role != "assistant":
        raise Refused(f"{where}: content is due", param=f"{where}.content")
    return ChatMessage(
        role="system" if role == "developer" else role,
        text=_text("" if content is None else content, f"{where}.content"),
        calls=calls,
        call_id=_text(value.get("tool_call_id"), f"{where}.tool_call_id", NAME_CHARS_MAX) if role == "tool" else "",
    )


def _calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > CALLS_MAX:
        raise Refused(f"{where}: a list of at most {CALLS_MAX} is due", param=where)
    found = []
    for n, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise Refused(f"{where}[{n}]: a call of a function is due", param=where)
        found.append(
            ToolCall(
                id=_text(call.get("id"), f"{where}[{n}].id", NAME_CHARS_MAX),
                name=_text(function.get("name"), f"{where}[{n}].function.name", NAME_CHARS_MAX),
                arguments=_text(function.get("arguments"), f"{where}[{n}].function.arguments"),
            )
        )
    return tuple(found)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > TOOLS_MAX:
        raise Refused(f"tools: a list of at most {TOOLS_MAX} is due", param="tools")
    for n, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise Refused(f"tools[{n}]: a function with a name is due", param="tools")
        if function.get("strict"):
            raise Refused(f"tools[{n}]: strict needs a grammar, and what is recorded is drawn freely", param="tools")
    return tuple(value)


def first_difference(recorded: Sequence[ChatMessage], asked: Sequence[ChatMessage]) -> str | None:
    """Where `asked` does not begin with `recorded`, as messages[n].field."""
    for n, (was, now) in enumerate(zip(recorded, asked, strict=False)):
        if (field := was.difference(now)) is not None:
            return f"messages[{n}].{field}"
    return f"messages[{len(asked)}]" if len(asked) < len(recorded) else None
