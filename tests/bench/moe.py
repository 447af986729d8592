"""`moe_forward` against transformers' experts, a large matmul's rate, its own products alone, and its own two modes.

python -P tests/bench/moe.py [--rounds N]

Forward + backward, Qwen3-MoE block of d 512, ff 256, 2048 tokens, with E 32 / 64 and k 4 / 8; one thread, one
process, the same malloc settings; variants alternate round by round, medians of CPU time. The ceiling is the six
grouped products of a forward and backward with nothing around them: what they take of the large matmul's rate is what
`moe_forward` could reach, and `of ceiling` is how near it comes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from headway.kernels.memory import keep_freed_memory
from headway.kernels.moe import make_plan, moe_forward
from headway.kernels.numerics import FAST, INVARIANT, Numerics

D, F, T, DECODE = 512, 256, 2048, 16
THEIRS = ("grouped_mm", "eager")
Run = Callable[[], None]


def medians(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """CPU seconds of each, rounds interleaved."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            if round_:
                found[name].append(time.process_time() - begin)
    return {name: statistics.median(values) for name, values in found.items()}


def inputs(experts: int, k: int, dtype: torch.dtype, tokens: int) -> list[torch.Tensor]:
    x = torch.randn(tokens, D).to(dtype)
    weights, ids = torch.softmax(torch.randn(tokens, experts), -1).topk(k)
    w13, w2 = (torch.randn(experts, 2 * F, D) / 22).to(dtype), (torch.randn(experts, D, F) / 16).to(dtype)
    return [x, ids, weights / weights.sum(-1, keepdim=True), w13, w2]


def ours(args: list[torch.Tensor], numerics: Numerics, train: bool) -> Run:
    x, ids, weights, w13, w2 = (a.clone().requires_grad_(train and a.is_floating_point()) for a in args)
    grad = torch.randn_like(x)

    def run() -> None:
        with torch.set_grad_enabled(train):
            out = moe_forward(x, ids, weights, w13, w2, numerics)
        if train:
            torch.autograd.grad(out, [x, weights, w13, w2], grad)

    return run


def theirs(args: list[torch.Tensor], implementation: str, k: int) -> Run:
    x, ids, weights, w13, w2 = args
    config = transformers.Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=w13.shape[0], num_experts_per_tok=k, hidden_act="silu"
    )
    config._experts_implementation = implementation
    module = Qwen3MoeExperts(config).to(x.dtype)
    module.gate_up_proj.data, module.down_proj.data = w13.clone(), w2.clone()
    x, weights = x.clone().requires_grad_(), weights.to(x.dtype).requires_grad_()
    grad = torch.randn_like(x)
    leaves = [x, weights, module.gate_up_proj, module.down_proj]

    def run() -> None:
        torch.autograd.grad(module(x, ids, weights), leaves, grad)

    return run


def products(args: list[torch.Tensor]) -> Run:
    """The grouped products of a forward and backward, on rows that are already where they belong."""
    x, ids, _, w13, w2 = args
    ends = make_plan(ids, w13.shape[0]).ends
    rows, hidden, active = (torch.randn(ids.numel(), width).to(x.dtype) for width in (D, 2 * F, F))
    pairs = [(rows, w13.mT), (active, w2.mT), (rows, w2), (rows.T, active), (hidden, w13), (hidden.T, rows)]

    def run() -> None:
        for a, b in pairs:
            torch.nn.functional.grouped_mm(a, b, offs=ends)

    return run


def matmul(dtype: torch.dtype) -> tuple[Run, float]:
    """A large product, and its floating-point operations."""
    a, b, n = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype), 2048

    def run() -> None:
        torch.mm(a, b)

    return run, 2.0 * n**3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    figures: dict[str, float] = {}
    targets = {}

    def target(name: str, value: float, sign: str, bound: float) -> None:
        targets[name] = [round(value, 3), sign, bound, value >= bound if sign == ">=" else value <= bound]

    heads = (("fast ms", 9), ("best theirs", 22), ("ratio", 7), ("of matmul", 10), ("its ceiling", 12),
             ("of ceiling", 11), ("train i/f", 10), ("decode i/f", 11))  # fmt: skip
    print(f"{'':22}" + "".join(f"{head:>{width}}" for head, width in heads))
    for dtype, share in ((torch.float32, 0.75), (torch.bfloat16, 0.65)):
        for experts, k in ((32, 4), (32, 8), (64, 4), (64, 8)):
            args, few = inputs(experts, k, dtype, T), inputs(experts, k, dtype, DECODE)
            runs = {name: theirs(args, name, k) for name in THEIRS}
            runs |= {"fast": ours(args, FAST, True), "invariant": ours(args, INVARIANT, True)}
            runs["products"], (runs["matmul"], work) = products(args), matmul(dtype)
            took = medians(runs, rounds)
            step = medians({repr(n): ours(few, n, False) for n in (FAST, INVARIANT)}, 20 * rounds)
            best = min(THEIRS, key=took.__getitem__)
            rate = 3 * 6.0 * T * k * D * F / took["fast"] / (work / took["matmul"])
            of_ceiling = took["products"] / took["fast"]
            name = f"{str(dtype).removeprefix('torch.')}_E{experts}_k{k}"
            decode = step[repr(INVARIANT)] / step[repr(FAST)]
            figures |= {f"{name}_{n}_ms": round(1e3 * s, 2) for n, s in took.items()}
            figures |= {f"{name}_ceiling": round(rate / of_ceiling, 3), f"{name}_of_ceiling": round(of_ceiling, 3)}
            target(f"{name}_over_transformers", took[best] / took["fast"], ">=", 1.0)
            target(f"{name}_of_matmul_rate", rate, ">=", share)
            target(f"{name}_train_invariant_over_fast", took["invariant"] / took["fast"], "<=", 1.15)
            target(f"{name}_decode_invariant_over_fast", decode, "<=", 2.0)
            print(
                f"{name:22}{1e3 * took['fast']:9.1f}{best:>14}{1e3 * took[best]:8.1f}{took[best] / took['fast']:7.2f}"
                f"{rate:10.2f}{rate / of_ceiling:12.2f}{of_ceiling:11.2f}"
                f"{took['invariant'] / took['fast']:10.2f}{decode:11.2f}"
            )
    print(json.dumps({"name": "moe", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
