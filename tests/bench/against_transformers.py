"""The local engine against transformers' `generate`, and a training step against theirs, on one checkpoint.

python -P tests/bench/against_transformers.py [--rounds N] [--only generate|train]

One process, one computing thread, the same malloc settings; both sides alternate round by round, and medians
of tokens a CPU-second are reported, which on a quiet machine are tokens a second. The model has 1.8M parameters
(d 128, 4 layers, 8 experts top-2, random weights). Transformers runs at its best: fp32, grouped_mm experts, SDPA.
The engine runs in bitwise mode and, unlike `generate`, also returns log-probabilities and routes. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from headway.kernels.config import ModelConfig
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.hf import save_folder
from headway.kernels.memory import keep_freed_memory
from headway.kernels.numerics import INVARIANT
from headway.kernels.weights import init_weights, prepare, round_through
from headway.rollout_agent.engine.core import CoreSettings, EngineCore, Finished
from headway.rollout_agent.engine.requests import Generate
from headway.rollout_agent.engine.weights import load_weights
from headway.trainer.optim import AdamW

MODEL = ModelConfig(
    vocab_size=260,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=128,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=512,
)
PROMPT, NEW = 16, 64
BATCHES = {1: 2.5, 16: 2.0, 128: 1.3}
"""Batch size -> how many times transformers' tokens a second are asked for."""
TRAIN_BATCH, TRAIN_TOKENS, TRAIN_FACTOR = 128, 64, 1.2
Run = Callable[[], None]


def engine_run(core: EngineCore, batch: int) -> Run:
    def run() -> None:
        left, done = threading.Semaphore(0), torch.randint(MODEL.vocab_size, (batch, PROMPT)).tolist()
        results: list[Finished] = []

        def finish(finished: Finished) -> None:
            results.append(finished)
            left.release()

        for i, ids in enumerate(done):
            request = Generate(
                rid=str(i),
                input_ids=ids,
                max_new_tokens=NEW,
                temperature=1.0,
                stop_ids=frozenset(),
                seed=i,
                return_logprob=True,
                routes_start=0,
                salt="",
            )
            core.submit(request, finish)
        for _ in range(batch):
            left.acquire()
        assert all(len(found.output_ids) == NEW for found in results)

    return run


def generate_run(model: transformers.PreTrainedModel, batch: int) -> Run:
    def run() -> None:
        ids = torch.randint(MODEL.vocab_size, (batch, PROMPT))
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, max_new_tokens=NEW
            )
        assert out.shape[1] == PROMPT + NEW

    return run


def our_step() -> Run:
    masters = init_weights(MODEL, 0)
    adam = AdamW(masters, beta1=0.9, beta2=0.95)
    ids = torch.randint(MODEL.vocab_size, (TRAIN_BATCH, TRAIN_TOKENS))
    lengths = torch.full((TRAIN_BATCH,), TRAIN_TOKENS)

    def run() -> None:
        leaves = {name: w.detach().requires_grad_() for name, w in masters.items()}
        prepared = prepare(round_through(leaves, "bfloat16"), MODEL, torch.float32)
        out = forward_full(prepared, MODEL, ids, lengths, INVARIANT)
        hidden = out.hidden[:, :-1].flatten(0, 1)
        logprob, _ = token_logprob(prepared, hidden, ids[:, 1:].flatten(), 1.0, INVARIANT)
        grads = torch.autograd.grad(-logprob.mean(), list(leaves.values()))
        adam.step(dict(zip(leaves, grads, strict=True)), 1e-4)

    return run


def their_step(model: transformers.PreTrainedModel) -> Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    ids = torch.randint(MODEL.vocab_size, (TRAIN_BATCH, TRAIN_TOKENS))

    def run() -> None:
        scores = model(ids, use_cache=False).logits[:, :-1].float()
        logprob = torch.log_softmax(scores, -1).gather(-1, ids[:, 1:, None])
        (-logprob.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def rates(runs: dict[str, Run], tokens: int, rounds: int) -> dict[str, float]:
    """Median tokens a CPU-second of this process, rounds interleaved."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds + 1):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            if round_:  # the first warms up
                found[name].append(tokens / (time.process_time() - begin))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["generate", "train"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_freed_memory()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    figures: dict[str, float] = {}
    targets = {}

    def report(name: str, ours: float, theirs: float, factor: float) -> None:
        figures[f"{name}_headway_tokens_per_cpu_s"] = round(ours)
        figures[f"{name}_transformers_tokens_per_cpu_s"] = round(theirs)
        targets[f"{name}_ratio"] = [round(ours / theirs, 2), ">=", factor, ours / theirs >= factor]
        print(f"{name:14} headway {ours:8,.0f}   transformers {theirs:8,.0f} tokens a CPU-s   {ours / theirs:5.2f}x")

    with tempfile.TemporaryDirectory() as folder:
        save_folder(Path(folder), MODEL, {n: w.bfloat16().float() for n, w in init_weights(MODEL, 0).items()})
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="grouped_mm", attn_implementation="sdpa"
        )
        weights, _ = load_weights(Path(folder), "0.0", None, torch.float32)
    if options.only != "train":
        settings = CoreSettings(
            slots=128,
            max_batch=128,
            prefill_tokens=2048,
            context_tokens=PROMPT + NEW,
            threads=1,
            compute_dtype=torch.float32,
            numerics=INVARIANT,
        )
        core = EngineCore(settings, lambda error: print("engine:", repr(error)))
        core.start()
        core.call(lambda: core.swap(weights, True)).result()
        for batch, factor in BATCHES.items():
            runs = {"ours": engine_run(core, batch), "theirs": generate_run(theirs, batch)}
            found = rates(runs, batch * NEW, options.rounds)
            report(f"generate_{batch}", found["ours"], found["theirs"], factor)
        core.stop()
    if options.only != "generate":
        runs = {"ours": our_step(), "theirs": their_step(theirs)}
        found = rates(runs, TRAIN_BATCH * TRAIN_TOKENS, options.rounds)
        report("train", found["ours"], found["theirs"], TRAIN_FACTOR)
    print(json.dumps({"name": "against_transformers", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
