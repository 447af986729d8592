"""A sandbox host: its sessions, each with one box, and the verbs on them. Knows no bus.

Invariants: a box serves one session and is never reused; a command id runs once and its reply is kept for
repeats; an infrastructure failure is a refusal and never a reward; a verdict is signed only over a box that
is already dead. Sessions, replies and idleness are bounded.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from headway.sandbox.isolation import Box, BoxFailed, Limits
from headway.sandbox.pool import Pool
from headway.sandbox.workspaces import Workspaces
from headway.schemas import expr_protocol as p
from headway.schemas.errors import InputError
from headway.schemas.messages import Signed, Verdict
from headway.schemas.wire import Model, pack

REPLIES_MAX = 4096
"""Replies kept for repeated command ids; several times what all sessions can have in flight."""
READ_BYTES_MAX = 512 << 10

RequestT = TypeVar("RequestT", bound=Model)


class Refusal(Exception):
    """Becomes the reply `Refused`."""

    def __init__(self, kind: str, why: str) -> None:
        self.reply = p.Refused(refused=kind, why=why[:400])  # type: ignore[arg-type]
        super().__init__(why)


@dataclass(slots=True, kw_only=True)
class Session:
    box: Box
    task_id: str
    rollout_id: str
    attempt: str
    used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """`timeout_is_infra`: in lockstep no clock may decide a reward, so a timeout asks for another attempt."""

    run: str
    host: str
    key: bytes
    limits: Limits
    sessions_max: int
    idle_s_max: float
    timeout_is_infra: bool = False


class Host:
    """Serves verbs; see `headway.schemas.expr_protocol` for requests and replies."""

    def __init__(
        self, settings: HostSettings, pool: Pool, workspaces: Workspaces, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._pool, self._workspaces, self._clock = settings, pool, workspaces, clock
        self._sessions: dict[str, Session] = {}
        self._creating = 0
        self._created = 0
        self._replies: OrderedDict[str, asyncio.Future[dict[str, Any]]] = OrderedDict()
        self.draining = False
        self.counters = {"sessions": 0, "graded": 0, "right": 0, "infra_failed": 0, "reaped": 0, "busy": 0}
        self.verbs: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "create": self._verb(p.CreateRequest, self._create),
            "tool": self._verb(p.ToolRequest, self._tool),
            "read": self._verb(p.ReadRequest, self._read, keep=False),
            "write": self._verb(p.WriteRequest, self._write),
            "exec": self._verb(p.ExecRequest, self._exec),
            "grade": self._verb(p.GradeRequest, self._grade),
            "destroy": self._verb(p.DestroyRequest, self._destroy),
        }

    @property
    def open_sessions(self) -> int:
        return len(self._sessions) + self._creating

    def _verb(
        self, request_type: type[RequestT], run: Callable[[RequestT], Awaitable[Model]], keep: bool = True
    ) -> Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]:
        """Validate, run once per command id, keep the reply; not of reads, which are large, nor `busy`."""

        async def serve(fields: dict[str, Any]) -> dict[str, Any]:
            try:
                request = request_type.model_validate(fields)
            except ValueError as error:
                raise InputError(f"not a {request_type.__name__}", why=str(error)[:300]) from None
            command_id = f"{request_type.__name__}/{request.command_id}"  # type: ignore[attr-defined]
            if (kept := self._replies.get(command_id)) is not None:
                return await asyncio.shield(kept)
            reply = self._replies[command_id] = asyncio.get_running_loop().create_future()
            try:
                answer = (await self._run(request, run)).model_dump()
            except BaseException:
                self._replies.pop(command_id, None)
                reply.cancel()
                raise
            reply.set_result(answer)
            if not keep or answer.get("refused") == "busy":
                self._replies.pop(command_id, None)  # among many others it was forgotten already
            while len(self._replies) > REPLIES_MAX:
                self._replies.popitem(last=False)
            return answer

        return serve

    async def _run(self, request: RequestT, run: Callable[[RequestT], Awaitable[Model]]) -> Model:
        try:
            return await run(request)
        except Refusal as refusal:
            return refusal.reply
        except BoxFailed as error:
            self.counters["infra_failed"] += 1
            box = getattr(request, "box", None)
            if box is not None and (session := self._sessions.pop(box, None)) is not None:
                with suppress(BoxFailed):
                    await session.box.destroy()
            return p.Refused(refused="infra", why=str(error)[:400])

    def _session(self, box: str) -> Session:
        session = self._sessions.get(box)
        if session is None:
            raise Refusal("gone", f"no box {box}: it was idle too long, graded, destroyed, or on another host")
        session.used_s = self._clock()
        return session

    async def _create(self, request: p.CreateRequest) -> Model:
        workspaces = self._workspaces
        if request.task_set != workspaces.digest:
            raise Refusal("invalid", f"this host holds task set {workspaces.digest[:12]}, not the one asked for")
        if request.task_id not in workspaces.tasks:
            raise Refusal("invalid", f"no task {request.task_id} in the task set")
        if self.draining or self.open_sessions >= self._settings.sessions_max:
            self.counters["busy"] += 1
            raise Refusal("busy", "draining" if self.draining else f"{self.open_sessions} sessions are open")
        self._creating += 1
        try:
            box = await self._pool.take()
            try:
                statement = await workspaces.prepare(box, request.task_id)
            except BaseException:
                await box.destroy()
                raise
        finally:
            self._creating -= 1
        self._created += 1
        name = f"b{self._created}-{secrets.token_hex(8)}"  # never that of a box of this host's life before
        self._sessions[name] = Session(
            box=box,
            task_id=request.task_id,
            rollout_id=request.rollout_id,
            attempt=request.attempt,
            used_s=self._clock(),
        )
        self.counters["sessions"] += 1
        return p.CreateReply(host=self._settings.host, box=name, statement=statement[: p.STATEMENT_CHARS_MAX])

    async def _tool(self, request: p.ToolRequest) -> Model:
        session, started_s = self._session(request.box), self._clock()
        shown = await self._workspaces.tool(
            session.box, session.task_id, request.name, request.argument, self._settings.limits
        )
        self._refuse_timeout(shown.timed_out)
        return p.ToolReply(text=shown.text, ok=shown.ok, ms=max(0.0, (self._clock() - started_s) * 1e3))

    def _refuse_timeout(self, timed_out: bool) -> None:
        if timed_out and self._settings.timeout_is_infra:
            raise BoxFailed("a test timed out", why="in lockstep no clock decides what a session sees or earns")

    async def _read(self, request: p.ReadRequest) -> Model:
        session = self._session(request.box)
        reply, data = await session.box.request("read", path=_inside(request.path), limit=READ_BYTES_MAX)
        return _command_reply(reply, data)

    async def _write(self, request: p.WriteRequest) -> Model:
        session = self._session(request.box)
        reply, data = await session.box.request("write", request.data, path=_inside(request.path))
        return _command_reply(reply, data)

    async def _exec(self, request: p.ExecRequest) -> Model:
        session, limits = self._session(request.box), self._settings.limits
        what: dict[str, Any] = {"argv": request.argv} if request.argv else {"code": request.code}
        reply, data = await session.box.request(
            "exec", wall_s=limits.command_s, output_bytes=limits.output_bytes, **what
        )
        self._refuse_timeout(reply.get("timed_out") is True)
        return _command_reply(reply, data)

    async def _grade(self, request: p.GradeRequest) -> Model:
        session = self._session(request.box)
        found = await self._workspaces.collect(session.box, session.task_id)
        self._sessions.pop(request.box, None)
        await session.box.destroy()
        grade = await self._workspaces.grade(
            found,
            session.task_id,
            self._pool,
            self._settings.limits,
            submitted=request.submitted,
            malformed=request.malformed,
        )
        self._refuse_timeout(grade.timed_out)
        self.counters["graded"] += 1
        self.counters["right"] += grade.right
        verdict = Verdict(
            run=self._settings.run,
            rollout_id=session.rollout_id,
            attempt=session.attempt,
            task_id=session.task_id,
            host=self._settings.host,
            workspace_digest=grade.digest,
            reward=grade.reward,
            parts=grade.parts,
        )
        return p.GradeReply(reward=grade.reward, verdict=Signed.seal(self._settings.key, pack(verdict)))

    async def _destroy(self, request: p.DestroyRequest) -> Model:
        session = self._sessions.pop(request.box, None)
        if session is not None:
            await session.box.destroy()
        return p.DestroyReply(destroyed=session is not None)

    async def reap_idle(self) -> int:
        """Destroy boxes whose agent has not spoken for `idle_s_max` (it died); how many."""
        before_s, reaped = self._clock() - self._settings.idle_s_max, 0
        for name, session in list(self._sessions.items()):
            idle = session.used_s < before_s and not session.box.lock.locked()
            if (
                idle and self._sessions.pop(name, None) is not None
            ):  # while another died it may have been used, or ended
                reaped += 1
                await session.box.destroy()
        self.counters["reaped"] += reaped
        return reaped

    async def close(self) -> None:
        """Destroy every box."""
        while self._sessions:
            _, session = self._sessions.popitem()
            await session.box.destroy()


def _inside(path: str) -> str:
    """A path of the workspace. The box would confine it anyway; a clear refusal is kinder."""
    if path.startswith("/") or ".." in path.split("/") or "\0" in path or not path:
        raise Refusal("invalid", f"{path[:80]!r} is not a relative path inside the workspace")
    return path


def _command_reply(reply: dict[str, Any], data: bytes) -> p.CommandReply:
    if "error" in reply:
        return p.CommandReply(data=str(reply["error"])[:80].encode(), status=1, timed_out=False, truncated=False)
    status = reply.get("status", 0)
    return p.CommandReply(
        data=data,
        status=status if type(status) is int and abs(status) < 1 << 16 else 1,
        timed_out=reply.get("timed_out") is True,
        truncated=reply.get("truncated") is True or (type(size := reply.get("size")) is int and size > len(data)),
    )
