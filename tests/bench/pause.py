"""How long the local engine stands still for a swap: 1 GB of bf16 of which 1% changed, against a full reload.

The agent's own code drives an engine process over HTTP, with a session running: the version is prepared while the
engine serves, and the pause exchanges it. CPU time is that of engine and agent together between
pause and resume, from the scheduler's own account; what runs in them besides, the session's next tokens, is in it.

Run: OMP_NUM_THREADS=1 python -P tests/bench/pause.py [gigabytes] [repeats]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from headway.bus.blobs import ObstoreBlobs
from headway.bus.server import free_port, wait_listening
from headway.kernels.config import ModelConfig
from headway.rollout_agent.client import EngineClient, Sampling
from headway.rollout_agent.engine.service import model_config
from headway.rollout_agent.engine_writer import EngineWriter, Plan
from headway.rollout_agent.model_shape import ModelShape
from headway.schemas import signing
from headway.schemas.config import Config, parse_config
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.publisher import Published, Publisher, PublishSettings
from headway.weight_sync.tensors import RawTensor
from headway.weight_sync.transfer import Retrier, TransferLimits

KEY, KEYS, CHANGED = bytes(range(32)), Keys("pause"), 0.01
EXPERT_BYTES = 2 * 3 * 1024 * 512
LAYERS = 8
TOML = """
[model]
hidden_size = 1024
num_hidden_layers = 8
num_attention_heads = 16
num_key_value_heads = 8
head_dim = 64
moe_intermediate_size = 512
num_experts = {experts}
num_experts_per_tok = 2
compute_dtype = "bfloat16"
max_position_embeddings = 1024
[agent]
max_session_tokens = 1024
[engine]
numerics = "off"
slots = 2
max_batch = 2
"""
SERVE = """
import sys
from headway.rollout_agent.engine.service import run_engine
from headway.schemas.config import parse_config
run_engine(parse_config(sys.argv[2], "bench"), port=int(sys.argv[1]))
"""


def cpu_ms(*pids: int) -> float:
    """CPU time of all threads of the processes so far."""
    total_ns = 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total_ns += int(stat.read_text().split()[0])
    return total_ns / 1e6


def first_weights(shape: ModelConfig) -> dict[str, RawTensor]:
    rng, weights = np.random.default_rng(0), {}
    for name, size in shape.tensor_shapes().items():
        lanes = rng.normal(0, 0.02, size).astype(np.float32) if "norm" not in name else np.ones(size, np.float32)
        raw = torch.from_numpy(lanes).bfloat16().view(torch.uint8).reshape(-1).numpy()
        weights[name] = RawTensor(dtype="BF16", shape=tuple(size), data=raw)
    return weights


def next_weights(weights: dict[str, RawTensor], seed: int) -> dict[str, RawTensor]:
    """1% of the elements moved by one ulp."""
    rng, found = np.random.default_rng(seed), {}
    for name, raw in weights.items():
        lanes = raw.data.view("<u2").copy()
        where = rng.integers(0, len(lanes), max(1, int(len(lanes) * CHANGED)))
        lanes[where] ^= 1
        found[name] = RawTensor(dtype=raw.dtype, shape=raw.shape, data=lanes.view(np.uint8))
    return found


class Bench:
    def __init__(self, folder: Path, config: Config, engine: EngineClient, pids: tuple[int, ...]) -> None:
        self.shape, self.engine, self.pids = model_config(config), engine, pids
        store, public = ObstoreBlobs.open(str(folder / "store")), signing.public_key(KEY)
        settings = PublishSettings(anchor_every=1 << 20)
        self.publisher = Publisher(store=store, keys=KEYS, private_key=KEY, settings=settings)
        retrier = Retrier(limits=TransferLimits(), rng=random.Random(0))
        self.fetcher = Fetcher(store=store.once(), keys=KEYS, public_key=public, retrier=retrier)
        self.mirror = HostMirror(folder / "mirror", public, fsync=False)
        self.writer = EngineWriter(
            engine=engine,
            model_config=json.dumps(self.shape.to_hf()).encode(),
            scratch=folder / "scratch",
            clock=time.perf_counter,
        )

    async def swap(self, version: Published) -> dict[str, float]:
        """From announcement to served; `pause_*` from pause to resume."""
        began_s, began_cpu_ms = time.perf_counter(), cpu_ms(*self.pids)
        staged = await self.fetcher.stage(version.version, version.digest, self.mirror)
        figures = await self._written(await self.writer.prepare(self.mirror, staged))
        figures["announce_to_served_ms"] = (time.perf_counter() - began_s) * 1e3
        figures["announce_to_served_cpu_ms"] = cpu_ms(*self.pids) - began_cpu_ms
        await asyncio.to_thread(self.mirror.commit, staged)
        return figures

    async def reload(self) -> dict[str, float]:
        """What every swap would cost without deltas: the whole checkpoint, loaded in the pause."""
        self.engine.prepare = nothing  # type: ignore[method-assign]
        plan = await self.writer.prepare(self.mirror, None)
        del self.engine.prepare
        return await self._written(plan)

    async def _written(self, plan: Plan) -> dict[str, float]:
        start_cpu_ms = cpu_ms(*self.pids)
        pause_ms = await self.writer.write(plan)
        return {"pause_ms": pause_ms, "pause_cpu_ms": cpu_ms(*self.pids) - start_cpu_ms}

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[list[int]]:
        """Tokens keep coming; yields the list of lengths."""
        lengths: list[int] = []
        sampling = Sampling(max_new_tokens=16, temperature=1.0, seed=1, stop_ids=())

        async def generate() -> None:
            while True:
                reply = await self.engine.generate(range(1, 65), sampling, rid=str(len(lengths)), timeout_s=300)
                lengths.append(len(reply.token_ids))

        running = asyncio.create_task(generate())
        try:
            yield lengths
        finally:
            running.cancel()
            await asyncio.wait({running})


async def nothing(*_: Any) -> None:
    return None


async def main(gigabytes: float, repeats: int) -> None:
    text = TOML.format(experts=max(2, round(gigabytes * 1e9 / EXPERT_BYTES / LAYERS)))
    config, port = parse_config(text, "bench"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([sys.executable, "-P", "-c", SERVE, str(port), text])  # noqa: ASYNC220
        try:
            await wait_listening(port, 60)
            async with aiohttp.ClientSession() as http:
                shape = ModelShape.from_hf(json.dumps(model_config(config).to_hf()).encode())
                engine = EngineClient(http, f"http://127.0.0.1:{port}", shape)
                await measure(Bench(Path(folder), config, engine, (process.pid, os.getpid())), repeats)
        finally:
            process.terminate()
            process.wait()


async def measure(bench: Bench, repeats: int) -> None:
    weights = await asyncio.to_thread(first_weights, bench.shape)
    head, stats = await bench.publisher.publish(Version(0, 0), weights, None)
    await bench.swap(head)
    swaps, reloads = [], []
    async with bench.session() as lengths:
        for n in range(1, repeats + 1):
            weights = await asyncio.to_thread(next_weights, weights, n)
            head, stats = await bench.publisher.publish(Version(0, n), weights, head)
            swaps.append(await bench.swap(head))
            reloads.append(await bench.reload())
    found = {
        "model_bytes": stats.full_bytes,
        "changed": stats.changed_fraction,
        "delta_bytes": stats.delta_bytes,
        "repeats": repeats,
        "requests_served_meanwhile": len(lengths),
    }
    for label, rows in (("swap", swaps), ("reload", reloads)):
        for key in ("pause_ms", "pause_cpu_ms", "announce_to_served_ms", "announce_to_served_cpu_ms"):
            values = [row[key] for row in rows if key in row]
            if values:
                found[f"{label}_{key}"] = round(statistics.median(values), 2)
    found["reload_over_swap_cpu"] = round(found["reload_pause_cpu_ms"] / found["swap_pause_cpu_ms"], 1)
    for key, value in found.items():
        print(f"{key:30} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(main(float(given[0]) if given else 1.0, int(given[1]) if len(given) > 1 else 5))
