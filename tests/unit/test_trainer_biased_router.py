"""Routers with a selection bias (DeepSeek-V3, Kimi-K2): RL replays their layers and leaves their biases alone."""

import numpy as np
import torch

from headway.kernels.config import ModelConfig
from headway.kernels.weights import init_weights
from headway.schemas.sections import GrpoConfig
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.trainer.batching import Sample
from headway.trainer.learner import Learner

MODEL = ModelConfig(
    model_type="deepseek_v3",
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_tok=3,
    max_position_embeddings=64,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=32,
    first_k_dense_replace=1,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
)


def rollout(number: int) -> Sample:
    rng = np.random.default_rng(number)
    mask = np.array([0] * 4 + [1] * 8, np.uint8)
    trajectory = Trajectory(
        token_ids=rng.integers(0, 40, 12).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -3.5, 0).astype(np.float32),
        spans=[Span(start=4, end=12, version=Version(0, 0))],
        routes=rng.random((11, 2, 8)).argsort(axis=2)[:, :, :3].astype(np.uint8),
        route_spans=[Span(start=0, end=11, version=Version(0, 0))],
        layer_map=[1, 2],
        temperature=1.0,
        turns=1,
        stop_reason="submitted",
    )
    return Sample(rollout_id=f"r{number}", group=0, reward=float(number % 2), trajectory=trajectory, span_lags=(0,))


def test_a_step_replays_the_layers_with_experts_and_moves_no_selection_bias() -> None:
    rng = torch.Generator().manual_seed(3)
    masters = {
        name: 0.1 * torch.randn(w.shape, generator=rng) if name.endswith("e_score_correction_bias") else w
        for name, w in init_weights(MODEL, 0).items()
    }
    made = {
        mode: Learner(
            masters,
            MODEL,
            GrpoConfig(learning_rate=1e-2, warmup_steps=0),
            numerics=mode,  # type: ignore[arg-type]
            compute_dtype=torch.float32,
            max_lag=0,
            seed=1,
        )
        for mode in ("replay", "off")
    }
    metrics = {mode: one.step([rollout(n) for n in range(4)]).metrics for mode, one in made.items()}
    assert metrics["replay"]["lag0_flipped_fraction_layer_1"] > 0.9, "the recorded routes are random"
    assert metrics["replay"]["loss"] != metrics["off"]["loss"]
    after = made["replay"].state().masters
    moved = {name.rsplit(".", 1)[-1] for name, w in after.items() if not torch.equal(w, masters[name])}
    assert "e_score_correction_bias" not in moved
    gates = [name for name in after if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    assert all(not torch.equal(after[name], masters[name]) for name in gates)
