"""A run for an agent to work in: a real nats-server, a ledger with its first version, tools that answer at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from nats.aio.msg import Msg

from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.ledger import LedgerTail, LedgerWriter
from headway.bus.reader import read_batch
from headway.bus.server import ServerSettings, free_port, wait_listening
from headway.bus.service import Service, Settings
from headway.bus.topology import Topology
from headway.rollout_agent import service as agent_service
from headway.rollout_agent.engine.service import model_config
from headway.schemas import expr_protocol as p
from headway.schemas import signing
from headway.schemas.config import Config
from headway.schemas.ledger import Genesis, Open
from headway.schemas.messages import Rollout, Signed, Task, Verdict
from headway.schemas.version import Version
from headway.schemas.wire import pack
from headway.weight_sync.publisher import Publisher
from headway.weight_sync.torch_apply import raw_tensors

ZERO = "0" * 64
ENGINE_UP_S = 240.0
"""An engine that imports torch on a busy machine."""
TRAINER_KEY, SANDBOX_KEY = b"t" * 32, b"s" * 32


def chatty_weights(config: Config) -> dict[str, torch.Tensor]:
    """A model that writes `w `, digits, and with one chance in six after each of them a newline: 9 tokens a turn."""
    rng = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=rng) * 0.02 if len(shape) > 1 else torch.ones(shape)
        for name, shape in model_config(config).tensor_shapes().items()
    }
    embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    digits, after = [*b"12345"], {ord(">"): [ord("w")], ord("w"): [ord(" ")], ord(" "): [*b"12345"]}
    after |= {digit: [*digits, 10] for digit in digits}
    for dim, (token, following) in enumerate(after.items()):
        embed[token, dim] += 6.0
        head[following, dim] += 4.0
    return {name: w.bfloat16() for name, w in weights.items()}


@dataclass(slots=True, kw_only=True)
class InstantSandbox:
    """In place of the sandbox hosts: every verb is answered at once, in this process."""

    bus: Bus
    region: str
    command_timeout_s: float
    waiting: int = 0

    async def create(self, task: Task, attempt: str) -> InstantBox:
        return InstantBox(self.bus.run, task, attempt)


class InstantBox:
    statement = ""

    def __init__(self, run: str, task: Task, attempt: str) -> None:
        self._run, self._task, self._attempt = run, task, attempt

    async def tool(self, name: str, argument: str) -> p.ToolReply:
        return p.ToolReply(text="ok", ok=True, ms=0.0)

    async def grade(self, *, submitted: bool, malformed: bool) -> p.GradeReply:
        reward = p.reward(right=False, submitted=submitted, malformed=malformed)
        verdict = Verdict(
            run=self._run,
            rollout_id=self._task.rollout_id,
            attempt=self._attempt,
            task_id=self._task.task_id,
            host="h",
            workspace_digest=ZERO,
            reward=reward,
            parts={},
        )
        return p.GradeReply(reward=reward, verdict=Signed.seal(SANDBOX_KEY, pack(verdict)))

    async def destroy(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class AgentRun:
    """The bus, and what was asked of it so far."""

    bus: Bus
    config: Config
    folder: Path
    engine_pid: int
    issued: int = 0
    read: int = 0
    published: int = 0
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        """Count rollouts as they are published: asking the server for its count would cost the agent's own core."""

        async def count(message: Msg) -> None:
            self.published += 1
            self._more.set()

        await self.bus.client.subscribe(f"rl.{self.config.run.name}.rollout.>", cb=count)

    async def until_published(self, count: int) -> None:
        while self.published < count:
            self._more.clear()
            await self._more.wait()

    async def issue(self, seeds: list[int]) -> None:
        """Tasks whose sessions sample what these seeds decide."""
        tasks = [
            Task(
                rollout_id=f"r{self.issued + i}",
                purpose="train",
                env="expr",
                task_set=ZERO,
                task_id=f"t{seed}",
                group=self.issued + i,
                sample=0,
                temperature=1.0,
                sampling_seed=seed,
                groups_issued=1,
                eval_blocks_issued=0,
                last_of_unit=False,
            )
            for i, seed in enumerate(seeds)
        ]
        self.issued += len(seeds)
        subject = self.bus.subjects.task("expr")
        for start in range(0, len(tasks), 64):
            await asyncio.gather(*(self.bus.publish(subject, task) for task in tasks[start : start + 64]))

    async def stored(self) -> int:
        info = await self.bus.js.stream_info(self.bus.subjects.stream("ROLLOUTS"))
        return int(info.state.last_seq)

    async def until_stored(self, count: int, poll_s: float) -> None:
        while await self.stored() < count:
            await asyncio.sleep(poll_s)

    async def new_rollouts(self) -> list[Rollout]:
        found: list[Rollout] = []
        while batch := await read_batch(self.bus, "ROLLOUTS", self.read + 1):
            found += [await self.bus.open(Rollout, stored) for stored in batch]
            self.read = batch[-1].seq
        return found

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[Service]:
        """The agent in this process, until it is told to drain."""
        settings = Settings(
            nats_url="", run_dir=self.folder, keys_dir=self.folder, store_url="", region="east", instance="one"
        )
        assert self.bus.store is not None
        async with asyncio.TaskGroup() as tasks:
            service = Service(
                name="agent",
                config=self.config,
                settings=settings,
                bus=self.bus,
                store=self.bus.store,
                tasks=tasks,
                stop=asyncio.Event(),
            )
            with mock.patch.object(agent_service, "BusSandbox", InstantSandbox):
                tasks.create_task(agent_service.serve(service))
                while not service.status.get("served"):
                    await asyncio.sleep(0.05)
                yield service
                service.stop.set()


