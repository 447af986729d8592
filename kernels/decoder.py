"""The decoder: one layer loop, serving full sequences (training) and cached chunks (prefill, decode).

Both entry points pack the batch's real tokens into rows [N, d], so padding costs nothing and reaches
nobody; they differ only in where attention finds its keys. Shapes: B sequences, T padded tokens,
L layers with experts, k experts a token, d hidden width, V vocabulary, H / K query and key heads of width D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels import compiled, logprob
from headway.kernels.attention import CachedAttention, FullAttention
from headway.kernels.config import ModelConfig
from headway.kernels.moe import moe_forward, swiglu
from headway.kernels.norms import qk_norm_rotary, rms_norm
from headway.kernels.numerics import INVARIANT, PAGE, Numerics, batched, linear
from headway.kernels.rotary import rotate
from headway.kernels.router import Selection, select
from headway.kernels.weights import Dense, Experts, Grouped, Latent, Prepared

PAD_ROUTE = -1  # in routes: no token here
_LATENT_EPS = 1e-6  # DeepSeek norms its latents with this, whatever rms_norm_eps is
Attention = FullAttention | CachedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a forward returns; entries beyond a sequence's length are 0 (hidden) or PAD_ROUTE (routes)."""

    hidden: Tensor  # [B, T, d] compute dtype, after the final norm
    routes: Tensor  # [B, T, L, k] i64, the experts used: in top-k order, or as they were replayed
    live: Tensor  # [B, T, L, k] i64, what the router itself chose: differs from routes under replay alone
    router_scores: tuple[Tensor, ...]  # per layer [tokens, E] f32 scores of the real tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys (after norm and rotary) and values of all layers, in pages. Always finite."""

    kv: Tensor  # [layers, pages, heads, PAGE, columns] (`config.cache_shape`): keys, then values unless part of them

    @classmethod
    def allocate(
        cls, config: ModelConfig, pages: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> KVCache:
        heads, columns = config.cache_shape
        shape = (config.num_hidden_layers, pages, heads, PAGE, columns)
        return cls(kv=torch.zeros(shape, dtype=dtype, device=device))

    @property
    def pages(self) -> int:
        return self.kv.shape[1]

    def clear(self, pages: list[int]) -> None:
        """Zero pages. Needed only after a sequence produced non-finite values."""
        self.kv[:, pages] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The real tokens of a padded batch as N rows; rows beyond `count` are padding."""

    flat: Tensor | None  # [count] index into B * T; None when all are real
    count: int
    ids: Tensor  # [N]
    rotary: Tensor  # [N, 1, D / 2] complex64


def forward_full(
    prepared: Prepared,
    config: ModelConfig,
    token_ids: Tensor,
    lengths: Tensor,
    numerics: Numerics = INVARIANT,
    routes: Tensor | None = None,
    plausibility: float = 0.0,
) -> Output:
    """Whole sequences, right-padded: token_ids [B, T] i64, lengths [B] i64 in 1..T. Differentiable.

    routes [B, T, L, k] replays those expert ids (what lies beyond the lengths is ignored), filtered by
    `plausibility` as in `router.replayed`; a row of a layer with an id of -1 routes live, and gate weights always
    come from live scores. Raises ValueError for lengths, ids or routes out of range.
    """
    rows = _pack(prepared, config, token_ids, lengths, torch.zeros_like(lengths), numerics)
    attention = FullAttention(lengths, rows.ids.numel(), _heads(config), config.attention_scale, numerics)
    return _run(prepared, config, token_ids.shape, rows, attention, numerics, routes, plausibility)


@torch.no_grad()
def forward_cached(
    prepared: Prepared,
    config: ModelConfig,
    cache: KVCache,
    pages: Tensor,
    start: Tensor,
    token_ids: Tensor,
    chunk_lengths: Tensor,
    numerics: Numerics = INVARIANT,
    packed: compiled.Packed | None = None,
) -> Output:
    """Append a chunk to each of B sequences: start and chunk_lengths [B] i64, token_ids [B, T] i64.

    pages [B, W] i64: position t of a sequence is in its page t // PAGE; what it doesn't reach may be any page.
    Sequences may share pages that they only read. start is the number of tokens that are there already;
    chunk_lengths are in 1..T. T = 1 is decoding. Writes the cache in place; memory grows with T times the longest
    context, so split long prompts. With `packed` (the same weights) one token a sequence is decoded by compiled code,
    with the same bits. Raises ValueError for anything out of range.
    """
    _check_pages(prepared, cache, pages, start, chunk_lengths)
    if packed is not None and token_ids.shape[1] == 1:
        _check_tokens(config, token_ids, chunk_lengths, start)
        found = compiled.decode(packed, cache.kv, pages, start, token_ids[:, 0], config.num_experts_per_tok)
        if found is not None:
            hidden, routes, scores = found
            routes = routes[:, None]
            return Output(hidden=hidden[:, None], routes=routes, live=routes, router_scores=scores.unbind(0))
    rows = _pack(prepared, config, token_ids, chunk_lengths, start, numerics)
    attention = CachedAttention(
        cache.kv,
        pages,
        start,
        chunk_lengths,
        rows.ids.numel(),
        _heads(config),
        config.attention_scale,
        numerics,
    )
    return _run(prepared, config, token_ids.shape, rows, attention, numerics, None)


def _heads(config: ModelConfig) -> tuple[int, int]:
    return config.num_attention_heads, config.kv_heads


def logits(prepared: Prepared, hidden_rows: Tensor, numerics: Numerics = INVARIANT) -> Tensor:
    """[N, d] hidden rows -> [N, V] f32."""
    return linear(hidden_rows.float(), prepared.head, numerics)


def token_logprob(
    prepared: Prepared,
    hidden_rows: Tensor,
    target_ids: Tensor,
    temperature: Tensor | float = 1.0,
    numerics: Numerics = INVARIANT,
) -> tuple[Tensor, Tensor]:
    """`logprob.token_logprob` with the model's head: log-probabilities of target_ids [N], and entropies."""
    return logprob.token_logprob(hidden_rows, prepared.head, target_ids, temperature, numerics)


def _check_pages(prepared: Prepared, cache: KVCache, pages: Tensor, start: Tensor, chunk_lengths: Tensor) -> None:
    if cache.kv.dtype != prepared.embed.dtype:
        raise ValueError(f"the cache holds {cache.kv.dtype}, the weights compute in {prepared.embed.dtype}")
    if not pages.numel() or not 0 <= int(pages.min()) <= int(pages.max()) < cache.pages:
        raise ValueError(f"pages must be in 0..{cache.pages - 1}")
    written: list[int] = []
    for row, a, n in zip(pages.tolist(), start.tolist(), chunk_lengths.tolist(), strict=True):
        if a + n > len(row) * PAGE:
            raise ValueError(f"a sequence would reach past its {len(row)} pages")
        written += row[a // PAGE : (a + n - 1) // PAGE + 1]
    if len(set(written)) != len(written):
        raise ValueError("two sequences would write to one page: the pages of new tokens must be distinct")


def _check_tokens(config: ModelConfig, token_ids: Tensor, lengths: Tensor, start: Tensor) -> Tensor | None:
    """Where the real tokens are, None if all are real. Raises ValueError for what is out of range."""
    b, t = token_ids.shape
    if b == 0:
        raise ValueError("a forward needs at least one sequence")
    if lengths.shape != (b,) or start.shape != (b,):
        raise ValueError(f"lengths and starts must have shape [{b}], got {list(lengths.shape)}, {list(start.shape)}")
    sizes, starts = lengths.tolist(), start.tolist()
    low, high, last = min(sizes), max(sizes), max(a + n for a, n in zip(starts, sizes, strict=True))
    if not (low >= 1 and high <= t and min(starts) >= 0 and last <= config.max_position_embeddings):
        raise ValueError(
            f"lengths must be in 1..{t} and end by position {config.max_position_embeddings}, "
            f"got {low}..{high} ending at {last}"
        )
    ids, flat = token_ids.flatten(), None
    if low < t:
        column = torch.arange(t, device=token_ids.device)
        flat = (column < lengths[:, None]).flatten().nonzero().flatten()
        ids = ids.index_select(0, flat)
    least, most = (int(bound) for bound in torch.aminmax(ids))
    if not 0 <= least <= most < config.vocab_size:
        raise ValueError(f"token ids must be in 0..{config.vocab_size - 1}, got {least}..{most}")
    return flat


def _pack(
    prepared: Prepared,
    config: ModelConfig,
    token_ids: Tensor,
    lengths: Tensor,
    start: Tensor,
    numerics: Numerics,
) -> _Rows:
    flat = _check_tokens(config, token_ids, lengths, start)
    column = torch.arange(token_ids.shape[1], device=token_ids.device)
    ids, position = token_ids.flatten(), (start[:, None] + column).flatten()
    if flat is not None:
        ids, position = ids.index_select(0, flat), position.index_select(0, flat)
    count = ids.numel()
    if pad := numerics.rows(count) - count:
        ids, position = F.pad(ids, (0, pad)), F.pad(position, (0, pad))
    return _Rows(flat=flat, count=count, ids=ids, rotary=prepared.rotary.index_select(0, position)[:, None])


def _run(
    prepared: Prepared,
    config: ModelConfig,
    shape: torch.Size,
    rows: _Rows,
    attention: Attention,
    numerics: Numerics,
    routes: Tensor | None,
    plausibility: float = 0.0,
) -> Output:
    replay = None if routes is None else _replayed(routes, config, shape, rows)
    x = F.embedding(rows.ids, prepared.embed)
    found: list[Selection] = []
    for n, layer in enumerate(prepared.layers):
        h = rms_norm(x, layer.attention_norm, config.rms_norm_eps, numerics)
        if isinstance(layer.attention, Latent):
            x = x + _latent(layer.attention, config, n, h, rows.rotary, attention, numerics)
        else:
            x = x + _grouped(layer.attention, config, n, h, rows.rotary, attention, numerics)
        h = rms_norm(x, layer.mlp_norm, config.rms_norm_eps, numerics)
        if isinstance(layer.mlp, Dense):
            x = x + _dense(layer.mlp, h, numerics)
            continue
        forced = None if replay is None else replay[:, len(found)]
        out, selection = _experts(layer.mlp, config, h, rows.count, forced, plausibility, numerics)
        x = x + out
        found.append(selection)
    return _unpack(rms_norm(x, prepared.norm, config.rms_norm_eps, numerics), found, shape, rows)


def _grouped(
    w: Grouped, config: ModelConfig, n: int, x: Tensor, rotary: Tensor, attention: Attention, numerics: Numerics
) -> Tensor:
    h, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv = linear(x, w.wqkv, numerics).view(-1, h + 2 * kv, width)
    q, k, v = qk_norm_rotary(qkv, w.qk_norm, rotary, config.rms_norm_eps, numerics)
    return linear(attention(n, q, k, v).to(x.dtype), w.wo, numerics)


def _latent(
    w: Latent, config: ModelConfig, n: int, x: Tensor, rotary: Tensor, attention: Attention, numerics: Numerics
) -> Tensor:
    """Queries are brought to the latent's space, so that all heads share one key and value: the latent itself."""
    h, rank, plain = config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim
    lower = x
    if w.wq_a is not None and w.q_norm is not None:
        lower = rms_norm(linear(x, w.wq_a, numerics), w.q_norm, _LATENT_EPS, numerics)
    q = linear(lower, w.wq, numerics).view(x.shape[0], h, -1)
    kv = linear(x, w.wkv_a, numerics)
    latent = rms_norm(kv[:, :rank], w.kv_norm, _LATENT_EPS, numerics)
    key = torch.cat([latent[:, None], rotate(kv[:, None, rank:], rotary)], -1)
    lifted = batched(q[..., :plain].transpose(0, 1), w.w_key.mT, numerics).transpose(0, 1)
    query = torch.cat([lifted, rotate(q[..., plain:], rotary)], -1)
    seen = attention(n, query, key, key[..., :rank]).to(x.dtype).view(-1, h, rank)
    values = batched(seen.transpose(0, 1), w.w_value, numerics).transpose(0, 1)
    return linear(values.reshape(x.shape[0], -1), w.wo, numerics)


def _dense(w: Dense, x: Tensor, numerics: Numerics) -> Tensor:
    return linear(swiglu(linear(x, w.w13, numerics)), w.w2, numerics)


def _experts(
    w: Experts,
    config: ModelConfig,
    x: Tensor,
    count: int,
    forced: Tensor | None,
    plausibility: float,
    numerics: Numerics,
) -> tuple[Tensor, Selection]:
    """Padding rows beyond `count` follow row 0, so that they cost no expert of their own."""
    selection = select(linear(x.float(), w.router, numerics), config.router, w.bias, forced, plausibility)
    ids = selection.ids
    if pad := x.shape[0] - count:
        ids = torch.cat([ids[:count], ids[:1].expand(pad, -1)])
    out = moe_forward(x, ids, selection.weights, w.w13, w.w2, numerics)
    return out if w.shared is None else out + _dense(w.shared, x, numerics), selection


def _replayed(routes: Tensor, config: ModelConfig, shape: torch.Size, rows: _Rows) -> Tensor:
    expected = (*shape, len(config.sparse_layers), config.num_experts_per_tok)
    if tuple(routes.shape) != expected:
        raise ValueError(f"routes must have shape {list(expected)}, got {list(routes.shape)}")
    chosen = routes.reshape(-1, *expected[2:])
    chosen = (chosen if rows.flat is None else chosen[rows.flat]).long()
    if not PAD_ROUTE <= int(chosen.min()) <= int(chosen.max()) < config.num_experts:
        raise ValueError(f"replayed routes must be in 0..{config.num_experts - 1}, or -1 where none is known")
    return F.pad(chosen, (0, 0, 0, 0, 0, rows.ids.numel() - rows.count))


def _unpack(hidden: Tensor, chosen: list[Selection], shape: torch.Size, rows: _Rows) -> Output:
    def spread(packed: Tensor, padding: int) -> Tensor:
        if rows.flat is None:
            return packed.view(*shape, *packed.shape[1:])
        padded = packed.new_full((shape.numel(), *packed.shape[1:]), padding)
        return padded.index_copy(0, rows.flat, packed).view(*shape, *packed.shape[1:])

    def ids(layers: list[Tensor]) -> Tensor:
        return spread(torch.stack(layers, dim=1)[: rows.count], PAD_ROUTE)

    routes, as_routed = ids([one.ids for one in chosen]), all(one.ids is one.live for one in chosen)
    return Output(
        hidden=spread(hidden[: rows.count], 0),
        routes=routes,
        live=routes if as_routed else ids([one.live for one in chosen]),
        router_scores=tuple(one.scores[: rows.count] for one in chosen),
    )
