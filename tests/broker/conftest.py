"""A run's folder and in-process services on a real nats-server, with scripted agents."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.bus.connection import Bus
from headway.bus.leases import TaskQueue
from headway.bus.ledger import LedgerReader
from headway.bus.service import Service, Settings
from headway.kernels import hf
from headway.kernels.config import ModelConfig
from headway.kernels.weights import init_weights
from headway.schemas import signing
from headway.schemas.config import Config, parse_config
from headway.schemas.errors import UnavailableError
from headway.schemas.ids import attempt_nonce
from headway.schemas.messages import Rollout, Signed, Task, Verdict
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import pack
from headway.trainer import dispatcher
from headway.trainer import service as trainer_service
from headway.trainer.history import History

from .agent_stand import make_stand as make_stand
from .recorded import made as made
from .stand_ins import end as end

RENEW_S = 1.0
CONFIG = """
[run]
name = "test"
steps = {steps}
[grpo]
groups_per_step = 2
samples_per_group = 2
min_graded = 2
[engine]
numerics = "off"
[eval]
at = []
[dispatch]
ack_wait_s = 1.0
[model]
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
moe_intermediate_size = 16
num_experts = 4
"""


class LocalRun:
    """One run on one bus: its folder, its services in this process, and what its ledger says."""

    def __init__(self, bus: Bus, folder: Path, config: Config) -> None:
        self.bus, self.folder, self.config = bus, folder, config
        model = config.model
        self.model = ModelConfig(
            vocab_size=260,
            hidden_size=model.hidden_size,
            num_hidden_layers=model.num_hidden_layers,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            head_dim=model.head_dim,
            moe_intermediate_size=model.moe_intermediate_size,
            num_experts=model.num_experts,
            num_experts_per_tok=model.num_experts_per_tok,
            max_position_embeddings=model.max_position_embeddings,
        )
        for name in ("trainer", "sandbox"):
            signing.create_key(folder / "keys" / f"{name}.key")
        (folder / "tasks").mkdir(exist_ok=True)
        for name in ("train", "heldout"):
            lines = [json.dumps({"id": f"{name}{i}"}) for i in range(4)]
            (folder / "tasks" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        if not (folder / "base").exists():
            import torch

            weights = {name: w.to(torch.bfloat16) for name, w in init_weights(self.model, 0).items()}
            hf.save_folder(folder / "base", self.model, weights)

    @property
    def settings(self) -> Settings:
        return Settings(
            nats_url="", run_dir=self.folder, keys_dir=self.folder / "keys", store_url="", region="east", instance="one"
        )

    @contextlib.asynccontextmanager
    async def service(self, name: str, main: Callable[[Service], Any]) -> AsyncIterator[Service]:
        """Run a service's main function in this process; it is cancelled like a kill, not drained."""
        assert self.bus.store is not None
        tasks = asyncio.TaskGroup()
        service = Service(
            name=name,
            config=self.config,
            settings=self.settings,
            bus=self.bus,
            store=self.bus.store,
            tasks=tasks,
            stop=asyncio.Event(),
        )

        async def run() -> None:
            try:
                async with tasks:
                    await main(service)
            finally:
                service.stop.set()

        running = asyncio.create_task(run())
        try:
            yield service
        finally:
            await end(running)

    def trainer(self) -> Any:
        return self.service("trainer", trainer_service.main)

    def dispatcher(self) -> Any:
        return self.service("dispatcher", dispatcher.main)

    async def history(self) -> History:
        history = History()
        history.extend(await LedgerReader(self.bus).read_new())
        return history

    async def wait_for_step(self, n: int, timeout_s: float = 30) -> History:
        async with asyncio.timeout(timeout_s):
            while (history := await self.history()).head.n < n:
                await asyncio.sleep(0.1)
        return history

    def graded(self, task: Task, reward: float, version: Version, seq: int = 1, tokens: int = 6) -> Rollout:
        """A graded attempt with made-up tokens: a pure function of the task, but for the attempt's name."""
        rng = np.random.default_rng(task.sampling_seed)
        mask = np.array([0, 0, *[1] * (tokens - 2)], np.uint8)
        trajectory = Trajectory(
            token_ids=rng.integers(0, 256, tokens).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask == 1, -5.5, 0).astype(np.float32),
            spans=[Span(start=2, end=tokens, version=version)],
            routes=np.zeros((0, 0, 0), np.uint8),
            route_spans=[],
            layer_map=[0, 1],
            temperature=1.0,
            turns=1,
            stop_reason="submitted",
        )
        attempt = attempt_nonce()
        verdict = Verdict(
            run=self.config.run.name,
            rollout_id=task.rollout_id,
            attempt=attempt,
            task_id=task.task_id,
            host="h",
            workspace_digest="0" * 64,
            reward=reward,
            parts={},
        )
        key = signing.load_key(self.folder / "keys" / "sandbox.key")
        return Rollout(
            outcome="ok",
            terminal=True,
            reward=reward,
            trajectory=trajectory,
            verdict=Signed.seal(key, pack(verdict)),
            **self.attempt_fields(task, attempt, seq),
        )

    def failed(self, task: Task, seq: int = 1) -> Rollout:
        fields = self.attempt_fields(task, attempt_nonce(), seq)
        return Rollout(outcome="infra_failed", terminal=True, reason="scripted", **fields)

    @staticmethod
    def attempt_fields(task: Task, attempt: str, seq: int) -> dict[str, Any]:
        return {
            "rollout_id": task.rollout_id,
            "attempt": attempt,
            "purpose": task.purpose,
            "group": task.group,
            "sample": task.sample,
            "task_id": task.task_id,
            "task_seq": seq,
            "delivery": 1,
            "region": "east",
            "agent": "scripted",
        }

    @contextlib.asynccontextmanager
    async def agent(self, answer: Callable[[Task, Version], Rollout]) -> AsyncIterator[None]:
        """An agent that answers every task at once with `answer(task, head)`."""

        async def work() -> None:
            queue, reader, history = TaskQueue(self.bus), LedgerReader(self.bus), History()
            while True:
                for lease in await queue.fetch(8, 0.5):
                    with contextlib.suppress(UnavailableError), lease.keeping(RENEW_S):  # it comes again if one is away
                        history.extend(await reader.read_new())
                        rollout = answer(lease.task, history.head)
                        await self.bus.publish(self.bus.subjects.rollout("east", "scripted"), rollout)
                        await lease.ack()

        working = asyncio.create_task(work())
        try:
            yield
        finally:
            await end(working)


@pytest.fixture
def run_on(tmp_path: Path) -> Callable[..., LocalRun]:
    """A run of `steps` steps on a bus; `extra` is more TOML."""

    def make(bus: Bus, steps: int = 3, extra: str = "") -> LocalRun:
        return LocalRun(bus, tmp_path, parse_config(CONFIG.format(steps=steps) + extra, "test"))

    return make


@pytest.fixture
def make_run(bus: Bus, run_on: Callable[..., LocalRun]) -> Callable[..., LocalRun]:
    """A run of `steps` steps on the test's bus; `extra` is more TOML."""
    return functools.partial(run_on, bus)
