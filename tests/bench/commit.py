"""What a commit costs beside the step that it commits: the demo's model, a local store, an embedded server.

    python tests/bench/commit.py [--rounds 5]

A step, in bitwise kernels, trains on 64 synthetic sessions of 104 tokens, 19 of them sampled. Then, as the trainer
does it: checkpoint to bytes and into the store; the weights' delta and manifest into the store; the record into the
ledger; the announcement.
Older checkpoints are deleted, as the trainer does, and the first rounds are not counted: until pages are freed and used
again, writing waits for memory, on a virtual machine for its host to give it (10 MB: 20 ms, then 3).
CPU and wall milliseconds, medians. The share asked about is that of checkpoint, record and announcement beside the
step; the one with the weights is reported. The last line is JSON: name, figures, targets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import uvloop

from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.ledger import LedgerTail, LedgerWriter
from headway.bus.server import ServerSettings, free_port, wait_listening
from headway.bus.topology import Topology
from headway.deploy.children import MALLOC_TUNABLES
from headway.kernels.config import ModelConfig
from headway.kernels.weights import init_weights
from headway.rollout_agent.model_shape import hf_config
from headway.schemas import signing
from headway.schemas.config import Config
from headway.schemas.ledger import Consumed, Counters, Step
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.trainer import checkpoint as checkpoints
from headway.trainer.batching import Sample
from headway.trainer.learner import Learner
from headway.trainer.publishing import WeightLine

SHARE_MAX = 0.05
KEY = b"k" * signing.KEY_BYTES
PARTS = ("step", "checkpoint", "weights", "record", "announcement")


def batch(version: Version, rng: np.random.Generator, samples: int = 64, tokens: int = 104) -> list[Sample]:
    """Sessions whose last 19 tokens were sampled; a reward each."""
    found = []
    mask = np.zeros(tokens, np.uint8)
    mask[-19:] = 1
    for number in range(samples):
        trajectory = Trajectory(
            token_ids=rng.integers(0, 256, tokens).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask == 1, -5.5, 0).astype(np.float32),
            spans=[Span(start=tokens - 19, end=tokens, version=version)],
            routes=np.zeros((0, 0, 0), np.uint8),
            route_spans=[],
            layer_map=[0, 1, 2],
            temperature=1.0,
            turns=1,
            stop_reason="submitted",
        )
        found.append(
            Sample(
                rollout_id=f"g{number // 8:07d}s{number % 8:03d}", group=number // 8, reward=float(rng.random() < 0.5),
                trajectory=trajectory, span_lags=(1,),
            )
        )  # fmt: skip
    return found


async def measure(bus: Bus, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """part -> (wall ms, CPU ms) of each round."""
    config = Config()
    model = ModelConfig.from_hf(json.loads(hf_config(config.model)))
    learner = Learner(
        init_weights(model, 0), model, config.grpo, numerics="bitwise", compute_dtype=torch.float32, max_lag=2, seed=1
    )
    service: Any = SimpleNamespace(store=bus.store, bus=bus, config=config)
    line, ledger = WeightLine(service, KEY), LedgerWriter(bus, KEY, LedgerTail())
    await line.publish(Version(0, 0), learner.rollout_weights())
    taken: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}

    async def part(name: str, work: Awaitable[Any]) -> Any:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        found = await work
        taken[name].append(((time.perf_counter() - wall_s) * 1e3, (time.process_time() - cpu_s) * 1e3))
        return found

    async def checkpoint() -> str:
        return await line.put_checkpoint(
            await asyncio.to_thread(lambda: checkpoints.to_bytes(learner.state(copied=False)))
        )

    rng = np.random.default_rng(1)
    kept = deque[str]()
    warm = config.grpo.retain_steps + 1
    for n in range(1, warm + rounds + 1):
        parent, version = Version(0, n - 1), Version(0, n)
        samples = batch(parent, rng)
        result = await part("step", asyncio.to_thread(learner.step, samples))
        digest = await part("checkpoint", checkpoint())
        published = await part("weights", line.publish(version, learner.rollout_weights()))
        record = Step(
            version=version, parent=parent, drops=[], cursor=64 * n, pool=[], counters=Counters(), rng=b"",
            consumed=[Consumed(rollout_id=s.rollout_id, seq=k + 1, reward=s.reward) for k, s in enumerate(samples)],
            metrics=result.metrics, checkpoint=digest, manifest=published.digest, root=published.manifest.root,
        )  # fmt: skip
        await part("record", ledger.append(record, version))
        await part("announcement", line.announce())
        kept.append(digest)
        if len(kept) > config.grpo.retain_steps:
            await service.store.delete(bus.keys.checkpoint(kept.popleft()))
    return {name: times[warm:] for name, times in taken.items()}


async def run(rounds: int) -> dict[str, list[tuple[float, float]]]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        settings = ServerSettings(folder=Path(name) / "nats", port=free_port(), token="t")
        server = subprocess.Popen(settings.command(), stdin=subprocess.DEVNULL)  # noqa: ASYNC220
        try:
            await wait_listening(settings.port)
            store = ObstoreBlobs.open(str(Path(name) / "store"))
            async with await Bus.connect(settings.url, "bench", token="t", store=store) as bus:
                await Topology(run="bench").apply(bus.js)
                return await measure(bus, rounds)
        finally:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if "GLIBC_TUNABLES" not in os.environ:  # as the services run; read once, at the start of a process
        tuned = {**os.environ, "GLIBC_TUNABLES": MALLOC_TUNABLES}
        os.execve(sys.executable, [sys.executable, "-P", *sys.argv], tuned)
    taken = uvloop.run(run(args.rounds))
    wall = {part: statistics.median(w for w, _ in times) for part, times in taken.items()}
    cpu = {part: statistics.median(c for _, c in times) for part, times in taken.items()}
    print(f"{'part':<15}{'wall ms':>9}{'CPU ms':>9}")
    for part in PARTS:
        print(f"{part:<15}{wall[part]:>9.1f}{cpu[part]:>9.1f}")
    figures = {f"{part}_cpu_ms": round(cpu[part], 2) for part in PARTS}
    for kind, ms in (("cpu", cpu), ("wall", wall)):
        commit_ms = ms["checkpoint"] + ms["record"] + ms["announcement"]
        figures[f"commit_share_{kind}"] = round(commit_ms / (ms["step"] + commit_ms), 4)
        figures[f"commit_and_weights_share_{kind}"] = round(1 - ms["step"] / sum(ms.values()), 4)
    share = figures["commit_share_cpu"]
    print(f"checkpoint, record and announcement: {share:.1%} of step and commit")
    targets = {"commit_share_cpu": [share, "<=", SHARE_MAX, share <= SHARE_MAX]}
    print(json.dumps({"name": "commit", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
