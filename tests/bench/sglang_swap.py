"""The pause of a weight swap on real SGLang: our loader's writes in place against the stock disk update.

    python tests/bench/sglang_swap.py [--rounds 5] [--changed 0.01]

A 200 MB bf16 Qwen3-MoE on one CPU thread (`make sglang` first). In each round two versions follow one another, each
with that share of its elements moved by one ulp: one goes in by a checkpoint of the changed tensors, one by our
loader, in alternating order. A pause runs from the pause request to the continue request and contains the proof by
checksums of all weights: SGLang's own, or our loader's. Medians; `prove_ms` (SGLang's checksums alone) and
`in_worker_ms` (our loader alone) are parts of them. `…_cpu_ms` is the CPU time that SGLang's processes spent in a
pause, which other work on the machine leaves alone (10 ms clock, mean).
The last line is JSON: name, figures, targets {name: [value, "<=", target, met]}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import aiohttp
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from servers import Trainer, running

from headway.rollout_agent.client import EngineClient
from headway.rollout_agent.engine.service import model_config
from headway.rollout_agent.engine_writer import EngineWriter
from headway.rollout_agent.model_shape import ModelShape, hf_config
from headway.schemas.config import parse_config
from headway.weight_sync.scatter import read_results

CONFIG = """
[model]
hidden_size = 512
num_hidden_layers = 8
num_attention_heads = 8
num_key_value_heads = 4
head_dim = 64
moe_intermediate_size = 512
num_experts = 16
[engine]
kind = "sglang"
numerics = "replay"
max_batch = 4
slots = 4
"""
TARGET = 0.25


def moved(weights: dict[str, torch.Tensor], share: float, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """The next version: `share` of all elements by one ulp."""
    fresh = {}
    for name, tensor in weights.items():
        flat = tensor.clone().view(-1)
        where = torch.randint(len(flat), (max(1, int(share * len(flat))),), generator=rng)
        flat.view(torch.int16)[where] += 1
        fresh[name] = flat.view(tensor.shape)
    return fresh


def cpu_ms(group: int) -> float:
    """User and system time of every process of the group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += (int(fields[11]) + int(fields[12])) * (int(fields[2]) == group)
    return ticks * 1e3 / os.sysconf("SC_CLK_TCK")


async def measure(url: str, group: int, folder: Path, rounds: int, share: float) -> dict[str, float]:
    config = parse_config(CONFIG, "bench")
    model = hf_config(config.model)
    rng = torch.Generator().manual_seed(0)
    shapes = model_config(config).tensor_shapes()
    weights = {name: (torch.randn(shape, generator=rng) * 0.05).bfloat16() for name, shape in shapes.items()}
    trainer = Trainer(folder / "mirror")
    found: dict[str, list[float]] = {"disk": [], "sparse": [], "prove": [], "in_worker": [], "written_mb": []}
    busy: dict[str, list[float]] = {"disk": [], "sparse": []}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        client = EngineClient(http, url, ModelShape.from_hf(model))
        writer = EngineWriter(engine=client, model_config=model, scratch=folder / "staged", clock=time.perf_counter)
        staged = trainer.stage(weights)
        await writer.write(await writer.prepare(trainer.mirror, staged))
        trainer.mirror.commit(staged)
        await writer.allow_sparse(trainer.mirror)
        for number in range(rounds):
            for way in ("disk", "sparse") if number % 2 else ("sparse", "disk"):
                writer._sparse = way == "sparse"
                weights = moved(weights, share, rng)
                staged = trainer.stage(weights)
                plan = await writer.prepare(trainer.mirror, staged)
                assert plan.way == way
                before_ms = cpu_ms(group)
                found[way].append(await writer.write(plan))
                busy[way].append(cpu_ms(group) - before_ms)
                trainer.mirror.commit(staged)
                if way == "sparse":
                    found["in_worker"].append(sum(rank.ms for rank in read_results(plan.folder, plan.ranks)))
                    found["written_mb"].append((plan.folder / "0.safetensors").stat().st_size / 1e6)
            started_s = time.perf_counter()
            await client.checksums()
            found["prove"].append((time.perf_counter() - started_s) * 1e3)
    size_mb = sum(tensor.nbytes for tensor in weights.values()) / 1e6
    return {
        "model_mb": size_mb,
        "written_mb": median(found["written_mb"]),
        **{f"{name}_ms": median(found[name]) for name in ("disk", "sparse", "prove", "in_worker")},
        **{f"{name}_cpu_ms": mean(values) for name, values in busy.items()},
        "cpu_ratio": mean(busy["sparse"]) / mean(busy["disk"]),
        "pause_ratio": median(found["sparse"]) / median(found["disk"]),
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--changed", type=float, default=0.01)
    given = options.parse_args()
    torch.set_num_threads(1)
    config = parse_config(CONFIG, "bench")
    with tempfile.TemporaryDirectory() as name, running(config, Path(name) / "run") as (url, process):
        figures = asyncio.run(measure(url, process.pid, Path(name), given.rounds, given.changed))
    for key, value in figures.items():
        print(f"{key:<14}{value:>10.2f}")
    ratio = figures["pause_ratio"]
    targets = {"pause of the fast path / of the disk update": [ratio, "<=", TARGET, ratio <= TARGET]}
    print(json.dumps({"name": "sglang_swap", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
