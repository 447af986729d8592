"""Cheap stand-ins for what computes: the learner, sandbox hosts and the object store. Engines: `simulator.engines`.

Everything else of a run is the real code. `installed` puts the stand-ins in the places of the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import structlog
import torch

from headway.bus import connection, direct, leases, reader, rpc
from headway.bus.blobs import MissingBlob
from headway.bus.failpoints import failpoint, uploaded
from headway.bus.service import Service
from headway.rollout_agent import outcomes, session, tools
from headway.rollout_agent import service as agent_service
from headway.rollout_agent import weights as agent_weights
from headway.schemas import expr_protocol as p
from headway.schemas import signing
from headway.schemas.errors import UnavailableError
from headway.schemas.messages import Signed, Verdict
from headway.schemas.wire import pack
from headway.trainer import dispatcher
from headway.trainer import service as trainer_service
from headway.trainer.batching import Sample
from headway.trainer.checkpoint import Checkpoint
from headway.trainer.learner import StepResult
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.publisher import Publisher
from simulator.engines import EngineClient
from simulator.loop import LIFE, SimLoop

SIZE = 16


class Store:
    """An object store; `broken` refuses everything, `full` refuses what is new."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self._loop, self._rng = loop, rng
        self.objects: dict[str, bytes] = {}
        self.full = self.broken = False
        self.lost_reply = 0.0
        self.put_bytes = self.got_bytes = 0

    async def _pass(self, what: str, *, writes: bool = False) -> None:
        await asyncio.sleep(0.001 + 0.004 * self._rng.random())
        if self.broken or (self.full and writes):
            raise UnavailableError(f"{what} failed", why="No space left on device")

    def once(self) -> Store:
        return self

    async def put(self, key: str, data: bytes) -> None:
        failpoint(f"put.{uploaded(key)}.before")
        await self._pass(f"put {key}", writes=key not in self.objects)
        self.objects.setdefault(key, data)
        self.put_bytes += len(data)
        failpoint(f"put.{uploaded(key)}.after")
        if self._rng.random() < self.lost_reply:
            raise UnavailableError(f"put {key} failed 5 times", why="no reply")

    async def get(self, key: str) -> bytes:
        await self._pass(f"get {key}")
        self.got_bytes += len(self.objects.get(key, b""))
        if key not in self.objects:
            raise MissingBlob(f"get {key}: no such object")
        return self.objects[key]

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        return (await self.get(key))[start:end]

    async def exists(self, key: str) -> bool:
        await self._pass(f"head {key}")
        return key in self.objects

    async def delete(self, key: str) -> None:
        failpoint("delete.before")
        await self._pass(f"delete {key}")
        self.objects.pop(key, None)
        failpoint("delete.after")

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        for key, data in list(self.objects.items()):
            if key.startswith(prefix):
                yield key, len(data)


# The learner


class Model:
    """The sizes that intake checks trajectories against."""

    vocab_size, num_hidden_layers, num_experts_per_tok, num_experts = 260, 1, 1, 2

    @staticmethod
    def tensor_shapes() -> dict[str, tuple[int, ...]]:
        return {"w": (SIZE,)}


class Learner:
    """Its weights are a hash of all that it has trained on, in order."""

    def __init__(self, weights: dict[str, torch.Tensor], max_lag: int) -> None:
        self._w, self._max_lag, self._steps_done = weights["w"].float().clone(), max_lag, 0

    def rollout_weights(self) -> dict[str, torch.Tensor]:
        return {"w": self._w.to(torch.bfloat16)}

    def state(self, *, copied: bool = True) -> Checkpoint:
        moments = {f"{kind}/w": torch.zeros(SIZE) for kind in ("exp_avg", "exp_avg_sq")}
        return Checkpoint(masters={"w": self._w.clone()}, moments=moments, counters={"steps_done": self._steps_done})

    def load_state(self, checkpoint: Checkpoint) -> None:
        self._w, self._steps_done = checkpoint.masters["w"].clone(), checkpoint.counters["steps_done"]

    def step(self, batch: list[Sample]) -> StepResult:
        seen = hashlib.sha256(self._w.numpy().tobytes())
        trained = masked = 0
        for sample in batch:
            seen.update(f"{sample.rollout_id} {sample.reward} {sample.trajectory.token_ids.tolist()}".encode())
            kept, old = sample.counts(self._max_lag)
            trained, masked = trained + kept, masked + old
        numbers = np.frombuffer(seen.digest(), np.uint16)[:SIZE].astype(np.float32) / 65_536
        self._w = torch.from_numpy(numbers).clone()
        self._steps_done += 1
        metrics = {"loss": float(numbers[0]), "trained_tokens": float(trained), "masked_tokens": float(masked)}
        metrics["reward_mean"] = sum(sample.reward for sample in batch) / len(batch)
        return StepResult(
            metrics=metrics, advantages=tuple(0.0 for _ in batch), seed=self._steps_done, micro_batches=()
        )


def _load_base(folder: Path) -> tuple[Model, dict[str, torch.Tensor]]:
    return Model(), {"w": torch.arange(SIZE, dtype=torch.float32).to(torch.bfloat16)}


# Sandboxes


