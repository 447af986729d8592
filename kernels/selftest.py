"""Does this machine's arithmetic keep the order-stability that bitwise mode promises?

It depends on the BLAS build, the instruction set and the thread count, so every process that claims it
checks at start: first op by op, so that a refusal names the culprit, then a decoder end to end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels import compiled
from headway.kernels.attention import QUERY_TILE, attend, causal_bias
from headway.kernels.config import ModelConfig
from headway.kernels.decoder import KVCache, forward_cached, forward_full, token_logprob
from headway.kernels.moe import moe_forward
from headway.kernels.norms import rms_norm
from headway.kernels.numerics import INVARIANT, LANES, PAGE, Numerics, linear, tile
from headway.kernels.router import select
from headway.kernels.weights import Experts, Grouped, Layer, Prepared, init_weights, prepare

_ROWS = (1, 2, 3, 5, 16, 17, 48, 333)  # batch sizes compared with a large one
_MAX_LAYERS, _MAX_EXPERTS, _MAX_VOCAB, _MAX_LEN = 2, 8, 512, 64
_CONTEXT = 3 * 128 + 80  # attention: several key blocks
_DECODED = (1, 2, 3, 5, 13, 40)  # batches that compiled code decodes


@functools.cache
def compiled_decoding(config: ModelConfig, compute_dtype: torch.dtype, numerics: Numerics) -> compiled.Order | str:
    """The order of sums with which compiled decoding may be used for this model: it fits, and has the bits of the other
    path on a smaller model of the same widths. Else why not. Compiles (seconds) when numba's cache is cold."""
    if why := compiled.misfit(config, compute_dtype, numerics):
        return why
    small = _smaller(config, min(config.num_experts, LANES + config.num_experts % LANES))
    rng = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            prepared = prepare(init_weights(small, 0), small, compute_dtype)
            for order in compiled.ORDERS:
                packed = compiled.pack(prepared, small, order)
                if all(_decodes_alike(prepared, packed, small, b, rng) for b in _DECODED):
                    return order
    except Exception as error:  # whatever a compiler may raise: there is another way
        return f"it fails: {error!r:.300}"
    return "its bits differ from torch's on this machine"


