"""The demo: one line is one call, over bytes. See `schemas/expr_protocol.py`."""

from __future__ import annotations

from collections.abc import Sequence

from headway.rollout_agent.tool_formats import FORMATS, Call, Malformed, ToolResult
from headway.rollout_agent.tools import Box
from headway.schemas import expr_protocol as p
from headway.schemas.config import Config
from headway.schemas.vocab import BOS, EOS, NEWLINE, encode


class ExprDialogue:
    """A session of the demo; nothing of it depends on the task."""

    stop_ids: tuple[int, ...] = (NEWLINE, EOS)
    malformed_ends = True
    summarises = False

    def opening(self) -> list[int]:
        return [BOS, *encode(p.PROMPT)]

    def read(self, line: Sequence[int]) -> tuple[Call, ...] | Malformed:
        if max(line, default=0) > 255:
            return Malformed("a control token")
        return FORMATS["compact"].parse(bytes(line).decode("utf-8", "surrogateescape"))

    def ends(self, call: Call) -> bool:
        return call.name == "s"

    async def act(self, box: Box, call: Call) -> ToolResult:
        assert call.name in ("r", "w", "t"), "submitting is no tool call"
        reply = await box.tool(call.name, call.arguments.get("expression", ""))  # type: ignore[arg-type]
        return ToolResult(call=call, text=reply.text, ok=reply.ok)

    def answer(
        self, line: Sequence[int], heard: Sequence[ToolResult] | Malformed, *, summarise: bool = False
    ) -> list[int]:
        assert not isinstance(heard, Malformed), "a malformed line ends the session"
        assert not summarise, "sessions of the demo are short"
        [message] = FORMATS["compact"].render(heard)
        return encode("".join(str(part) for part in message.content))

    def restart(self, summary: Sequence[int]) -> list[int]:
        raise AssertionError("sessions of the demo are short")


class ExprEnvironment:
    """All sessions are alike."""

    def __init__(self, config: Config | None = None) -> None: ...

    def begin(self, statement: str) -> ExprDialogue:
        return ExprDialogue()
