"""The mismatch laboratory: how far sampler and trainer drift apart, and what route replay brings back.

    python -P tests/bench/mismatch.py [--base runs/demo/base] [--parts demo,random,training] [--steps N]

demo: a mid-trained base (`make demo` leaves one in runs/demo/base) moved by eight GRPO updates of this program's
own; random: 64 experts, top-8, random weights, random rewards; training: GRPO from the base on an engine that
serves int4 while the trainer learns in bf16, with routes live and replayed, and on a matching engine.

Everything runs in this process: the local engine's core, the demo's environment (expressions are computed by a
small evaluator, nothing is executed), the trainer's own Learner and its metrics. KL figures are in nats a token:
k1 and k3 of KL(engine || trainer) on tokens that the engine sampled. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels import hf
from headway.kernels.config import ModelConfig
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.memory import keep_freed_memory
from headway.kernels.numerics import FAST, INVARIANT, Numerics
from headway.kernels.quant import dequantise, quantise
from headway.kernels.weights import init_weights, prepare
from headway.rollout_agent.client import Completion
from headway.rollout_agent.engine.core import CoreSettings, EngineCore, Finished
from headway.rollout_agent.engine.requests import Generate
from headway.rollout_agent.engine.weights import Weights
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.session import Recorder
from headway.sandbox.tasks.expr import ExprTask, tasks
from headway.schemas import expr_protocol as p
from headway.schemas.routes import from_engine
from headway.schemas.sections import GrpoConfig
from headway.schemas.trajectory import Span
from headway.schemas.version import Version
from headway.schemas.vocab import BOS, EOS, NEWLINE, encode
from headway.trainer.agreement import Agreement
from headway.trainer.batching import Sample, micro_batches
from headway.trainer.learner import Learner

FP32, BF16 = torch.float32, torch.bfloat16
UPDATES, GROUPS, SAMPLES = 8, 8, 8
FILTER = 0.5
RANDOM = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=64,
    num_experts=64,
    num_experts_per_tok=8,
    max_position_embeddings=256,
)
RANDOM_PROMPT, RANDOM_TOKENS = 16, 48
SHOWN = ("k1", "k3", "diff_max", "equal_fraction", "extreme_fraction", "ess", "flipped_fraction", "filtered_fraction")
TRAINING = {"int4, live": ("off", True), "int4, replay": ("replay", True), "bf16, live": ("off", False)}
"""Of each run: the trainer's numerics, and whether the engine serves int4."""
Tensors = Mapping[str, Tensor]


# -- the demo's environment, without a sandbox ------------------------------------------------------------------

OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "min": min, "abs": abs}


def compute(node: ast.expr, x: int) -> int:
    """The value of an integer expression in x. Raises ValueError, TypeError, ZeroDivisionError."""
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id="x"):
            return x
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](compute(left, x), compute(right, x))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -compute(operand, x)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(compute(one, x) for one in args))
    raise ValueError(f"{ast.dump(node)[:40]} is not computed here")


def result(expression: str, x: int) -> str | None:
    try:
        return str(compute(ast.parse(expression, mode="eval").body, x))
    except (ValueError, TypeError, ZeroDivisionError, SyntaxError, RecursionError, MemoryError):
        return None


@dataclass(slots=True, kw_only=True)
class Session:
    """One rollout. `task` None: random tokens, one turn."""

    group: int
    seed: int
    recorder: Recorder
    task: ExprTask | None = None
    text: str = ""
    reward: float = p.REWARD_INVALID
    turns: int = 0
    done: bool = False

    def act(self, completion: Completion) -> None:
        self.turns += 1
        action = p.parse_action(bytes(completion.token_ids)) if max(completion.token_ids) < 256 else None
        if self.task is None or action is None or action.tool == "s":
            self.done = True
            if action is not None and self.task is not None:
                right = all(self._value(x) == str(y) for x, y in zip(self.task.inputs, self.task.expected, strict=True))
                self.reward = p.reward(right=right, submitted=True, malformed=False)
            return
        self.recorder.observe(p.observation(self._answer(action, self.task)))
        self.done = self.turns == p.ACTIONS_MAX

    def _value(self, x: int) -> str | None:
        return result(self.text.rsplit("return ", 1)[1].strip(), x)

    def _answer(self, action: p.Action, task: ExprTask) -> str:
        if action.tool == "r":
            return p.render_file(self.text.encode())
        if action.tool == "t":
            return p.render_test((x, self._value(x), want) for x, want in task.visible)
        try:
            ast.parse(action.argument, mode="eval")
        except (SyntaxError, ValueError):
            return "syntax error"
        self.text = p.replace_expression(self.text, action.argument)
        return "ok"


