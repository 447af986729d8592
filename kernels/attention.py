"""Causal attention over packed rows, among themselves or with a cache: grouped-query or latent.

Packed rows are a batch's tokens one after another: N rows, H query heads, K key/value heads, D columns of a
query or key, U of a value, G = H / K. Latent attention is K = 1 with values that are the keys' first columns
(DeepSeek-V2 2024, with the up-projections absorbed into queries and output). To attend, they are spread into
flat head-major entries [.., D], padded where lengths differ, and collected again. Everything is computed in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.numerics import INVARIANT, PAGE, Numerics, gather_rows, tile

KV_BLOCK = 128  # keys summed at once; longer sums the BLAS splits at places that depend on their length
QUERY_TILE = 8  # rows of one key/value head in decoding are padded to a multiple of this
QUERY_SPAN = 64  # queries of a full sequence handled at once: keys after the last one are skipped
KEPT_KEYS = 512  # attention weights over more keys are recomputed in the backward
GROUP_SCORES = 1 << 18  # scores of one group of sequences: 1 MB, so that they stay in cache


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [n, Q, D], k [n, S, D], v [n, S, U] f32 -> [n, Q, U] and the weights [n, Q, S].

    bias [1 or n, Q, S] holds 0 or -inf. Keys are summed in blocks at fixed places, and a key that a query
    can't see adds an exact zero: the result depends neither on S nor on Q.
    """
    scores = torch.baddbmm(bias, q * scale, k.transpose(1, 2))  # the BLAS may apply an alpha here or there
    weights = torch.softmax(scores, dim=-1)
    out = torch.bmm(weights[..., :KV_BLOCK], v[:, :KV_BLOCK])
    for at in range(KV_BLOCK, k.shape[1], KV_BLOCK):
        out += torch.bmm(weights[..., at : at + KV_BLOCK], v[:, at : at + KV_BLOCK])
    return out, weights