@contextlib.asynccontextmanager
async def running(config: Config, folder: Path, engine: list[str], port: int) -> AsyncIterator[AgentRun]:
    """A nats-server, `engine` as a process that listens on `port`, and version 0.0 in the ledger."""
    server = ServerSettings(folder=folder / "nats", port=free_port(), token=secrets.token_hex(8))
    os.environ["HEADWAY_ENGINE_URL"] = f"http://127.0.0.1:{port}"
    processes = [subprocess.Popen(command) for command in (server.command(), engine)]  # noqa: ASYNC220
    try:
        await wait_listening(server.port)
        await wait_listening(port, ENGINE_UP_S)
        store = ObstoreBlobs.open(str(folder / "store"))
        async with await Bus.connect(server.url, config.run.name, token=server.token, store=store) as bus:
            await Topology(run=config.run.name, ack_wait_s=config.dispatch.ack_wait_s).apply(bus.js)
            await _begin(bus, config)
            run = AgentRun(bus=bus, config=config, folder=folder, engine_pid=processes[1].pid)
            await run.listen()
            yield run
    finally:
        await asyncio.sleep(0.1)
        for process in processes:
            process.terminate()
            process.wait(20)


async def _begin(bus: Bus, config: Config) -> None:
    assert bus.store is not None
    publisher: Any = Publisher(store=bus.store, keys=bus.keys, private_key=TRAINER_KEY)
    base, _ = await publisher.publish(Version(0, 0), raw_tensors(chatty_weights(config)), None)
    genesis = Genesis(
        run=config.run.name,
        config=config.shared(),
        config_digest=config.shared_digest(),
        task_set=ZERO,
        base_manifest=base.digest,
        base_root=base.manifest.root,
        trainer_key=signing.public_key(TRAINER_KEY),
        sandbox_key=signing.public_key(SANDBOX_KEY),
    )
    writer = LedgerWriter(bus, TRAINER_KEY, LedgerTail())
    await writer.append(genesis, Version(0, 0))
    await writer.append(Open(instance="trainer", environment={}), Version(0, 0), term=1)