def _decodes_alike(
    prepared: Prepared, packed: compiled.Packed, config: ModelConfig, b: int, rng: torch.Generator
) -> bool:
    each = -(-min(config.max_position_embeddings, _CONTEXT) // PAGE)
    cache = KVCache.allocate(config, b * each, torch.float32)
    cache.kv.normal_(generator=rng)
    other = KVCache(kv=cache.kv.clone())
    pages = torch.randperm(cache.pages, generator=rng).view(b, each)
    start = torch.randint(min(each * PAGE, config.max_position_embeddings), (b,), generator=rng)
    ids, one = torch.randint(config.vocab_size, (b, 1), generator=rng), torch.ones(b, dtype=torch.int64)
    due = forward_cached(prepared, config, cache, pages, start, ids, one)
    found = forward_cached(prepared, config, other, pages, start, ids, one, INVARIANT, packed)
    pairs = ((due.hidden, found.hidden), (due.routes, found.routes), (cache.kv, other.kv))
    return all(torch.equal(a, b) for a, b in pairs)


def refusal(
    config: ModelConfig,
    compute_dtype: torch.dtype = torch.float32,
    numerics: Numerics = INVARIANT,
    seed: int = 0,
) -> str | None:
    """None when results are bitwise independent of batch, chunks, pages and padding; else which op isn't.

    Checks the config's widths on a smaller model (at most 2 layers, 8 experts, 512 words, 64 positions).
    """
    small = _smaller(config, _MAX_EXPERTS)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        prepared = prepare(init_weights(small, seed), small, compute_dtype)
        for name, holds in _checks(prepared, small, numerics, rng, compute_dtype):
            if not holds:
                return (
                    f"{name} gives different bits for the same row in different batches "
                    f"({compute_dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
                    f"{torch.backends.cpu.get_cpu_capability()})"
                )
    return None


def _smaller(config: ModelConfig, experts_max: int) -> ModelConfig:
    experts = min(config.num_experts, experts_max)
    return dataclasses.replace(
        config,
        num_hidden_layers=min(config.num_hidden_layers, _MAX_LAYERS),
        first_k_dense_replace=min(config.first_k_dense_replace, _MAX_LAYERS - 1),
        n_group=1,
        topk_group=1,
        num_experts=experts,
        num_experts_per_tok=min(config.num_experts_per_tok, experts),
        vocab_size=min(config.vocab_size, _MAX_VOCAB),
    )


def _checks(
    p: Prepared, config: ModelConfig, numerics: Numerics, rng: torch.Generator, dtype: torch.dtype
) -> Iterator[tuple[str, bool]]:
    layer, d = p.layers[-1], config.hidden_size
    assert isinstance(layer.mlp, Experts)
    x = torch.randn(1024, d, generator=rng).to(dtype)
    for name, w in _matrices(layer):
        rows = torch.randn(1024, w.shape[-1], generator=rng).to(w.dtype)
        yield name, _row_stable(lambda r, w=w: (_multiply(r, w),), rows, numerics)
    yield "rms_norm", _row_stable(lambda r: (rms_norm(r, layer.mlp_norm, config.rms_norm_eps),), x, numerics)
    yield "router", _row_stable(lambda r: (select(r, config.router).weights,), x.float() @ layer.mlp.router.T, numerics)
    targets = torch.randint(config.vocab_size, (1024,), generator=rng)
    yield (
        "token log-probability",
        all(
            torch.equal(a, b[:n])
            for n in _ROWS
            for a, b in zip(
                token_logprob(p, x[:n], targets[:n], 0.7, numerics),
                token_logprob(p, x, targets, 0.7, numerics),
                strict=True,
            )
        ),
    )
    yield "expert matmul", _experts_stable(layer.mlp, config, numerics, x)
    yield "attention", _attention_stable(config, numerics, rng)
    yield "decoder", _decoder_stable(p, config, numerics, rng, dtype)


def _row_stable(op, x: Tensor, numerics: Numerics) -> bool:  # type: ignore[no-untyped-def]
    whole = op(x)
    for n in _ROWS:
        part = op(F.pad(x[:n], (0, 0, 0, numerics.rows(n) - n)))
        if not all(torch.equal(a[:n], b[:n]) for a, b in zip(part, whole, strict=True)):
            return False
    return True


def _matrices(layer: Layer) -> list[tuple[str, Tensor]]:
    """The weights that rows are multiplied with, as [.., outputs, inputs]."""
    assert isinstance(layer.mlp, Experts)
    w = layer.attention
    if isinstance(w, Grouped):
        found = [("qkv linear", w.wqkv)]
    else:
        found = [("query linear", w.wq), ("latent linear", w.wkv_a)]
        found += [("latent key matmul", w.w_key.mT), ("latent value matmul", w.w_value)]
    return [*found, ("output linear", w.wo), ("router linear", layer.mlp.router)]


def _multiply(rows: Tensor, w: Tensor) -> Tensor:
    return rows @ w.T if w.dim() == 2 else torch.bmm(rows.expand(w.shape[0], -1, -1), w.mT).transpose(0, 1)


def _experts_stable(w: Experts, config: ModelConfig, numerics: Numerics, x: Tensor) -> bool:
    def op(rows: Tensor) -> tuple[Tensor, ...]:
        chosen = select(linear(rows.float(), w.router, numerics), config.router, w.bias)
        return moe_forward(rows, chosen.ids, chosen.weights, w.w13, w.w2, numerics), chosen.ids, chosen.weights

    order = torch.arange(x.shape[0]).flip(0)
    flipped = all(torch.equal(a[order], b) for a, b in zip(op(x), op(x[order]), strict=True))
    return flipped and _row_stable(op, x, numerics)


def _attention_stable(config: ModelConfig, numerics: Numerics, rng: torch.Generator) -> bool:
    """One query at a time over its own keys, against all queries over all keys."""
    width, n, t = config.cache_shape[1], 3 * config.kv_heads, _CONTEXT
    q, k, v = (torch.randn(n, t, width, generator=rng) for _ in range(3))
    if config.latent:
        v = k[..., : config.kv_lora_rank]
    whole = _attend_once(q, k, v, 0, numerics)
    for at in range(0, t, 13):
        keys = tile(at + 1, PAGE) if numerics.block_attention else at + 1
        query = q[1:2, at : at + 1]
        if numerics.block_attention:
            query = F.pad(query, (0, 0, 0, QUERY_TILE - 1))
        one = _attend_once(query, k[1:2, :keys], v[1:2, :keys], at, numerics)
        if not torch.equal(one[0, 0], whole[1, at]):
            return False
    return True


def _attend_once(q: Tensor, k: Tensor, v: Tensor, start: int, numerics: Numerics) -> Tensor:
    bias = causal_bias(torch.tensor([start]), q.shape[1], k.shape[1])[0, 0]
    if numerics.block_attention:
        return attend(q, k, v, bias, q.shape[-1] ** -0.5)[0]
    return F.scaled_dot_product_attention(q, k, v, bias[0])


def _decoder_stable(
    p: Prepared, config: ModelConfig, numerics: Numerics, rng: torch.Generator, dtype: torch.dtype
) -> bool:
    """Prefill in uneven chunks, then decode in changing company, against one full forward."""
    lengths = torch.tensor([min(n, config.max_position_embeddings) for n in (5, 18, 33, 40)])
    ids = torch.randint(config.vocab_size, (4, int(lengths.max())), generator=rng)
    full = forward_full(p, config, ids, lengths, numerics)
    cache = KVCache.allocate(config, 7 * _MAX_LEN // PAGE, dtype)
    cache.kv.fill_(3.0)  # what earlier sequences left behind
    pages = torch.randperm(cache.pages, generator=rng).view(7, -1)[:4]
    held = torch.zeros(4, dtype=torch.int64)
    for step in range(64):
        live = (held < lengths).nonzero().flatten()
        if live.numel() == 0:
            return True
        live = live.flip(0) if step % 2 else live[: 1 + step % 3]
        size = torch.minimum(lengths[live] - held[live], 1 + (live * 3 if step < 4 else live * 0))
        column = held[live, None] + torch.arange(int(size.max()))
        chunk = ids[live[:, None], column.clamp(max=ids.shape[1] - 1)]
        out = forward_cached(p, config, cache, pages[live], held[live], chunk, size, numerics)
        for row, sequence in enumerate(live.tolist()):
            n, at = int(size[row]), int(held[sequence])
            for part, whole in ((out.hidden, full.hidden), (out.routes, full.routes)):
                if not torch.equal(part[row, :n], whole[sequence, at : at + n]):
                    return False
        held[live] += size
    return False
