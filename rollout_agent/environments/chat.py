"""Environments of messages and tools, in the chat template and tool format of the model that is trained.

An environment of this kind is a system prompt and tools; everything else is the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.rollout_agent.chat_template import ChatTemplate
from headway.rollout_agent.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, read_bounded
from headway.rollout_agent.tool_formats import FORMATS, Call, Malformed, Message, ToolFormat, ToolResult
from headway.rollout_agent.tools import Box
from headway.schemas.chat import PLAIN_TEMPLATE
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError

SUBMIT = "submit"
CUT = "\n... {} bytes left out ...\n"
TOLD = "That was no tool call: {}. Call a tool, or submit."
ASKED = (
    "The context is nearly full. Write a summary of the task's state for yourself: what you found, what you changed, "
    "what is left to do. You will go on from the task and this summary alone. Write nothing else."
)
WENT_ON = "\n\nYou have already worked on this. Your summary of it:\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """`run` takes the box and checked arguments, all strings, and returns (text, ok)."""

    name: str
    description: str
    arguments: Mapping[str, str]
    """Each argument's description; all are required."""
    run: Callable[[Box, Mapping[str, str]], Awaitable[tuple[str, bool]]]

    def schema(self) -> dict[str, Any]:
        properties = {name: {"type": "string", "description": text} for name, text in self.arguments.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.arguments)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatEnvironment:
    """What sessions share."""

    system: str
    tools: Mapping[str, Tool]
    tokenizer: Tokenizer
    template: ChatTemplate
    tool_format: ToolFormat
    stop_ids: tuple[int, ...]
    observation_bytes_max: int

    @classmethod
    def of(cls, config: Config, system: str, tools: Sequence[Tool]) -> ChatEnvironment:
        """With the tokenizer, template and tool format that `config` names. Raises ConfigError."""
        schemas = [*(tool.schema() for tool in tools), _SUBMIT.schema()]
        tokenizer, template, eos = read_chat(config, schemas)
        return cls(
            system=system,
            tools={tool.name: tool for tool in tools},
            tokenizer=tokenizer,
            template=template,
            tool_format=FORMATS[config.agent.tool_format],
            stop_ids=tuple(sorted({template.end_id, *eos})),
            observation_bytes_max=config.agent.max_observation_bytes,
        )

    def begin(self, statement: str) -> ChatDialogue:
        return ChatDialogue(environment=self, statement=statement)


@dataclass(slots=True, kw_only=True)
class ChatDialogue:
    """One session: the messages so far, without what was sampled."""

    environment: ChatEnvironment
    statement: str
    malformed_ends: bool = False
    summarises: bool = True
    _messages: list[Message] = field(default_factory=list)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.environment.stop_ids

    def opening(self) -> list[int]:
        return self._open(self.statement)

    def restart(self, summary: Sequence[int]) -> list[int]:
        return self._open(self.statement, WENT_ON, tuple(summary))

    def _open(self, *content: str | tuple[int, ...]) -> list[int]:
        system = Message(role="system", content=(self.environment.system,))
        self._messages = [system, Message(role="user", content=content)]
        return self.environment.template.opening(self._messages)

    def read(self, line: Sequence[int]) -> tuple[Call, ...] | Malformed:
        said = list(line[:-1] if line and line[-1] in self.stop_ids else line)
        calls = self.environment.tool_format.parse(self.environment.tokenizer.decode(said))
        return calls or Malformed("there is none in it")

    def ends(self, call: Call) -> bool:
        return call.name == SUBMIT

    async def act(self, box: Box, call: Call) -> ToolResult:
        tool = self.environment.tools.get(call.name)
        if tool is None:
            known = ", ".join([*self.environment.tools, SUBMIT])
            return ToolResult(call=call, text=f"no such tool; there are {known}", ok=False)
        arguments = call.arguments
        wrong = arguments.keys() != tool.arguments.keys() or not all(isinstance(v, str) for v in arguments.values())
        if wrong:
            due = ", ".join(tool.arguments) or "none"
            return ToolResult(call=call, text=f"arguments of {tool.name}: {due}, each a string", ok=False)
        text, ok = await tool.run(box, arguments)
        return ToolResult(call=call, text=text, ok=ok)

    def answer(
        self, line: Sequence[int], heard: Sequence[ToolResult] | Malformed, *, summarise: bool = False
    ) -> list[int]:
        if isinstance(heard, Malformed):
            new = [Message(role="user", content=(TOLD.format(heard.why),))]
        else:
            share = self.environment.observation_bytes_max // len(heard)
            new = self.environment.tool_format.render(
                [ToolResult(call=r.call, text=cut_middle(r.text, share), ok=r.ok) for r in heard]
            )
        if summarise:
            new.append(Message(role="user", content=(ASKED,)))
        template = self.environment.template
        ids = template.append(self._messages, new, ended=bool(line) and line[-1] == template.end_id)
        self._messages += [Message(role="assistant", content=("",)), *new]
        return ids


async def _submit(box: Box, arguments: Mapping[str, str]) -> tuple[str, bool]:
    raise AssertionError("submitting is no tool call")


_SUBMIT = Tool(name=SUBMIT, description="End the session: the workspace is graded as it is.", arguments={}, run=_submit)


def cut_middle(text: str, bytes_max: int) -> str:
    """`text` with its middle left out where it is longer: the ends tell most."""
    data = text.encode("utf-8", "replace")
    if len(data) <= bytes_max:
        return text
    half = bytes_max // 2
    head, tail = data[:half].decode("utf-8", "ignore"), data[-half:].decode("utf-8", "ignore")
    return head + CUT.format(len(data) - 2 * half) + tail


def read_chat(config: Config, tools: list[dict[str, Any]]) -> tuple[Tokenizer, ChatTemplate, set[int]]:
    """The tokenizer of `agent.tokenizer`, its template with `tools`, and what else ends a turn. Raises ConfigError."""
    if not config.agent.tokenizer:
        tokenizer: Tokenizer = ByteTokenizer()
        return tokenizer, ChatTemplate(PLAIN_TEMPLATE, tokenizer, tools=tools), set()
    folder = Path(config.agent.tokenizer)
    tokenizer = HFTokenizer(read_bounded(folder / "tokenizer.json"))
    settings = _json(folder / "tokenizer_config.json")
    template, separate = settings.get("chat_template"), folder / "chat_template.jinja"
    if separate.exists():
        template = read_bounded(separate)
    if not isinstance(template, str):
        raise ConfigError(f"{folder} has no chat template", why="neither chat_template.jinja nor tokenizer_config.json")
    bos, eos = (_token(settings.get(name)) for name in ("bos_token", "eos_token"))
    ends = _json(folder / "generation_config.json").get("eos_token_id", [])
    stops = {t for t in (ends if isinstance(ends, list) else [ends]) if type(t) is int}
    return tokenizer, ChatTemplate(template, tokenizer, tools=tools, bos=bos, eos=eos), stops


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(read_bounded(path))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON", why=str(error)[:200]) from None
    return found if isinstance(found, dict) else {}


def _token(value: Any) -> str:
    """A token's text, which stands alone or under `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
