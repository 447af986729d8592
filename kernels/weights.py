"""From a checkpoint's tensors to the fused tensors the decoder computes with, differentiably.

`masters` (fp32) -> `round_through` (rollout dtype, upcast) -> `prepare` (fused) -> decoder. Gradients run
the same way back and arrive at the masters unrounded (straight through).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.kernels.config import ModelConfig
from headway.kernels.quant import RolloutDtype, dequantise, to_rollout
from headway.kernels.rotary import rotary_table


class _RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rounded: list[Tensor], *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *grads


def round_through(masters: Mapping[str, Tensor], rollout: RolloutDtype) -> dict[str, Tensor]:
    """fp32 masters as engines compute with them: rounded or quantised, then dequantised by the engines' function.

    The gradient passes the rounding unchanged (straight-through estimator, Bengio et al. 2013).
    """
    rounded = dequantise(to_rollout(masters, rollout), torch.float32)
    through = _RoundThrough.apply([rounded[name] for name in masters], *masters.values())
    return dict(zip(masters, through, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Grouped-query attention. H query heads, K key/value heads, D head width."""

    wqkv: Tensor  # [(H + 2K) * D, d]; q and k rows interleaved for rotary pairs
    qk_norm: Tensor  # [H + K, D]
    wo: Tensor  # [d, H * D]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention, absorbed. Rank r of the latent, R rotary columns, n other columns, v of a value."""

    wq_a: Tensor | None  # [rank, d]; None: queries come straight from x
    q_norm: Tensor | None  # [rank]
    wq: Tensor  # [H * (n + R), rank or d]
    wkv_a: Tensor  # [r + R, d]
    kv_norm: Tensor  # [r]
    w_key: Tensor  # [H, n, r]
    w_value: Tensor  # [H, v, r]
    wo: Tensor  # [d, H * v]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A gated MLP."""

    w13: Tensor  # [2f, d], gate rows, then up rows
    w2: Tensor  # [d, f]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """E experts of width f and their router."""

    router: Tensor  # [E, d] f32
    bias: Tensor | None  # [E] f32, moves the choice alone
    w13: Tensor  # [E, 2f, d]
    w2: Tensor  # [E, d, f]
    shared: Dense | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's fused weights."""

    attention_norm: Tensor  # [d]
    attention: Grouped | Latent
    mlp_norm: Tensor  # [d]
    mlp: Dense | Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A whole model's fused weights in the compute dtype; router and head in f32."""

    embed: Tensor  # [V, d]
    layers: tuple[Layer, ...]
    norm: Tensor  # [d]
    head: Tensor  # [V, d] f32
    rotary: Tensor  # [max_position_embeddings, D / 2] complex64


