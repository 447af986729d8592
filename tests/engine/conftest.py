"""A tiny engine over real HTTP, in this process so that a test can look at its counters."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from torch import Tensor

from headway.kernels.config import ModelConfig
from headway.kernels.hf import save_folder
from headway.kernels.numerics import INVARIANT
from headway.kernels.weights import init_weights
from headway.rollout_agent.engine.core import CoreSettings, EngineCore
from headway.rollout_agent.engine.server import EngineServer

TINY = ModelConfig(
    vocab_size=260,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)
SETTINGS = CoreSettings(
    slots=16,
    max_batch=8,
    prefill_tokens=64,
    context_tokens=256,
    threads=1,
    compute_dtype=torch.float32,
    numerics=INVARIANT,
)


def tiny_weights(seed: int) -> dict[str, Tensor]:
    """bf16 weights large enough that attention and routing are far from uniform."""
    return {n: w.bfloat16() for n, w in init_weights(TINY, seed).items()}


@dataclass
class Engine:
    """A client's view of a running engine, and the core behind it."""

    core: EngineCore
    url: str
    http: aiohttp.ClientSession
    folder: Path
    fatal: list[BaseException] = field(default_factory=list)

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        options = options or {"json": {} if body is None else body}
        async with self.http.post(self.url + path, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def generate(self, ids: list[int], *, seed: int = 0, new: int = 8, **options: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": new, "sampling_seed": seed, **options.pop("sampling", {})}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True}
        status, reply = await self.post("/generate", {**body, **options})
        assert status == 200, reply
        return reply

    def save(self, name: str, tensors: dict[str, Tensor]) -> str:
        """A full checkpoint folder."""
        save_folder(self.folder / name, TINY, tensors)
        return str(self.folder / name)

    async def load(self, version: str, tensors: dict[str, Tensor], **options: Any) -> None:
        body = {"model_path": self.save(f"v{version}", tensors), "weight_version": version, **options}
        status, reply = await self.post("/update_weights_from_disk", body)
        assert status == 200, reply

    async def root(self) -> str:
        return (await self.post("/weights_checker", {"action": "checksum"}))[1]["root"]

    async def until_load(self, key: str, value: int) -> None:
        """Wait until /v1/loads says so."""
        async with asyncio.timeout(10):
            while (await self.get("/v1/loads"))[1]["loads"][0][key] != value:
                await asyncio.sleep(0.005)

    async def until_sampled(self, tokens: int) -> None:
        async with asyncio.timeout(10):
            while self.core.counters.sampled_tokens < tokens:
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def running_engine(folder: Path, key: str = "", queued_max: int = 64, **changes: Any) -> AsyncIterator[Engine]:
    fatal: list[BaseException] = []
    core = EngineCore(dataclasses.replace(SETTINGS, **changes), fatal.append)
    runner = web.AppRunner(
        EngineServer(core, key=key, queued_max=queued_max).app(), handler_cancellation=True, shutdown_timeout=1.0
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    core.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Engine(core, f"http://127.0.0.1:{runner.addresses[0][1]}", http, folder, fatal)
    finally:
        await runner.cleanup()
        core.stop()
    assert not fatal, fatal


@pytest.fixture
async def bare(tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine without weights."""
    async with running_engine(tmp_path) as engine:
        yield engine


@pytest.fixture
async def engine(bare: Engine) -> Engine:
    """An engine that serves version 0.0."""
    await bare.load("0.0", tiny_weights(0))
    return bare
