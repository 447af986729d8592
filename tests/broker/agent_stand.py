"""A run's stand-ins for an agent on a real nats-server: its ledger and weights, a scripted sandbox, a real engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerTail, LedgerWriter
from headway.bus.reader import read_batch
from headway.bus.service import Service, Settings, reachable
from headway.bus.topology import AGENTS_CONSUMER
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.weights import prepare
from headway.rollout_agent import outcomes
from headway.rollout_agent import service as agent_service
from headway.rollout_agent import weights as agent_weights
from headway.rollout_agent.engine.service import model_config
from headway.schemas import signing
from headway.schemas.chat import chat_digest
from headway.schemas.config import Config, parse_config
from headway.schemas.ledger import Counters, Genesis, Open, Step
from headway.schemas.messages import Applied, Rollout, Task, WeightsAnnounced
from headway.schemas.sections import RegionConfig
from headway.schemas.session_log import SavedSession
from headway.schemas.trajectory import Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import unpack
from headway.weight_sync.publisher import Published, Publisher
from headway.weight_sync.torch_apply import raw_tensors

from .stand_ins import ZERO, LocalEngine, ScriptedSandbox, chatty_weights, end

CONFIG = """
[run]
name = "test"
[grpo]
groups_per_step = 2
samples_per_group = 2
min_graded = 2
[dispatch]
ack_wait_s = 1.0
max_attempts = 2
[agent]
max_sessions = 8
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
moe_intermediate_size = 16
num_experts = 4
"""


class Stand:
    """A run: its ledger and weights, a sandbox, an engine, and agents in this process."""

    def __init__(self, bus: Bus, folder: Path, extra: str, overrides: dict[str, Any]) -> None:
        self.bus, self.folder = bus, folder
        self.config = parse_config(CONFIG + extra, "test", overrides)
        self.trainer_key, self.sandbox_key = b"t" * 32, b"s" * 32
        self.sandbox = ScriptedSandbox(bus, self.sandbox_key)
        self.engine = LocalEngine(self.config)
        self.engines = [self.engine]
        assert bus.store is not None
        self.publisher = Publisher(store=bus.store, keys=bus.keys, private_key=self.trainer_key)
        self.writer = LedgerWriter(bus, self.trainer_key, LedgerTail())
        self.weights: dict[Version, dict[str, torch.Tensor]] = {}
        self.published: Published | None = None
        self.model: tuple[bytes, float] = (b"rtrtrts", 1.0)
        self._running: dict[int, asyncio.Task[None]] = {}

    async def begin(self) -> None:
        await self.engine.start()
        base = await self.publish(0)
        genesis = Genesis(
            run="test",
            config=self.config.shared(),
            config_digest=self.config.shared_digest(),
            task_set=ZERO,
            base_manifest=base.digest,
            base_root=base.manifest.root,
            trainer_key=signing.public_key(self.trainer_key),
            sandbox_key=signing.public_key(self.sandbox_key),
            chat=chat_digest(self.config),
        )
        await self.writer.append(genesis, Version(0, 0))
        await self.writer.append(Open(instance="trainer", environment={}), Version(0, 0), term=1)

    async def another_engine(self) -> LocalEngine:
        self.engines.append(LocalEngine(self.config))
        await self.engines[-1].start()
        return self.engines[-1]

    async def publish(self, n: int) -> Published:
        version = Version(0, n)
        self.weights[version] = chatty_weights(self.config, n, *self.model)
        self.published, _ = await self.publisher.publish(version, raw_tensors(self.weights[version]), self.published)
        return self.published

    async def step(self, n: int, *, announce: bool = True, lost: bool = False) -> None:
        """Commit version 0.n; `lost` commits it although its objects are not in the store."""
        if lost:
            manifest = root = "f" * 64
        else:
            published = await self.publish(n)
            manifest, root = published.digest, published.manifest.root
        body = Step(
            version=Version(0, n),
            parent=Version(0, n - 1),
            consumed=[],
            drops=[],
            cursor=0,
            pool=[],
            counters=Counters(),
            rng=b"",
            metrics={},
            checkpoint=ZERO,
            manifest=manifest,
            root=root,
        )
        await self.writer.append(body, body.version)
        if announce:
            await self.announce(n, manifest)

    async def announce(self, n: int, manifest: str) -> None:
        found = WeightsAnnounced(
            version=Version(0, n),
            parent=None,
            manifest=manifest,
            root=ZERO,
            delta_bytes=0,
            full_bytes=0,
            changed_fraction=0.0,
        )
        await self.bus.publish(self.bus.subjects.weights(found.version), found)

    async def tasks(self, count: int, first: int = 0, **changes: Any) -> None:
        for i in range(first, first + count):
            fields = {
                "rollout_id": f"r{i}",
                "purpose": "train",
                "env": "expr",
                "task_set": ZERO,
                "task_id": f"t{i}",
                "group": i // 2,
                "sample": i % 2,
                "temperature": 1.0,
                "sampling_seed": i,
                "groups_issued": 1,
                "eval_blocks_issued": 0,
                "last_of_unit": False,
            }
            await self.bus.publish(self.bus.subjects.task("expr"), Task(**{**fields, **changes}))

    @contextlib.asynccontextmanager
    async def agent(
        self,
        instance: str = "one",
        config: Config | None = None,
        *,
        region: str = "east",
        engines: Sequence[LocalEngine] = (),
        bus: Bus | None = None,
        **place: Any,
    ) -> AsyncIterator[Service]:
        """An agent in this process. Leaving cancels it like a kill, unless it ended by itself."""
        assert self.bus.store is not None
        urls = [engine.url for engine in engines or [self.engine]]
        places = {"regions": {region: RegionConfig(engine_urls=urls, **place)}}
        settings = Settings(
            nats_url="",
            run_dir=self.folder,
            keys_dir=self.folder,
            store_url="",
            region=region,
            instance=instance,
        )
        tasks = asyncio.TaskGroup()
        service = Service(
            name="agent",
            config=(config or self.config).model_copy(update=places),
            settings=settings,
            bus=bus or self.bus,
            store=self.bus.store,
            tasks=tasks,
            stop=asyncio.Event(),
        )

        async def run() -> None:
            async with tasks, reachable(service):
                await agent_service.serve(service)

        running = self._running[id(service)] = asyncio.create_task(run())
        try:
            yield service
        finally:
            await end(running)

    def has_ended(self, service: Service) -> bool:
        return self._running[id(service)].done()

    async def ended(self, service: Service, timeout_s: float = 20) -> None:
        """Wait for an agent's end by itself; raises what it failed with."""
        async with asyncio.timeout(timeout_s):
            await self._running[id(service)]

    async def read(self, suffix: str, cls: type[Any], subject: str = ">") -> list[Any]:
        stored = await read_batch(self.bus, suffix, 1, filter_subject=subject)
        return [await self.bus.open(cls, message) for message in stored]

    async def rollouts(self) -> list[Rollout]:
        return await self.read("ROLLOUTS", Rollout)

    async def until(self, check: Callable[[], Any], timeout_s: float = 20) -> Any:
        async with asyncio.timeout(timeout_s):
            while not (found := await check()):
                await asyncio.sleep(0.05)
        return found

    async def until_rollouts(self, count: int, timeout_s: float = 20) -> list[Rollout]:
        async def enough() -> list[Rollout] | None:
            found = await self.rollouts()
            return found if len(found) >= count else None

        return await self.until(enough, timeout_s)

    async def until_served(self, n: int) -> None:
        async def served() -> bool:
            return any(a.version == Version(0, n) for a in await self.applied())

        await self.until(served)

    async def applied(self) -> list[Applied]:
        return await self.read("EVENTS", Applied, self.bus.subjects.applied("east", "one"))

    async def until_all_acked(self) -> None:
        async def acked() -> bool:
            info = await self.bus.js.consumer_info(self.bus.subjects.stream("TASKS"), AGENTS_CONSUMER)
            return not info.num_pending and not info.num_ack_pending

        await self.until(acked)

    async def all_ended(self, count: int) -> list[Rollout] | None:
        """The rollouts, once `count` of them are terminal."""
        found = await self.rollouts()
        return found if len({r.rollout_id for r in found if r.terminal}) == count else None

    def sampled_once(self, rollouts: list[Rollout]) -> bool:
        """Whether every token that an engine ever sampled is in exactly one of the trajectories."""
        kept = sum(int(r.trajectory.loss_mask.sum()) for r in rollouts if r.trajectory is not None)
        return kept == self.sampled_tokens()

    def sampled_tokens(self) -> int:
        return sum(engine.core.counters.sampled_tokens for engine in self.engines if engine.core is not None)

    async def saved_sessions(self) -> list[str]:
        assert self.bus.store is not None
        return [key async for key, _ in self.bus.store.list("test/sessions/")]

    async def saved(self) -> dict[str, Trajectory]:
        """Of each rollout its longest saved session: the tokens so far."""
        assert self.bus.store is not None
        keys = sorted(await self.saved_sessions())  # of one rollout, the longest is last
        found = [unpack(SavedSession, await self.bus.store.get(key)) for key in keys]
        return {one.rollout_id: one.trajectory for one in found}

    async def some_saved(self) -> bool:
        return bool(await self.saved_sessions())

    async def none_saved(self) -> bool:
        return not await self.saved_sessions()

    def assert_replays(self, trajectory: Trajectory) -> None:
        """P7: every recorded log-probability and route row, bit for bit, under the version that made it.

        Rows are unknown where two swaps came within a turn.
        """
        config = model_config(self.config)
        tokens = torch.from_numpy(trajectory.token_ids.copy()).long()
        for version, weights in self.weights.items():
            prepared = prepare(weights, config, torch.float32)
            out = forward_full(prepared, config, tokens[None], torch.tensor([len(tokens)]))
            for span in trajectory.spans:
                if span.version == version:
                    at = torch.arange(span.start, span.end)
                    expected, _ = token_logprob(prepared, out.hidden[0, at - 1], tokens[at], trajectory.temperature)
                    assert expected.tolist() == trajectory.logprobs[span.start : span.end].tolist()
            for span in trajectory.route_spans:
                if span.version == version:
                    rows = trajectory.routes[span.start : span.end]
                    known = rows != np.iinfo(rows.dtype).max
                    assert out.routes[0, span.start : span.end].numpy()[known].tolist() == rows[known].tolist()


@pytest.fixture
async def make_stand(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    monkeypatch.setattr(agent_weights, "RETRY_S", 0.05)
    monkeypatch.setattr(outcomes, "RETRY_S_FIRST", 0.05)
    stands: list[Stand] = []
    async with asyncio.TaskGroup() as tasks:

        async def make(extra: str = "", letters: bytes = b"rtrtrts", sure: float = 1.0, **overrides: Any) -> Stand:
            stand = Stand(bus, tmp_path, extra, {k.replace("__", "."): v for k, v in overrides.items()})
            stand.model = letters, sure
            stands.append(stand)
            await stand.begin()
            await stand.sandbox.start(tasks)
            return stand

        yield make
    for stand in stands:
        for engine in stand.engines:
            await engine.kill()


async def in_phase(service: Service, phase: str) -> bool:
    return service.status.get("phase") == phase
