"""Services that an agent needs, in this process: a sandbox that answers by script, a real engine that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from aiohttp import web

from headway.bus import rpc
from headway.bus.connection import Bus
from headway.rollout_agent.engine.core import EngineCore
from headway.rollout_agent.engine.server import EngineServer
from headway.rollout_agent.engine.service import core_settings, model_config
from headway.schemas import expr_protocol as p
from headway.schemas.config import Config
from headway.schemas.messages import Signed, Verdict
from headway.schemas.wire import pack

ZERO = "0" * 64


REGIONS = ("east", "west")
HALTED_S = 0.5


def chatty_weights(
    config: Config, seed: int, letters: bytes = b"rtrtrts", sure: float = 1.0
) -> dict[str, torch.Tensor]:
    """A model that mostly writes one of `letters` after '>' and then a newline, so that sessions have turns."""
    rng = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(shape, generator=rng) * 0.16 if len(shape) > 1 else torch.ones(shape)
        for name, shape in model_config(config).tensor_shapes().items()
    }
    embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embed[ord(">"), 0] += 3.0
    head[[*letters], 0] += 2.2 * sure
    embed[[*letters], 1] += 3.0
    head[10, 1] += 3.0 * sure
    return {name: w.bfloat16() for name, w in weights.items()}


@dataclass
class ScriptedSandbox:
    """Sandbox hosts that answer at once; `refuse` maps a verb to the refusal it gives."""

    bus: Bus
    key: bytes
    run: str = "test"
    regions: tuple[str, ...] = REGIONS
    tool_s: float = 0.0
    refuse: dict[str, str] = field(default_factory=dict)
    open: dict[str, p.CreateRequest] = field(default_factory=dict)
    graded: int = 0
    tools: int = 0
    called: Counter[str] = field(default_factory=Counter)
    halt: dict[str, int] = field(default_factory=dict)
    """After so many calls, a rollout's take HALTED_S."""

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        subjects, client = self.bus.subjects, self.bus.client
        for region in self.regions:
            await rpc.serve(client, subjects.sandbox_create(region), self.create, tasks=tasks)
            for verb in ("tool", "grade", "destroy"):
                await rpc.serve(client, subjects.sandbox_verb(region, "h", verb), getattr(self, verb), tasks=tasks)

    async def is_working(self) -> bool:
        """Whether a session is in the middle of its turns."""
        return self.tools > 0 and bool(self.open)

    def refusal(self, verb: str) -> dict[str, Any] | None:
        kind = self.refuse.get(verb)
        return p.Refused(refused=kind, why="scripted").model_dump() if kind else None

    async def create(self, fields: dict[str, Any]) -> dict[str, Any]:
        request = p.CreateRequest.model_validate(fields)
        box = f"b{len(self.open)}-{request.attempt}"
        self.open[box] = request
        return self.refusal("create") or p.CreateReply(host="h", box=box).model_dump()

    async def tool(self, fields: dict[str, Any]) -> dict[str, Any]:
        request = p.ToolRequest.model_validate(fields)
        rollout_id = self.open[request.box].rollout_id
        self.tools, self.called[rollout_id] = self.tools + 1, self.called[rollout_id] + 1
        halted = self.called[rollout_id] > self.halt.get(rollout_id, self.called[rollout_id])
        await asyncio.sleep(HALTED_S if halted else self.tool_s)
        return self.refusal("tool") or p.ToolReply(text=f"did {request.name}", ok=True, ms=1.0).model_dump()

    async def grade(self, fields: dict[str, Any]) -> dict[str, Any]:
        request = p.GradeRequest.model_validate(fields)
        made = self.open.pop(request.box)
        self.graded += 1
        reward = p.reward(right=False, submitted=request.submitted, malformed=request.malformed)
        verdict = Verdict(
            run=self.run,
            rollout_id=made.rollout_id,
            attempt=made.attempt,
            task_id=made.task_id,
            host="h",
            workspace_digest=ZERO,
            reward=reward,
            parts={},
        )
        signed = Signed.seal(self.key, pack(verdict))
        return self.refusal("grade") or p.GradeReply(reward=reward, verdict=signed).model_dump()

    async def destroy(self, fields: dict[str, Any]) -> dict[str, Any]:
        found = self.open.pop(p.DestroyRequest.model_validate(fields).box, None)
        return p.DestroyReply(destroyed=found is not None).model_dump()


class Cable:
    """The way to a server on loopback, which can be cut: then nobody gets through, on old connections or new ones."""

    def __init__(self, to_port: int) -> None:
        self._to_port, self.port = to_port, 0
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()

    async def heal(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for end in self._ends:
            end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        ends = {writer, far_writer}
        self._ends |= ends
        with contextlib.suppress(OSError):
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        self._ends -= ends


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


class LocalEngine:
    """An engine over HTTP in this process, which can be killed and started again on the same port."""

    def __init__(self, config: Config) -> None:
        self._settings, self.port = core_settings(config), 0
        self.core: EngineCore | None = None

    async def start(self) -> None:
        self.core = EngineCore(self._settings, lambda error: pytest.fail(repr(error)))
        self._runner = web.AppRunner(
            EngineServer(self.core).app(), handler_cancellation=True, shutdown_timeout=0.05, access_log=None
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.core.start()

    async def kill(self) -> None:
        assert self.core is not None
        await self._runner.cleanup()
        self.core.stop()


async def end(task: asyncio.Task[None]) -> None:
    """Cancel until it ends (asyncio.wait_for of Python 3.11 can swallow a cancellation), or raise its failure."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.5)
    if not task.cancelled():
        task.result()