def expr_sessions(step: int, groups: int = GROUPS) -> list[Session]:
    train = [task for _, task in tasks(0) if task.split == "train"]
    chosen = Random(f"lab-{step}").sample(train, groups)
    return [
        Session(group=g, seed=step * 10_000 + g * 100 + s, task=task, text=task.text,
                recorder=Recorder(ids=[BOS, *encode(p.PROMPT)]))
        for g, task in enumerate(chosen) for s in range(SAMPLES)
    ]  # fmt: skip


def random_sessions(step: int, groups: int = 4) -> list[Session]:
    rng = Random(f"lab-random-{step}")
    prompts = [[rng.randrange(256) for _ in range(RANDOM_PROMPT)] for _ in range(groups)]
    return [
        Session(group=g, seed=step * 10_000 + g * 100 + s, recorder=Recorder(ids=list(prompt)), reward=rng.random())
        for g, prompt in enumerate(prompts)
        for s in range(SAMPLES)
    ]


# -- engine and trainer -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Engine:
    """The local engine's core, serving whatever weights it is given."""

    model: ModelConfig
    numerics: Numerics = FAST
    dtype: torch.dtype = FP32
    core: EngineCore = field(init=False)

    def __post_init__(self) -> None:
        sizes = {"slots": 64, "max_batch": 64, "prefill_tokens": 512, "context_tokens": 256, "threads": 1}
        self.core = EngineCore(
            CoreSettings(**sizes, compute_dtype=self.dtype, numerics=self.numerics), lambda error: print(repr(error))
        )
        self.core.start()

    def serve(self, weights: Tensors) -> None:
        with torch.no_grad():
            prepared = prepare({n: w.float() for n, w in weights.items()}, self.model, self.dtype)
        made = Weights(version="0.0", config=self.model, tensors={}, prepared=prepared)
        self.core.call(lambda: self.core.swap(made, False)).result()

    def roll_out(self, sessions: list[Session], most_tokens: int) -> list[Sample]:
        """Run the sessions turn by turn, all of them side by side."""
        c = self.model
        shape = ModelShape(vocab_size=c.vocab_size, layers=c.num_hidden_layers, experts=c.num_experts,
                           layer_map=tuple(range(c.num_hidden_layers)), top_k=c.num_experts_per_tok)  # fmt: skip
        ended: queue.SimpleQueue[tuple[Session, Finished]] = queue.SimpleQueue()
        while live := [one for one in sessions if not one.done]:
            for one in live:
                request = Generate(
                    rid=f"{one.seed}-{one.turns}", input_ids=list(one.recorder.ids), max_new_tokens=most_tokens,
                    temperature=1.0, stop_ids=frozenset((NEWLINE, EOS) if one.task else ()), seed=one.seed,
                    return_logprob=True, routes_start=0,
                )  # fmt: skip
                self.core.submit(request, lambda finished, one=one: ended.put((one, finished)))
            for _ in live:
                one, finished = ended.get(timeout=300)
                completion = read(finished, shape)
                one.recorder.add(finished.request.input_ids, completion)
                one.act(completion)
        return [
            Sample(rollout_id=f"r{n}", group=one.group, reward=one.reward, span_lags=(0,) * one.turns,
                   trajectory=one.recorder.trajectory(shape, 1.0, "submitted"))
            for n, one in enumerate(sessions)
        ]  # fmt: skip


