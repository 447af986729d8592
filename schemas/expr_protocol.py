"""The `expr` environment as text and as verbs: what agent, sandbox and demonstrator must agree on.

A session over bytes: the environment writes PROMPT, the model one line, the environment its observation
and `>`, and so on, at most ACTIONS_MAX lines:

    fix f.py
    >r                               the file's text
    >w x*5-4                         `ok`, `syntax error`, or `no space`
    >t                               `pass`, or the first failing visible case: `f(0)=7 want 4`, `f(0) error`
    >s                               submit; ends the session

Verbs are requests to a sandbox host (bodies: MessagePack of the models below). Each request names a command
id of its own; a repeated id returns the stored reply. Every reply is the verb's own model or `Refused`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from headway.schemas.ids import Digest, Id
from headway.schemas.messages import Signed
from headway.schemas.wire import Model

ENV = "expr"
FILE = "f.py"
FUNCTION = "f"
PROMPT = b"fix f.py\n>"
ACTIONS_MAX = 6
ACTION_BYTES_MAX = 20
"""Of one line with its newline."""
FILE_BYTES_MAX = 160
STATEMENT_CHARS_MAX = 64 << 10
OBSERVATION_BYTES_MAX = FILE_BYTES_MAX + 2
VISIBLE_INPUTS = (0, 1, 2, 5)
HIDDEN_INPUTS = tuple(range(-7, 46))
REWARD_RIGHT, REWARD_WRONG, REWARD_INVALID = 1.0, 0.0, -0.25

_ACTION = re.compile(rb"(?:([rts])|w ([\x20-\x7e]+))\n")
_RETURN = "    return "


@dataclass(frozen=True, slots=True)
class Action:
    """One line of the model: tool `r`, `w`, `t` or `s`; `argument` is the expression of a `w`."""

    tool: Literal["r", "w", "t", "s"]
    argument: str = ""


def parse_action(line: bytes) -> Action | None:
    """The action that `line`, newline included, asks for; None when it is malformed."""
    match = _ACTION.fullmatch(line) if len(line) <= ACTION_BYTES_MAX else None
    if match is None:
        return None
    if match[2] is not None:
        return Action("w", match[2].decode())
    return Action(match[1].decode())  # type: ignore[arg-type]


def program_text(docstring: str, expression: str) -> str:
    """The file's text."""
    return f'def {FUNCTION}(x):\n    """{docstring}"""\n{_RETURN}{expression}\n'


def replace_expression(text: str, expression: str) -> str:
    """`text` with the expression of its return line replaced: what `w` writes."""
    return f"{text[: text.rindex(_RETURN)]}{_RETURN}{expression}\n"


def render_file(data: bytes) -> str:
    """What `r` shows of a file's bytes, which may be anything: bounded, printable ASCII and newlines."""
    text = data[:FILE_BYTES_MAX].decode("ascii", "replace").rstrip("\n")
    return "".join(c if c == "\n" or " " <= c <= "~" else "?" for c in text)


def render_test(cases: Iterable[tuple[int, str | None, int]]) -> str:
    """What `t` shows of (input, printed result or None for an error, wanted) in order."""
    for given, got, want in cases:
        if got != str(want):
            return f"f({given}) error" if got is None else f"f({given})={got} want {want}"
    return "pass"


def observation(text: str) -> bytes:
    """The bytes that follow an action: `text`, then the prompt for the next line."""
    return text.encode("ascii", "replace")[:FILE_BYTES_MAX] + b"\n>"


def reward(*, right: bool, submitted: bool, malformed: bool) -> float:
    """A session that never submitted or ended on a malformed line is worth less than a wrong answer."""
    if malformed or not submitted:
        return REWARD_INVALID
    return REWARD_RIGHT if right else REWARD_WRONG


class CreateRequest(Model):
    """To `sandbox.<region>.create`. `rollout_id` and `attempt` bind the box and, later, its verdict."""

    command_id: Id
    rollout_id: Id
    attempt: Id
    env: Id = ENV
    task_set: Digest
    task_id: Id


class CreateReply(Model):
    """Where to send this session's verbs. `statement` is the task's text, where the environment has one."""

    host: Id
    box: Id
    statement: Annotated[str, Field(max_length=STATEMENT_CHARS_MAX)] = ""


class ToolRequest(Model):
    """To `<host>.tool`."""

    command_id: Id
    box: Id
    name: Literal["r", "w", "t"]
    argument: Annotated[str, Field(max_length=ACTION_BYTES_MAX)] = ""


class ToolReply(Model):
    """`text` goes through `observation`; `ms` is what the box took."""

    text: Annotated[str, Field(max_length=FILE_BYTES_MAX)]
    ok: bool
    ms: Annotated[float, Field(ge=0)]


class ReadRequest(Model):
    """To `<host>.read`."""

    command_id: Id
    box: Id
    path: Annotated[str, Field(max_length=256)]


class WriteRequest(Model):
    """To `<host>.write`: replaces the whole file."""

    command_id: Id
    box: Id
    path: Annotated[str, Field(max_length=256)]
    data: Annotated[bytes, Field(max_length=512 << 10)]


class ExecRequest(Model):
    """To `<host>.exec`: `argv`, or else Python `code`, with the workspace as working directory."""

    command_id: Id
    box: Id
    argv: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=256)] = Field(default_factory=list)
    code: Annotated[str, Field(max_length=64 << 10)] = ""


class CommandReply(Model):
    """Of read, write and exec. `status` is an exit code, or minus a signal; `data` is a file or an output."""

    data: bytes
    status: int
    timed_out: bool
    truncated: bool


class GradeRequest(Model):
    """To `<host>.grade`: ends the box. What is graded is the workspace as it stands."""

    command_id: Id
    box: Id
    submitted: bool
    malformed: bool


class GradeReply(Model):
    """`verdict` seals a `Verdict`."""

    reward: float
    verdict: Signed


class DestroyRequest(Model):
    """To `<host>.destroy`."""

    command_id: Id
    box: Id


class DestroyReply(Model):
    """The box and everything in it are gone, or were already."""

    destroyed: bool


class Refused(Model):
    """Instead of a verb's reply.

    `busy`: no room, ask again later. `gone`: the host does not know this box. `infra`: the sandbox failed,
    so the attempt is `infra_failed` and never a reward. `invalid`: the request itself is wrong.
    """

    refused: Literal["busy", "gone", "infra", "invalid"]
    why: Annotated[str, Field(max_length=400)]