def causal_bias(start: Tensor, queries: int, keys: int) -> Tensor:
    """[b, 1, 1, queries, keys] of 0 where key position <= start + query, else -inf. start: [b] i64.

    Padding queries see at least key 0, so no row is empty and no softmax is NaN.
    """
    position = start[:, None] + torch.arange(queries, device=start.device)
    hidden = torch.arange(keys, device=start.device) > position[..., None]
    return torch.zeros(hidden.shape, device=start.device).masked_fill_(hidden, -math.inf)[:, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A span of query positions of n = sequences * K heads: its slice of q's entries and of k's and v's."""

    n: int
    q: slice
    kv: slice
    total: int  # keys a sequence
    keys: int  # of them, those that the tile's last query sees
    bias: Tensor  # [1, G * Q, keys]

    def queries(self, flat: Tensor) -> Tensor:
        return flat[self.q].view(self.n, -1, flat.shape[1])

    def seen(self, flat: Tensor) -> Tensor:
        return flat[self.kv].view(self.n, self.total, flat.shape[1])[:, : self.keys]


class _TiledAttention(torch.autograd.Function):
    """`attend` tile by tile, over flat entries q and k [.., D], v [.., U] f32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], scale: float) -> Tensor:
        out, kept = q.new_empty(q.shape[0], v.shape[1]), []
        for t in tiles:
            result, weights = attend(t.queries(q), t.seen(k), t.seen(v), t.bias, scale)
            t.queries(out).copy_(result)
            kept.append(weights if t.keys <= KEPT_KEYS else None)
        ctx.save_for_backward(q, k, v, out, *kept)
        ctx.tiles, ctx.scale = tiles, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *kept = ctx.saved_tensors
        return (*_backward(q, k, v, out, kept, grads[0].contiguous(), ctx.tiles, ctx.scale), None, None)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kept: list[Tensor | None],
    d_out: Tensor,
    tiles: list[Tile],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, tile by tile; weights that weren't kept are computed again."""
    minus_delta = torch.linalg.vecdot(d_out, out).neg_()[:, None]
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for t, weights in zip(reversed(tiles), reversed(kept), strict=True):
        q_t, k_t, v_t, d_t = t.queries(q), t.seen(k), t.seen(v), t.queries(d_out)
        if weights is None:
            weights = attend(q_t, k_t, v_t, t.bias, scale)[1]
        d_scores = torch.baddbmm(t.queries(minus_delta), d_t, v_t.transpose(1, 2))
        d_scores.mul_(weights).mul_(scale)
        torch.bmm(d_scores, k_t, out=t.queries(d_q))
        # a sequence's last tile sees all its keys and comes first here: it writes, the others add
        _add_product(t.seen(d_v), weights, d_t, fresh=t.keys == t.total)
        _add_product(t.seen(d_k), d_scores, q_t, fresh=t.keys == t.total)
    return d_q, d_k, d_v


class _TritonAttention(torch.autograd.Function):
    """The forward of whole sequences by Triton's kernel, the backward tile by tile."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: FullAttention) -> Tensor:
        out = attention.on_gpu(q, k, v)
        ctx.save_for_backward(q, k, v, out)
        ctx.attention = attention
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.attention.gradients(*ctx.saved_tensors, grads[0]), None)


def _add_product(target: Tensor, weights: Tensor, rows: Tensor, fresh: bool) -> None:
    if fresh:
        torch.bmm(weights.transpose(1, 2), rows, out=target)
    else:
        target += torch.bmm(weights.transpose(1, 2), rows)


@dataclass(frozen=True, slots=True)
class Cells:
    """Padded positions [b, T] of some sequences: which packed row is there, and whether one is."""

    row: Tensor
    real: Tensor

    @classmethod
    def of(cls, offsets: Tensor, lengths: Tensor, width: int) -> Cells:
        column = torch.arange(width, device=lengths.device)
        real = column < lengths[:, None]
        return cls(torch.where(real, offsets[:, None] + column, 0), real)

    def columns(self, first: int, last: int) -> Cells:
        return Cells(self.row[:, first:last], self.real[:, first:last])


class HeadMap:
    """Packed rows [N, heads, D] to the flat entries of several [b, heads, T] blocks, and back."""

    def __init__(self, blocks: list[Cells], heads: int, rows: int, tokens: int) -> None:
        head = torch.arange(heads, device=blocks[0].row.device)[:, None]
        self._index = torch.cat([(c.row[:, None] * heads + head).flatten() for c in blocks])
        real = torch.cat([c.real[:, None].expand(-1, heads, -1).flatten() for c in blocks])
        entries = real.nonzero().flatten()
        self._inverse = entries.new_zeros(rows * heads)
        self._inverse[self._index[entries]] = entries
        self._pads = (~real).nonzero().flatten()
        self._no_token = torch.arange(tokens * heads, rows * heads, device=head.device)

    def spread(self, x: Tensor, pad: float | None = None) -> Tensor:
        """x [N, heads, D] -> entries [.., D] f32; those of padding are `pad`, by default anything finite of x."""
        flat = x.float().reshape(-1, x.shape[-1])
        entries = gather_rows(flat, self._index, self._inverse[:, None], self._no_token)
        return entries if pad is None else entries.index_fill_(0, self._pads, pad)

    def gradient(self, entries: Tensor, x: Tensor) -> Tensor:
        """That of x, which was spread, from the one of its entries."""
        return entries.index_select(0, self._inverse).index_fill_(0, self._no_token, 0.0).view_as(x).to(x.dtype)

    def collect(self, entries: Tensor) -> Tensor:
        """entries [.., D] -> [N * heads, D]."""
        return gather_rows(entries, self._inverse, self._index[:, None], self._pads)


class FullAttention:
    """Attention of whole sequences, each among its own tokens, in groups of similar length."""

    def __init__(
        self, lengths: Tensor, rows: int, heads: tuple[int, int], scale: float, numerics: Numerics = INVARIANT
    ) -> None:
        """heads: H and K. rows: N, padding rows included."""
        q_heads, kv_heads = heads
        self._scale, self._lengths, self._numerics = scale, lengths, numerics
        self._tiles: list[Tile] = []
        g, offsets, sizes = q_heads // kv_heads, lengths.cumsum(0) - lengths, lengths.tolist()
        q_blocks, kv_blocks, biases, q_at, kv_at = [], [], dict[int, Tensor](), 0, 0
        for members, width in _group_by_length(sizes, q_heads):
            at = torch.tensor(members, device=lengths.device)
            cells, n = Cells.of(offsets[at], lengths[at], width), len(members) * kv_heads
            for first in range(0, width, QUERY_SPAN):
                keys = min(first + QUERY_SPAN, width)
                if keys not in biases:
                    bias = causal_bias(lengths.new_full((1,), first), keys - first, keys)
                    biases[keys] = bias.expand(-1, -1, g, -1, -1).reshape(1, -1, keys)
                q, kv = slice(q_at, q_at + n * g * (keys - first)), slice(kv_at, kv_at + n * width)
                self._tiles.append(Tile(n=n, q=q, kv=kv, total=width, keys=keys, bias=biases[keys]))
                q_blocks.append(cells.columns(first, keys))
                q_at = q.stop
            kv_blocks.append(cells)
            kv_at += n * width
        self._q = HeadMap(q_blocks, q_heads, rows, sum(sizes))
        self._kv = HeadMap(kv_blocks, kv_heads, rows, sum(sizes))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k [N, K, D], v [N, K, U] -> [N, H * U] f32."""
        if self._numerics.on_gpu(q):
            return _TritonAttention.apply(q, k, v, self).flatten(1)
        spread = self._q.spread(q), self._kv.spread(k), self._kv.spread(v)
        return self._q.collect(_TiledAttention.apply(*spread, self._tiles, self._scale)).view(q.shape[0], -1)

    def on_gpu(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N, H, U] f32, without a gradient."""
        from headway.kernels import triton_ops

        lengths = self._lengths
        place = torch.arange(int(lengths.max()), device=q.device) + (lengths.cumsum(0) - lengths)[:, None]
        none = torch.zeros_like(lengths)
        return triton_ops.attention(q, k.flatten(1), v.flatten(1), place, none, lengths, k.shape[1], self._scale)

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor) -> tuple[Tensor, ...]:
        """Of q, k and v, from that of `on_gpu`'s result."""
        with torch.no_grad():
            spread = [self._q.spread(q), self._kv.spread(k), self._kv.spread(v), self._q.spread(out)]
            kept: list[Tensor | None] = [None] * len(self._tiles)
            found = _backward(*spread, kept, self._q.spread(d_out, pad=0.0), self._tiles, self._scale)
            maps = (self._q, self._kv, self._kv)
            return tuple(m.gradient(entries, x) for m, entries, x in zip(maps, found, (q, k, v), strict=True))


def _group_by_length(sizes: list[int], heads: int) -> list[tuple[list[int], int]]:
    """(member sequences, padded length) per group, shortest first, each within GROUP_SCORES if it can."""
    groups: list[tuple[list[int], int]] = []
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        width = tile(sizes[i], PAGE)
        if groups and (len(groups[-1][0]) + 1) * heads * width * width <= GROUP_SCORES:
            groups[-1] = ([*groups[-1][0], i], width)
        else:
            groups.append(([i], width))
    return groups


class CachedAttention:
    """Attention of new tokens to a paged cache, which first takes their keys and values.

    cache [L, pages, K of keys, then K of values, PAGE, D], or of keys alone where values are their first columns;
    pages [b, W] i64: position t of a sequence is at row t % PAGE of its page t // PAGE.
    """

    def __init__(
        self,
        cache: Tensor,
        pages: Tensor,
        start: Tensor,
        lengths: Tensor,
        rows: int,
        heads: tuple[int, int],
        scale: float,
        numerics: Numerics,
    ) -> None:
        q_heads, kv_heads = heads
        self._cache, self._scale, self._numerics = cache, scale, numerics
        device, b, g = pages.device, lengths.numel(), q_heads // kv_heads
        queries, self._keys = int(lengths.max()), int((start + lengths).max())
        held = tile(self._keys, PAGE)
        if numerics.block_attention:
            self._keys = held
        self._tokens, self._q = int(lengths.sum()), None
        if queries == 1:
            position, page = start, pages.gather(1, start[:, None] // PAGE)[:, 0]
            width = -(-g // QUERY_TILE) * QUERY_TILE if numerics.block_attention else g
            self._mask = causal_bias(start, 1, self._keys)[:, :, 0]
            self._bias = self._mask.expand(-1, kv_heads, width, -1).reshape(b * kv_heads, width, -1)
        else:
            if numerics.block_attention:
                step = QUERY_TILE // math.gcd(g, QUERY_TILE)
                queries = -(-queries // step) * step
            cells = Cells.of(lengths.cumsum(0) - lengths, lengths, queries)
            self._q = HeadMap([cells], q_heads, rows, self._tokens)
            position = (start[:, None] + torch.arange(queries, device=device))[cells.real]
            owner = torch.arange(b, device=device)[:, None].expand_as(cells.real)[cells.real]
            page, width = pages[owner, position // PAGE], g * queries
            bias = causal_bias(start, queries, self._keys)
            self._mask = bias[:, :, 0]
            self._bias = bias.expand(-1, kv_heads, g, -1, -1).reshape(-1, width, self._keys)
        self._shape = (b, kv_heads, g, width)
        self._pages, self._start, self._lengths = pages, start, lengths
        layer_heads = cache.shape[2]
        head = torch.arange(layer_heads, device=device)
        self._write = ((page[:, None] * layer_heads + head) * PAGE + (position % PAGE)[:, None]).flatten()
        by_part = head.view(-1, 1, kv_heads, 1)
        self._read = (pages[:, None, : held // PAGE] * layer_heads + by_part).flatten()
        self._padded = torch.zeros(b, kv_heads, width, cache.shape[-1], device=device)
        self._out: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k [N, K, D], v [N, K, U] -> [N, H * U] f32."""
        if self._numerics.on_gpu(q):
            return self._on_gpu(self._cache[layer], q, k, v).flatten(1)
        b, kv_heads, g, width = self._shape
        n, columns = b * kv_heads, v.shape[-1]
        keys, *values = self._update(self._cache[layer], k, v)
        values = values[0] if values else keys[..., :columns]
        if self._q is not None:
            queries = self._q.spread(q).view(n, width, -1)
        else:
            self._padded[:, :, :g].copy_(q[:b].unflatten(1, (kv_heads, g)))
            queries = self._padded.view(n, width, -1)
        if self._numerics.block_attention:
            out, _ = attend(queries, keys, values, self._bias, self._scale)
        else:
            split = (
                queries.view(b, kv_heads * g, -1, q.shape[-1]),
                *(x.unflatten(0, (b, kv_heads)) for x in (keys, values)),
            )
            out = F.scaled_dot_product_attention(*split, self._mask, scale=self._scale, enable_gqa=True)
        if self._q is not None:
            return self._q.collect(out.reshape(-1, columns)).view(q.shape[0], -1)
        if self._out is None:
            self._out = out.new_zeros(q.shape[0], kv_heads * g * columns)
        self._out[:b].view(b, kv_heads, g, columns).copy_(out.view(b, kv_heads, -1, columns)[:, :, :g])
        return self._out  # overwritten by the next layer

    def _put(self, held: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new keys (and values) into a layer's pages."""
        width, latent = held.shape[-1], held.shape[1] == k.shape[1]
        new = k[: self._tokens] if latent else torch.cat([k[: self._tokens], v[: self._tokens]], 1)
        held.view(-1, width).index_copy_(0, self._write, new.reshape(-1, width))

    def _on_gpu(self, held: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N, H, U] f32; the kernel reads pages where they are."""
        from headway.kernels import triton_ops

        self._put(held, k, v)
        layer_heads, _, width = held.shape[1:]
        position = torch.arange(self._keys, device=q.device)
        rows = self._pages[:, position // PAGE] * (layer_heads * PAGE) + position % PAGE
        entries = held.view(-1, width)
        values = entries if layer_heads == k.shape[1] else entries[k.shape[1] * PAGE :]
        return triton_ops.attention(
            q, entries, values, rows, self._start, self._lengths, k.shape[1], self._scale, PAGE * width, v.shape[-1]
        )

    def _update(self, held: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Write new keys (and values) into a layer's pages, read what the batch needs: each [b * K, keys, D] f32."""
        b, kv_heads, *_ = self._shape
        width = held.shape[-1]
        self._put(held, k, v)
        read = held.view(-1, PAGE * width).index_select(0, self._read).float()
        return read.view(held.shape[1] // kv_heads, b * kv_heads, -1, width)[:, :, : self._keys].unbind(0)
