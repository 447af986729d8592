"""How far SGLang's log-probabilities are from the trainer's, routing live and replaying SGLang's routes.

    python tests/bench/sglang_mismatch.py --model runs/demo-1/base [--sequences 32] [--tokens 160]

SGLang samples at temperature 1 in bf16 on one CPU thread (`make sglang` first); the trainer's forward runs over the
same tokens with the same weights, in fp32 and in bf16. A flip is a token and layer whose set of experts differs.
The last line is JSON: name, figures, targets {name: [value, "<=", target, met]}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from servers import Trainer, running

from headway.kernels import hf
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.numerics import FAST
from headway.kernels.weights import prepare
from headway.rollout_agent.client import Completion, EngineClient, Sampling
from headway.rollout_agent.engine_writer import EngineWriter
from headway.rollout_agent.model_shape import ModelShape, hf_config
from headway.schemas.config import parse_config

PROMPT = [256, *b"fix f.py\n>"]


async def sample(
    url: str, folder: Path, config: object, weights: dict, sequences: int, tokens: int
) -> list[Completion]:
    model = hf_config(config.model)  # type: ignore[attr-defined]
    trainer = Trainer(folder / "mirror")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        client = EngineClient(http, url, ModelShape.from_hf(model))
        writer = EngineWriter(engine=client, model_config=model, scratch=folder / "staged", clock=time.perf_counter)
        await writer.write(await writer.prepare(trainer.mirror, trainer.stage(weights)))
        how = [
            Sampling(max_new_tokens=tokens, temperature=1.0, seed=seed, stop_ids=(257,)) for seed in range(sequences)
        ]
        asks = (client.generate(PROMPT, one, rid=f"r{one.seed}", timeout_s=600) for one in how)
        return list(await asyncio.gather(*asks))


def compare(
    found: list[Completion], config: object, weights: dict, dtype: torch.dtype, replay: bool
) -> dict[str, float]:
    prepared, gaps, flips = prepare(weights, config, dtype), [], []  # type: ignore[arg-type]
    for one in found:
        ids = torch.tensor([*PROMPT, *one.token_ids])
        rows = torch.from_numpy(one.routes.astype(np.int64))
        routes = torch.cat([rows, torch.full_like(rows[:1], -1)])[None] if replay else None
        out = forward_full(prepared, config, ids[None], torch.tensor([len(ids)]), FAST, routes)  # type: ignore[arg-type]
        at = torch.arange(len(PROMPT), len(ids))
        ours, _ = token_logprob(prepared, out.hidden[0, at - 1], ids[at], 1.0, FAST)
        gaps.append((ours - torch.from_numpy(one.logprobs)).abs())
        flips.append((out.live[0, :-1].sort(-1).values != rows.sort(-1).values).any(-1).float().mean().item())
    gap = torch.cat(gaps)
    return {"mean": gap.mean().item(), "max": gap.max().item(), "flips": float(np.mean(flips))}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True, help="a Hugging Face folder")
    options.add_argument("--sequences", type=int, default=32)
    options.add_argument("--tokens", type=int, default=160)
    given = options.parse_args()
    torch.set_num_threads(1)
    base = json.dumps(str(Path(given.model).absolute()))
    kind = f'[engine]\nkind = "sglang"\nnumerics = "replay"\n[model]\nbase = {base}'
    config = parse_config(kind, "bench")
    geometry, weights = hf.load(Path(given.model))
    with tempfile.TemporaryDirectory() as name, running(config, Path(name) / "run") as (url, _):
        found = asyncio.run(sample(url, Path(name), config, weights, given.sequences, given.tokens))
    figures = {"tokens": sum(len(one.token_ids) for one in found)}
    for label, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for route, replay in (("live", False), ("replayed", True)):
            with torch.no_grad():
                numbers = compare(found, geometry, weights, dtype, replay)
            print(
                f"{label} {route:<9} mean {numbers['mean']:.2e}  max {numbers['max']:.2e}  flips {numbers['flips']:.2%}"
            )
            figures |= {f"{label}_{route}_{key}": value for key, value in numbers.items()}
    ratio = figures["fp32_replayed_mean"] / figures["fp32_live_mean"]
    targets = {"mean difference with replay / without": [ratio, "<=", 1.0, ratio <= 1.0]}
    print(json.dumps({"name": "sglang_mismatch", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