def read(finished: Finished, shape: ModelShape) -> Completion:
    assert finished.routes is not None
    routes = from_engine(finished.routes, list(shape.layer_map), shape.experts, shape.top_k)
    return Completion(
        token_ids=finished.output_ids,
        logprobs=np.asarray(finished.logprobs, np.float32),
        spans=[Span(start=0, end=len(finished.output_ids), version=Version(0, 0))],
        routes=routes,
        route_spans=[Span(start=0, end=len(routes), version=Version(0, 0))],
        stop="stop",
        cached_tokens=0,
    )


def learner(model: ModelConfig, masters: Tensors, mode: Any, rate: float) -> Learner:
    config = GrpoConfig(learning_rate=rate, route_plausibility=0.0)
    return Learner(masters, model, config, numerics=mode, compute_dtype=FP32, max_lag=0, seed=1)


def measure(
    model: ModelConfig, weights: Tensors, samples: list[Sample], numerics: Numerics, dtype: torch.dtype, mode: str
) -> dict[str, float]:
    """The trainer's forward over what an engine recorded; mode live, replay or filter."""
    agreement = Agreement(exact=False, replay=mode != "live")
    with torch.no_grad():
        prepared = prepare({n: w.float() for n, w in weights.items()}, model, dtype)
        for micro in micro_batches(samples, np.zeros(len(samples), np.float32), 8192):
            forced = None if mode == "live" else micro.routes_BTLk
            floor = FILTER if mode == "filter" else 0.0
            out = forward_full(prepared, model, micro.token_ids_BT, micro.lengths_B, numerics, forced, floor)
            hidden = out.hidden.flatten(0, 1)[micro.rows_N]
            current, _ = token_logprob(prepared, hidden, micro.targets_N, 1.0, numerics)
            agreement.add(micro, current, out)
    found = agreement.metrics()
    return {key: found.get(f"lag0_{key}", 0.0) for key in SHOWN}


# -- the parts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An engine and a trainer. `engine` and `trainer` are (weights, kernels, compute dtype)."""

    name: str
    engine: tuple[Tensors, Numerics, torch.dtype]
    trainer: tuple[Tensors, Numerics, torch.dtype]


def cases(masters: Tensors, older: list[Tensors]) -> Iterator[Case]:
    """older[k] are the rollout weights of k updates ago."""
    bf16 = {name: w.to(BF16) for name, w in masters.items()}
    fp16 = {name: w.to(torch.float16) for name, w in masters.items()}
    low = {scheme: dequantise(quantise(masters, scheme), FP32) for scheme in ("fp8", "int4")}
    plain = (bf16, FAST, FP32)
    yield Case(name="naive, fp32", engine=plain, trainer=plain)
    yield Case(name="naive, bf16", engine=(bf16, FAST, BF16), trainer=(bf16, FAST, BF16))
    for label, dtype in (("fp32", FP32), ("bf16", BF16)):
        exact = (bf16, INVARIANT, dtype)
        yield Case(name=f"invariant, {label}", engine=exact, trainer=exact)
    yield Case(name="int4 on both sides, invariant", engine=(low["int4"], INVARIANT, FP32),
               trainer=(low["int4"], INVARIANT, FP32))  # fmt: skip
    half = (bf16, FAST, BF16)
    yield Case(name="engine fp32, trainer bf16 compute", engine=plain, trainer=half)
    yield Case(name="engine fp16 weights, trainer bf16", engine=(fp16, FAST, FP32), trainer=half)
    for scheme, weights in low.items():
        yield Case(name=f"engine {scheme}, trainer bf16", engine=(weights, FAST, FP32), trainer=half)
    for k in (1, 2, 4, 8):
        yield Case(name=f"engine {k} updates old", engine=(older[k], FAST, FP32), trainer=plain)