class Host:
    """A sandbox host: boxes by name, replies by command id, as the real one keeps them."""

    def __init__(self, service: Service, rng: random.Random) -> None:
        self._service, self._rng = service, rng
        self._key = signing.load_key(service.settings.sandbox_key())
        self.boxes: dict[str, p.CreateRequest] = {}
        self._replies: dict[str, dict[str, Any]] = {}

    async def serve(self) -> None:
        service, subjects = self._service, self._service.bus.subjects
        region, name = service.settings.region, service.settings.instance
        for verb, act in (("tool", self.tool), ("grade", self.grade), ("destroy", self.destroy)):
            subject = subjects.sandbox_verb(region, name, verb)
            await rpc.serve(service.bus.client, subject, self._once(act), tasks=service.tasks)
        create = await rpc.serve(
            service.bus.client, subjects.sandbox_create(region), self._once(self.create), tasks=service.tasks,
            queue="sandbox",
        )  # fmt: skip
        await service.stop.wait()
        await create.unsubscribe()
        for _ in range(50):  # boxes of killed sessions are left behind
            if self.boxes:
                await asyncio.sleep(0.1)

    def _once(self, act: Any) -> Any:
        async def handle(fields: dict[str, Any]) -> dict[str, Any]:
            command = fields["command_id"]
            if command not in self._replies:
                await asyncio.sleep(0.005 * self._rng.random())
                if command not in self._replies:
                    self._replies[command] = act(fields).model_dump()
            return self._replies[command]

        return handle

    def create(self, fields: dict[str, Any]) -> Any:
        request = p.CreateRequest.model_validate(fields)
        box = f"b{len(self._replies)}"
        self.boxes[box] = request
        return p.CreateReply(host=self._service.settings.instance, box=box)

    def tool(self, fields: dict[str, Any]) -> Any:
        if fields["box"] not in self.boxes:
            return p.Refused(refused="gone", why="no such box")
        return p.ToolReply(text="pass", ok=True, ms=1.0)

    def grade(self, fields: dict[str, Any]) -> Any:
        request = self.boxes.pop(fields["box"], None)
        if request is None:
            return p.Refused(refused="gone", why="no such box")
        reward = float(int(hashlib.sha256(request.rollout_id.encode()).hexdigest(), 16) % 2)
        verdict = Verdict(
            run=self._service.config.run.name,
            rollout_id=request.rollout_id,
            attempt=request.attempt,
            task_id=request.task_id,
            host=self._service.settings.instance,
            workspace_digest="0" * 64,
            reward=reward,
            parts={},
        )
        return p.GradeReply(reward=reward, verdict=Signed.seal(self._key, pack(verdict)))

    def destroy(self, fields: dict[str, Any]) -> Any:
        self.boxes.pop(fields["box"], None)
        return p.DestroyReply(destroyed=True)


# Installing


class _Http:
    """In the place of the aiohttp module."""

    class TCPConnector:
        def __init__(self, **kwargs: Any) -> None: ...

    class DummyCookieJar: ...

    class ClientTimeout:
        def __init__(self, **kwargs: Any) -> None: ...

    class ClientSession:
        def __init__(self, **kwargs: Any) -> None: ...

        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *args: Any) -> None: ...


DISK = SimpleNamespace(full=False)
"""Of all agents."""
_real_put = HostMirror._put


def _put(self: HostMirror, path: Path, data: bytes) -> None:
    if DISK.full:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    _real_put(self, path, data)


def _now() -> float:
    return asyncio.get_running_loop().time()


class Nonces:
    """Names of attempts that a seed decides."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self) -> str:
        self.given += 1
        life = LIFE.get()
        return f"{life.name if life else 'x'}-{self.given}"


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The stand-ins in their places, waits scaled to a run of a few seconds, logs off."""
    clock = SimpleNamespace(perf_counter=_now, monotonic=_now, time=_now)

    def make_learner(self: Any, model: Any, weights: dict[str, torch.Tensor]) -> Learner:
        return Learner(weights, self._config.staleness.max_lag)

    patches: list[Any] = [
        mock.patch.object(trainer_service, "load_base", _load_base),
        mock.patch.object(trainer_service.Trainer, "_make_learner", make_learner),
        mock.patch.object(trainer_service, "time", clock),
        mock.patch.object(HostMirror, "_put", _put),
        mock.patch.object(agent_service, "EngineClient", EngineClient),
        mock.patch.object(agent_service, "aiohttp", _Http),
        mock.patch.object(agent_service, "time", clock),
        mock.patch.object(agent_service, "Layout", SimpleNamespace(from_hf=lambda config: None)),
        mock.patch.object(agent_service, "random", SimpleNamespace(Random=lambda: random.Random(0))),
        mock.patch.dict(Fetcher.__init__.__kwdefaults__, clock=_now),
        mock.patch.dict(Publisher.__init__.__kwdefaults__, clock=_now),
        mock.patch.dict(reader.follow.__kwdefaults__, poll_s=0.15),
    ]
    for module, name, value in WAITS:
        patches.append(mock.patch.object(module, name, value))
    configured = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50), cache_logger_on_first_use=False)
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            yield
        finally:
            structlog.configure(**configured)


WAITS = (
    (connection, "ACK_S_MAX", 1.0),
    (leases, "RETRY_S", 0.25),
    (dispatcher, "POLL_S", 0.15),
    (direct, "REPLY_S_MAX", 1.0),
    (tools, "ROUND_TRIP_S", 0.5),
    (outcomes, "RETRY_S_FIRST", 0.2),
    (outcomes, "RETRY_S_MAX", 2.0),
    (outcomes, "PUSHED_BACK_S", 0.5),
    (session, "DESTROY_S", 1.0),
    (agent_weights, "RETRY_S", 0.2),
)
