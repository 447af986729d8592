"""Speed of the kernels on one thread, order-stable against naive, fp32 against bf16 compute.

python tests/bench/kernels.py [--rounds N]     the demo model (827k parameters), random weights

Variants alternate round by round in one process, so that a busy machine hurts all alike; medians are
reported, in tokens per second of wall time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from headway.kernels.config import ModelConfig
from headway.kernels.decoder import KVCache, forward_cached, forward_full, token_logprob
from headway.kernels.memory import keep_freed_memory
from headway.kernels.numerics import FAST, INVARIANT, PAGE, Numerics
from headway.kernels.weights import init_weights, prepare, round_through

DEMO = ModelConfig(
    vocab_size=260,
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=96,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=512,
)
VARIANTS: dict[str, tuple[Numerics, torch.dtype]] = {
    "invariant_fp32": (INVARIANT, torch.float32),
    "fast_fp32": (FAST, torch.float32),
    "invariant_bf16": (INVARIANT, torch.bfloat16),
    "fast_bf16": (FAST, torch.bfloat16),
}
SEQUENCES, MEAN_TOKENS, LOSS_SHARE = 64, 104, 0.2
Work = tuple[int, int, Callable[[], None]]  # tokens, repeats per round, what to run


def decode(batch: int, numerics: Numerics, dtype: torch.dtype) -> Work:
    prepared = _prepared(dtype)
    cache = KVCache.allocate(DEMO, 64 * 256 // PAGE, dtype)
    pages, start = torch.randperm(cache.pages).view(64, -1)[:batch], torch.randint(70, 131, (batch,))
    ids, one = torch.randint(260, (batch, 1)), torch.ones(batch, dtype=torch.int64)

    def run() -> None:
        with torch.inference_mode():
            out = forward_cached(prepared, DEMO, cache, pages, start, ids, one, numerics)
            token_logprob(prepared, out.hidden[:, 0], ids[:, 0], 1.0, numerics)

    return batch, 20, run


def prefill(numerics: Numerics, dtype: torch.dtype) -> Work:
    prepared, batch = _prepared(dtype), 32
    cache = KVCache.allocate(DEMO, 64 * 256 // PAGE, dtype)
    pages, ids = torch.randperm(cache.pages).view(64, -1)[:batch], torch.randint(260, (batch, 100))
    start, lengths = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), 100)

    def run() -> None:
        with torch.inference_mode():
            forward_cached(prepared, DEMO, cache, pages, start, ids, lengths, numerics)

    return batch * 100, 3, run


def train(numerics: Numerics, dtype: torch.dtype) -> Work:
    masters = {name: w.requires_grad_() for name, w in init_weights(DEMO, 0).items()}
    lengths = torch.linspace(40, 2 * MEAN_TOKENS - 40, SEQUENCES).long()
    ids = torch.randint(260, (SEQUENCES, int(lengths.max())))
    mask = (torch.rand(ids.shape) < LOSS_SHARE) & (torch.arange(ids.shape[1]) < lengths[:, None])

    def run() -> None:
        for w in masters.values():
            w.grad = None
        prepared = prepare(round_through(masters, "bfloat16"), DEMO, dtype)
        out = forward_full(prepared, DEMO, ids, lengths, numerics)
        logprob, entropy = token_logprob(prepared, out.hidden[mask], ids[mask], 1.0, numerics)
        (logprob.sum() + entropy.sum()).backward()

    return int(lengths.sum()), 1, run


def _prepared(dtype: torch.dtype):
    with torch.no_grad():
        return prepare(init_weights(DEMO, 0), DEMO, dtype)


def measure(works: dict[str, Work], rounds: int) -> dict[str, float]:
    """Median tokens a second of each, rounds interleaved."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds + 1):
        for name, (tokens, repeats, run) in works.items():
            begin = time.perf_counter()
            for _ in range(repeats):
                run()
            if round_:  # the first warms up
                rates[name].append(tokens * repeats / (time.perf_counter() - begin))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()

    jobs: dict[str, Callable[[Numerics, torch.dtype], Work]] = {
        "decode_16": lambda n, d: decode(16, n, d),
        "decode_32": lambda n, d: decode(32, n, d),
        "decode_48": lambda n, d: decode(48, n, d),
        "prefill": prefill,
        "train": train,
    }
    figures: dict[str, float] = {}
    print(f"{'tokens/s':12}" + "".join(f"{v:>16}" for v in VARIANTS) + f"{'fp32 inv/fast':>16}{'bf16 inv/fast':>16}")
    for job, make in jobs.items():
        rates = measure({v: make(*how) for v, how in VARIANTS.items()}, rounds)
        ratios = {d: rates[f"invariant_{d}"] / rates[f"fast_{d}"] for d in ("fp32", "bf16")}
        figures |= {f"{job}_{v}_tokens_per_s": round(rate) for v, rate in rates.items()}
        figures |= {f"{job}_{d}_invariant_over_fast": round(ratio, 3) for d, ratio in ratios.items()}
        print(
            f"{job:12}"
            + "".join(f"{rates[v]:16,.0f}" for v in VARIANTS)
            + "".join(f"{r:16.2f}" for r in ratios.values())
        )
    floors = {
        "decode_32_invariant_fp32_tokens_per_s": 3_000,
        "prefill_invariant_fp32_tokens_per_s": 25_000,
        "train_invariant_fp32_tokens_per_s": 12_000,
        "decode_32_fp32_invariant_over_fast": 0.5,
        "train_fp32_invariant_over_fast": 0.9,
    }
    targets = {name: [figures[name], ">=", floor, figures[name] >= floor] for name, floor in floors.items()}
    print(json.dumps({"name": "kernels", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