def _interleave(w: Tensor, heads: int) -> Tensor:
    """Bring the halves that Qwen's rotary embedding pairs (i, i + D/2) next to each other, as DeepSeek's are."""
    return w.view(heads, 2, w.shape[0] // heads // 2, -1).transpose(1, 2).reshape(w.shape)


Get = Callable[..., Tensor]
"""Name, and dtype if not the compute dtype."""


def prepare(weights: Mapping[str, Tensor], config: ModelConfig, compute_dtype: torch.dtype) -> Prepared:
    """Fuse HF-named tensors. Differentiable; raises ValueError naming the first missing or misshapen one."""
    check_tensors({name: tuple(w.shape) for name, w in weights.items()}, config)

    def get(name: str, dtype: torch.dtype = compute_dtype) -> Tensor:
        return weights[name].to(dtype)

    layers = []
    for n in range(config.num_hidden_layers):
        p = f"model.layers.{n}."
        layers.append(
            Layer(
                attention_norm=get(f"{p}input_layernorm.weight"),
                attention=(_latent if config.latent else _grouped)(get, f"{p}self_attn.", config),
                mlp_norm=get(f"{p}post_attention_layernorm.weight"),
                mlp=_experts(get, f"{p}mlp.", config) if n in config.sparse_layers else _dense(get, f"{p}mlp."),
            )
        )
    embed = get("model.embed_tokens.weight")
    head_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    rotary = rotary_table(config.head_dim, config.rope_theta, config.max_position_embeddings, config.yarn)
    return Prepared(
        embed=embed,
        layers=tuple(layers),
        norm=get("model.norm.weight"),
        head=get(head_name, torch.float32),
        rotary=rotary.to(embed.device),
    )


def _grouped(get: Get, p: str, config: ModelConfig) -> Grouped:
    h, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (get(f"{p}{x}_proj.weight") for x in "qkv")
    norms = [_interleave(get(f"{p}{x}_norm.weight"), 1).expand(heads, width) for x, heads in (("q", h), ("k", kv))]
    return Grouped(
        wqkv=torch.cat([_interleave(q, h), _interleave(k, kv), v]),
        qk_norm=torch.cat(norms),
        wo=get(f"{p}o_proj.weight"),
    )


def _latent(get: Get, p: str, config: ModelConfig) -> Latent:
    plain = config.q_lora_rank is None
    up = get(f"{p}kv_b_proj.weight").view(config.num_attention_heads, -1, config.kv_lora_rank)
    return Latent(
        wq_a=None if plain else get(f"{p}q_a_proj.weight"),
        q_norm=None if plain else get(f"{p}q_a_layernorm.weight"),
        wq=get(f"{p}q_proj.weight" if plain else f"{p}q_b_proj.weight"),
        wkv_a=get(f"{p}kv_a_proj_with_mqa.weight"),
        kv_norm=get(f"{p}kv_a_layernorm.weight"),
        w_key=up[:, : config.qk_nope_head_dim],
        w_value=up[:, config.qk_nope_head_dim :],
        wo=get(f"{p}o_proj.weight"),
    )


def _dense(get: Get, p: str) -> Dense:
    w13 = torch.cat([get(f"{p}gate_proj.weight"), get(f"{p}up_proj.weight")])
    return Dense(w13=w13, w2=get(f"{p}down_proj.weight"))


def _experts(get: Get, p: str, config: ModelConfig) -> Experts:
    expert = [f"{p}experts.{e}." for e in range(config.num_experts)]
    w13 = torch.cat([get(f"{e}{x}_proj.weight") for e in expert for x in ("gate", "up")])
    return Experts(
        router=get(f"{p}gate.weight", torch.float32),
        bias=get(f"{p}gate.e_score_correction_bias", torch.float32) if config.latent else None,
        w13=w13.view(config.num_experts, -1, config.hidden_size),
        w2=torch.stack([get(f"{e}down_proj.weight") for e in expert]),
        shared=_dense(get, f"{p}shared_experts.") if config.n_shared_experts else None,
    )


def check_tensors(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Raise ValueError naming the first tensor that is missing, misshapen or unknown for this config."""
    expected = config.tensor_shapes()
    for name, shape in expected.items():
        if name not in shapes:
            raise ValueError(f"weights: tensor {name} is missing (config asks for shape {list(shape)})")
        if shapes[name] != shape:
            raise ValueError(f"weights: tensor {name} has shape {list(shapes[name])}, config asks for {list(shape)}")
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        raise ValueError(f"weights: tensor {unknown[0]} is not part of a model with this config")


def init_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """fp32 masters under HF names, for training from scratch. The same seed gives the same bits.

    Norms are 1, the router's biases 0, embeddings normal(0, 1), the rest normal with variance 1 / inputs (LeCun
    et al., "Efficient BackProp", 1998), those that write to the residual stream scaled by 1/sqrt(2 * layers) as in
    GPT-2. The usual constant 0.02 fits widths in the thousands; at a width of 100 it starts far too flat to learn
    to copy within a few hundred steps.
    """
    rng = torch.Generator().manual_seed(seed)
    residual = (2 * config.num_hidden_layers) ** -0.5
    weights = {}
    for name, shape in config.tensor_shapes().items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
            continue
        std = 1.0 if name == "model.embed_tokens.weight" else shape[1] ** -0.5
        std *= residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        weights[name] = torch.randn(shape, generator=rng) * std
    return weights