def numbers(name: str, model: ModelConfig, base: Tensors, sessions: Callable[[int], list[Session]],
            most_tokens: int, rate: float) -> dict[str, Any]:  # fmt: skip
    """Move the base by UPDATES updates, then measure every case in the three modes."""
    made, engine, history = learner(model, base, "off", rate), Engine(model), []
    for step in range(UPDATES):
        history.insert(0, made.rollout_weights())
        engine.serve(history[0])
        made.step(engine.roll_out(sessions(step), most_tokens))
    engine.core.stop()
    masters = made.state().masters
    older = [made.rollout_weights(), *history]
    found: dict[str, Any] = {}
    print(f"\n{name}, {sum(w.numel() for w in masters.values()) / 1e6:.1f} M parameters")
    print(f"{'':36}{'':8}{'k1':>10}{'k3':>10}{'max':>8}{'equal':>8}{'extreme':>9}{'ESS':>8}{'flips':>8}{'filter':>8}")
    for case in cases(masters, older):
        weights, numerics, dtype = case.engine
        engine = Engine(model, numerics, dtype)
        engine.serve(weights)
        samples = engine.roll_out(sessions(UPDATES), most_tokens)
        engine.core.stop()
        found[case.name] = {}
        for mode in ("live", "replay", "filter"):
            row = found[case.name][mode] = measure(model, case.trainer[0], samples, *case.trainer[1:], mode)
            label = case.name if mode == "live" else ""
            print(f"{label:36}{mode:8}{row['k1']:10.1e}{row['k3']:10.1e}{row['diff_max']:8.1e}"
                  f"{row['equal_fraction']:8.1%}{row['extreme_fraction']:9.2%}{row['ess']:8.4f}"
                  f"{row['flipped_fraction']:8.1%}{row['filtered_fraction']:8.2%}", flush=True)  # fmt: skip
    return found


def training(model: ModelConfig, base: Tensors, steps: int) -> dict[str, Any]:
    """GRPO on an engine that serves int4 of the masters, against one that serves their bf16 rounding."""
    found: dict[str, Any] = {}
    for name, (mode, low) in TRAINING.items():
        made, engine, rows, began = learner(model, base, mode, 4e-4), Engine(model), [], time.process_time()
        for step in range(steps):
            masters = made.state().masters
            engine.serve(dequantise(quantise(masters, "int4"), FP32) if low else made.rollout_weights())
            rows.append(made.step(engine.roll_out(expr_sessions(step), p.ACTION_BYTES_MAX)).metrics)
        engine.core.stop()
        thirds = {part: rows[a : a + steps // 3] for part, a in (("first", 0), ("last", steps - steps // 3))}
        found[name] = {
            f"{part}_{key}": float(np.mean([row[key] for row in own]))
            for part, own in thirds.items()
            for key in ("reward_mean", "lag0_k3", "lag0_ess", "lag0_flipped_fraction", "truncated_mean", "grad_norm")
        }
        shown = "  ".join(f"{key} {value:.4f}" for key, value in found[name].items())
        print(f"{name:14} {time.process_time() - began:5.0f} CPU-s  {shown}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=Path, default=Path("runs/demo/base"))
    parser.add_argument("--parts", default="demo,random,training")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    parts, found = args.parts.split(","), dict[str, Any]()
    if not (args.base / "config.json").exists() and parts != ["random"]:
        print(f"no model in {args.base} (`make demo` leaves one): only the random one is measured")
        parts = ["random"]
    if "random" in parts:
        found["random"] = numbers("random, 64 experts, top-8", RANDOM, init_weights(RANDOM, 0), random_sessions,
                                  RANDOM_TOKENS, 1e-4)  # fmt: skip
    if {"demo", "training"} & set(parts):
        model, base = hf.load(args.base)
        if "demo" in parts:
            found["demo"] = numbers("demo, 8 experts, top-2", model, base, expr_sessions, p.ACTION_BYTES_MAX, 4e-4)
        if "training" in parts:
            found["training"] = training(model, base, args.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
