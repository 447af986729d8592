"""A session's side of the sandbox: verbs over NATS, each under a command id so that asking again is safe."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from pydantic import ValidationError

from headway.bus.connection import Bus
from headway.schemas import expr_protocol as p
from headway.schemas.errors import HeadwayError, UnavailableError
from headway.schemas.messages import Task
from headway.schemas.wire import Model

ASK_AGAIN_MAX = 3
"""How often a verb without an answer is asked again under its command id."""
BUSY_WAIT_S = 0.2
ROUND_TRIP_S = 2.0
"""On top of what a command itself may take."""

ReplyT = TypeVar("ReplyT", bound=Model)


class SandboxTrouble(UnavailableError):
    """No sandbox, or it failed: the attempt is `infra_failed`."""


class Invalid(SandboxTrouble):
    """The sandbox refused the request itself."""


class Box(Protocol):
    """What a session needs of a sandbox. read, write and exec answer whatever a model asks."""

    statement: str
    """The task's text, which is hostile; empty where the environment has none."""

    async def read(self, path: str) -> p.CommandReply: ...
    async def write(self, path: str, data: bytes) -> p.CommandReply: ...
    async def exec(self, argv: list[str]) -> p.CommandReply: ...
    async def tool(self, name: Literal["r", "w", "t"], argument: str) -> p.ToolReply: ...
    async def grade(self, *, submitted: bool, malformed: bool) -> p.GradeReply: ...
    async def destroy(self) -> None: ...


class Sandbox(Protocol):
    waiting: int
    """Sessions that wait because no host answers them: no time to begin another."""

    async def create(self, task: Task, attempt: str) -> Box: ...


@dataclass(slots=True, kw_only=True)
class BusSandbox:
    """The sandbox hosts of a region."""

    bus: Bus
    region: str
    command_timeout_s: float
    waiting: int = 0  # requests that no host serves: all are busy, or none answers

    async def create(self, task: Task, attempt: str) -> Box:
        """A fresh box; waits while all hosts are busy or away (the caller's deadline bounds that).

        A host that restarts so costs nobody an attempt: nothing has been sampled yet.

        Raises SandboxTrouble.
        """
        request = p.CreateRequest(
            command_id=f"{attempt}-create",
            rollout_id=task.rollout_id,
            attempt=attempt,
            task_set=task.task_set,
            task_id=task.task_id,
        )
        reply = await self.ask(self.bus.subjects.sandbox_create(self.region), request, p.CreateReply, math.inf)
        return BusBox(self, reply, attempt)

    async def ask(self, subject: str, request: Model, kind: type[ReplyT], silent_max: float = ASK_AGAIN_MAX) -> ReplyT:
        """Send a verb and check its answer. Raises SandboxTrouble, after `silent_max` times without an answer too."""
        silent, waits = 0, False
        try:
            while True:
                try:
                    timeout_s = self.command_timeout_s + ROUND_TRIP_S
                    answer = await self.bus.request(subject, request.model_dump(), timeout_s=timeout_s)
                    return _read(answer, kind)
                except _Busy:
                    pass
                except SandboxTrouble:
                    raise
                except UnavailableError as error:
                    if silent >= silent_max:
                        raise SandboxTrouble(error.what, why=error.why) from None
                    silent += 1
                except HeadwayError as error:
                    raise SandboxTrouble(f"{subject}: {error.what}", why=error.why) from None
                self.waiting += not waits
                waits = True
                await asyncio.sleep(BUSY_WAIT_S)
        finally:
            self.waiting -= waits


class _Busy(Exception):
    pass


def _read(answer: dict[str, Any], kind: type[ReplyT]) -> ReplyT:
    try:
        if "refused" not in answer:
            return kind.model_validate(answer)
        refused = p.Refused.model_validate(answer)
    except ValueError as error:
        raise SandboxTrouble(f"a sandbox's reply is no {kind.__name__}", why=str(error)[:300]) from None
    if refused.refused == "busy":
        raise _Busy
    kind_of = Invalid if refused.refused == "invalid" else SandboxTrouble
    raise kind_of(f"the sandbox refused: {refused.refused}", why=refused.why)


def _failed(why: str) -> p.CommandReply:
    return p.CommandReply(data=why.encode("utf-8", "replace"), status=1, timed_out=False, truncated=False)


class BusBox:
    """One box on one host. Command ids count up, so that a verb asked twice runs once."""

    def __init__(self, sandbox: BusSandbox, created: p.CreateReply, attempt: str) -> None:
        self._sandbox, self._host, self._box, self._attempt = sandbox, created.host, created.box, attempt
        self.statement = created.statement
        self._asked = 0

    async def tool(self, name: Literal["r", "w", "t"], argument: str) -> p.ToolReply:
        request = p.ToolRequest(command_id=self._next(), box=self._box, name=name, argument=argument)
        return await self._sandbox.ask(self._verb("tool"), request, p.ToolReply)

    async def read(self, path: str) -> p.CommandReply:
        return await self._command("read", p.ReadRequest, path=path)

    async def write(self, path: str, data: bytes) -> p.CommandReply:
        return await self._command("write", p.WriteRequest, path=path, data=data)

    async def exec(self, argv: list[str]) -> p.CommandReply:
        return await self._command("exec", p.ExecRequest, argv=argv)

    async def _command(self, verb: str, kind: type[Model], **fields: Any) -> p.CommandReply:
        """A request that is too large or leaves the workspace fails like a command: the model asked for it."""
        try:
            request = kind(command_id=self._next(), box=self._box, **fields)
        except ValidationError as error:
            return _failed(error.errors()[0]["msg"])
        try:
            return await self._sandbox.ask(self._verb(verb), request, p.CommandReply)
        except Invalid as error:
            return _failed(error.why)

    async def grade(self, *, submitted: bool, malformed: bool) -> p.GradeReply:
        """The signed verdict; the box is gone afterwards."""
        request = p.GradeRequest(command_id=self._next(), box=self._box, submitted=submitted, malformed=malformed)
        return await self._sandbox.ask(self._verb("grade"), request, p.GradeReply)

    async def destroy(self) -> None:
        request = p.DestroyRequest(command_id=self._next(), box=self._box)
        await self._sandbox.ask(self._verb("destroy"), request, p.DestroyReply)

    def _verb(self, verb: str) -> str:
        return self._sandbox.bus.subjects.sandbox_verb(self._sandbox.region, self._host, verb)

    def _next(self) -> str:
        self._asked += 1
        return f"{self._attempt}-{self._asked}"
