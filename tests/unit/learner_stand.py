"""A small learner, and batches of rollouts that an engine of its weights could have sampled."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headway.kernels.config import ModelConfig
from headway.kernels.decoder import KVCache, forward_cached, forward_full, token_logprob
from headway.kernels.quant import dequantise
from headway.kernels.weights import init_weights, prepare
from headway.schemas.sections import GrpoConfig
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import digest_of
from headway.trainer.batching import Sample
from headway.trainer.checkpoint import to_bytes
from headway.trainer.lead import Lead
from headway.trainer.learner import Learner
from headway.trainer.mesh import Mesh

MODEL = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=64,
)
HEAD = 5
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def learner(
    seed: int = 0,
    numerics: str = "bitwise",
    rollout_dtype: str = "bfloat16",
    same: bool = True,
    mesh: Mesh | None = None,
    **settings: object,
) -> Learner:
    masters = init_weights(MODEL, seed)
    return (Lead if mesh is not None and mesh.rank == 0 else Learner)(
        {name: w.bfloat16() for name, w in masters.items()},
        MODEL,
        GrpoConfig(**({"learning_rate": 1e-2, "warmup_steps": 0, "token_budget": 64} | settings)),
        numerics=numerics,  # type: ignore[arg-type]
        compute_dtype=torch.float32,
        rollout_dtype=rollout_dtype,  # type: ignore[arg-type]
        max_lag=2,
        seed=1,
        same_arithmetic=same,
        mesh=mesh,
    )


def rollout(
    spans: list[tuple[int, Mapping[str, Tensor]]], number: int, reward: float, temperature: float = 0.8
) -> Sample:
    """What an engine does: prefill, decode turns of 3 tokens, re-prefill when the weights change."""
    rng = torch.Generator().manual_seed(number)
    ids = torch.randint(40, (4 + number % 3,), generator=rng).tolist()
    mask, logprobs, said = [0] * len(ids), [0.0] * len(ids), []
    for lag, weights in spans:
        prepared = prepare(dequantise(weights, torch.float32), MODEL, torch.float32)
        cache, held = KVCache.allocate(MODEL, 5, torch.float32), 0
        ids, mask, logprobs = [*ids, number % 7], [*mask, 0], [*logprobs, 0.0]
        said.append((len(ids), lag))
        for _ in range(3):
            chunk = torch.tensor([ids[held:]])
            out = forward_cached(
                prepared,
                MODEL,
                cache,
                torch.tensor([[4, 0, 3, 1]]),
                torch.tensor([held]),
                chunk,
                torch.tensor([chunk.shape[1]]),
            )
            held = len(ids)
            rows = torch.nn.functional.one_hot(torch.randint(40, (1,), generator=rng), 40).float()
            token = int(rows.argmax())
            logprob, _ = token_logprob(prepared, out.hidden[0, -1:], torch.tensor([token]), temperature)
            ids, mask, logprobs = [*ids, token], [*mask, 1], [*logprobs, float(logprob)]
    routes = forward_full(prepared, MODEL, torch.tensor([ids]), torch.tensor([len(ids)])).routes[0, :-1]
    newest = Version(0, HEAD - spans[-1][0])
    made = Trajectory(
        token_ids=np.asarray(ids, np.int32),
        loss_mask=np.asarray(mask, np.uint8),
        logprobs=np.asarray(logprobs, np.float32),
        spans=[Span(start=at, end=at + 3, version=Version(0, HEAD - lag)) for at, lag in said],
        routes=routes.numpy().astype(np.uint8),
        route_spans=[Span(start=0, end=len(ids) - 1, version=newest)],
        layer_map=[0, 1],
        temperature=temperature,
        turns=len(spans),
        stop_reason="submitted",
    )
    return Sample(
        rollout_id=f"r{number}",
        group=number // 4,
        reward=reward,
        trajectory=made,
        span_lags=tuple(lag for lag, _ in spans),
    )


def batch(weights: Mapping[str, Tensor], older: Mapping[str, Tensor] | None = None) -> list[Sample]:
    """Two groups of four; with `older`, every other rollout began under a version of lag 1."""
    return [
        rollout([(1, older), (0, weights)] if older and n % 2 else [(0, weights)], n, float(n % 3 == 0))
        for n in range(8)
    ]


def changed(sample: Sample, **arrays: object) -> Sample:
    trajectory = sample.trajectory.model_copy(update=arrays)
    return Sample(
        rollout_id=sample.rollout_id,
        group=sample.group,
        reward=sample.reward,
        trajectory=trajectory,
        span_lags=sample.span_lags,
    )


def fingerprint(made: Learner) -> str:
    return digest_of(to_bytes(made.state()))
