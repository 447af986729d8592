"""Decoding in compiled code where it is proven to have the bits of the other path.

One token a sequence costs some three hundred calls of torch, each longer than its arithmetic. With numba (the extra
`fast`) one call does it all. Nothing depends on it: what it isn't made for (`misfit`), a build whose bits differ
(`selftest.compiled_decoding` tries it in each process) and single steps whose routing hangs on a tie take the path of
torch, which computes the same.

Shapes: B sequences, L layers, d width, E experts of width f, k a token.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.config import ModelConfig
from headway.kernels.numerics import INVARIANT, Numerics
from headway.kernels.weights import Experts, Grouped, Prepared

PANEL = 32  # columns of a weight that lie together
INNER_MAX = 384  # wider sums are cut in ways that are not known here


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a BLAS sums along a product's inner width: in chains of fused multiply-adds."""

    chain: int  # the longest chain; wider sums are cut in two halves
    narrow: int = 0  # products of fewer columns are summed as `compiled_loops._narrow` does


ORDERS = (Order(chain=384), Order(chain=192, narrow=12))
"""MKL's with AVX-512 on Intel's processors, and on AMD's. Which one holds in a process is for the self-test to find."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A prepared model's weights in the order in which compiled decoding reads them."""

    embed: Tensor  # [V, d]
    weights: tuple[Any, ...]  # the loops' arguments of weights
    settings: tuple[Any, ...]  # and of sizes


def misfit(config: ModelConfig, dtype: torch.dtype, numerics: Numerics) -> str | None:
    """Why the loops are not for this model, machine or mode; None when they are."""
    router, width = config.router, config.head_dim
    inner = (config.hidden_size, config.num_attention_heads * width, config.moe_intermediate_size)
    if dtype != torch.float32 or numerics != INVARIANT:
        return "it is for float32 in order-stable numerics"
    if config.latent or len(config.sparse_layers) < config.num_hidden_layers or config.n_shared_experts:
        return "it knows grouped attention, and routed experts in every layer"
    if router.sigmoid or router.groups > 1:
        return "it knows softmax routers without groups"
    if not all(size % PANEL == 0 and size <= INNER_MAX for size in (*inner, width)):
        return f"widths {inner} and head_dim {width} must be multiples of {PANEL}, at most {INNER_MAX}"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "it repeats torch's arithmetic on AVX-512 alone"
    if importlib.util.find_spec("numba") is None:
        return "numba (the extra `fast`) is not installed"
    return None


def pack(prepared: Prepared, config: ModelConfig, order: Order) -> Packed:
    """For a model without a `misfit`, in the order of sums that the self-test found."""
    attentions, mlps = [], []
    for layer in prepared.layers:
        assert isinstance(layer.attention, Grouped)
        assert isinstance(layer.mlp, Experts)
        attentions.append(layer.attention)
        mlps.append(layer.mlp)
    stacked, panels = functools.partial(_stacked, prepared), functools.partial(_panels, chain=order.chain)
    narrow = config.num_experts < order.narrow
    table = prepared.rotary
    weights = (
        stacked("attention_norm"),
        panels([w.wqkv for w in attentions]),
        torch.stack([w.qk_norm for w in attentions]).numpy(),
        panels([w.wo for w in attentions]),
        stacked("mlp_norm"),
        _panels([w.router for w in mlps], chain=config.hidden_size if narrow else order.chain),
        panels([w for mlp in mlps for w in mlp.w13]),
        panels([w for mlp in mlps for w in mlp.w2]),
        prepared.norm.numpy(),
        table.real.contiguous().numpy(),
        table.imag.contiguous().numpy(),
    )
    settings = (
        config.num_attention_heads,
        config.num_experts,
        config.moe_intermediate_size,
        np.float32(config.rms_norm_eps),
        np.float32(config.attention_scale),
        config.router.normalise,
        np.float32(config.router.scale),
        order.chain,
        narrow,
    )
    return Packed(embed=prepared.embed, weights=weights, settings=settings)


def _stacked(prepared: Prepared, name: str) -> Any:
    return torch.stack([getattr(layer, name) for layer in prepared.layers]).numpy()


def _panels(matrices: list[Tensor], chain: int) -> Any:
    """Matrices [n, inner], each as [chains, n / PANEL, inner / chains, PANEL] (n padded with zeros), flat and after one
    another."""
    n, inner = matrices[0].shape
    padded = torch.zeros(len(matrices), -(-n // PANEL) * PANEL, inner)
    padded[:, :n] = torch.stack(matrices)
    chains = -(-inner // chain)
    return padded.view(len(matrices), -1, PANEL, chains, inner // chains).permute(0, 3, 1, 4, 2).reshape(-1).numpy()


def decode(
    packed: Packed, cache: Tensor, pages: Tensor, start: Tensor, token_ids: Tensor, top_k: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """One token of each sequence, token_ids [B], as `decoder.forward_cached` takes it: hidden [B, d], routes
    [B, L, k], scores [L, B, E]. None, with nothing but the cache's new entries changed, when a tie is to be settled."""
    from headway.kernels.compiled_loops import decode as loops

    experts, layers, b = packed.settings[1], cache.shape[0], token_ids.shape[0]
    x = packed.embed.index_select(0, token_ids).numpy()
    routes = np.empty((b, layers, top_k), np.int64)
    scores = np.empty((layers, b, -(-experts // PANEL) * PANEL), np.float32)
    hidden = np.empty_like(x)
    undecided = loops(
        x, *packed.weights, cache.numpy(), pages.numpy(), start.numpy(), *packed.settings, routes, scores, hidden
    )
    if undecided:
        return None
    return torch.from_numpy(hidden), torch.from_numpy(routes), torch.from_numpy(scores)[:, :, :experts]
