"""The ops as Triton kernels: what the decoder computes with on a GPU. Not verified on a GPU yet.

A row's result depends on that row alone: tiles have one fixed size whatever the batch, every sum runs over its tiles
from first to last in fp32 within one program (no split-K, no atomics), and nothing is tuned by batch size. Row blocks
are BLOCK_M = 32, so `make_plan` pads expert segments to that. Backwards are kernels too where they are products, and
torch's own row-wise formulas elsewhere. Under TRITON_INTERPRET=1 the kernels run on a CPU, which proves the
indexing and not a GPU's rounding; bf16 products are wrong there, so tests use fp32.

Shapes: N rows, d width, E experts, P padded assignments, V vocabulary, H / K query and key heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels import logprob, moe, norms

BLOCK_M, BLOCK_N, BLOCK_K = 32, 64, 32
QUERIES, KEYS = 16, 32  # attention's tile


@triton.jit
def _grouped_kernel(
    x, w, out, ends, rows, width, inner, experts, stride_we, stride_wn, stride_wk,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    at_m, at_n = tl.program_id(0) * BM, tl.program_id(1) * BN
    expert = 0
    for e in range(experts):  # segments are whole row blocks
        expert += (tl.load(ends + e) <= at_m).to(tl.int32)
    expert = tl.minimum(expert, experts - 1)
    m, n = at_m + tl.arange(0, BM), at_n + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for at_k in range(0, inner, BK):
        k = at_k + tl.arange(0, BK)
        left = tl.load(x + m[:, None] * inner + k, mask=(m[:, None] < rows) & (k < inner), other=0.0)
        place = w + expert * stride_we + n * stride_wn + k[:, None] * stride_wk
        right = tl.load(place, mask=(n < width) & (k[:, None] < inner), other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    tl.store(out + m[:, None] * width + n, total.to(out.dtype.element_ty), mask=(m[:, None] < rows) & (n < width))


@triton.jit
def _grouped_weight_kernel(
    grad, x, out, ends, width, inner, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    expert, at_n, at_k = tl.program_id(0), tl.program_id(1) * BN, tl.program_id(2) * BK
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    n, k = at_n + tl.arange(0, BN), at_k + tl.arange(0, BK)
    total = tl.zeros((BN, BK), tl.float32)
    for at_m in range(start, stop, BM):
        m = at_m + tl.arange(0, BM)
        left = tl.load(grad + m * width + n[:, None], mask=(m < stop) & (n[:, None] < width), other=0.0)
        right = tl.load(x + m[:, None] * inner + k, mask=(m[:, None] < stop) & (k < inner), other=0.0)
        total += tl.dot(left, right, input_precision="ieee")
    place = out + expert * width * inner + n[:, None] * inner + k
    tl.store(place, total.to(out.dtype.element_ty), mask=(n[:, None] < width) & (k < inner))


def _multiply(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """x [P, m] times w[e].T of w [E, n, m], or w[e] of w [E, m, n] when transposed."""
    width = w.shape[2] if transposed else w.shape[1]
    out = x.new_empty(x.shape[0], width)
    n, k = (w.stride(2), w.stride(1)) if transposed else (w.stride(1), w.stride(2))
    grid = (triton.cdiv(x.shape[0], BLOCK_M), triton.cdiv(width, BLOCK_N))
    _grouped_kernel[grid](
        x.contiguous(), w, out, ends, x.shape[0], width, x.shape[1], w.shape[0], w.stride(0), n, k,
        BM=BLOCK_M, BN=BLOCK_N, BK=BLOCK_K,
    )  # fmt: skip
    return out


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        return _multiply(x, w, ends, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, ends = ctx.saved_tensors
        grad, d_w = grads[0].contiguous(), torch.empty_like(w, memory_format=torch.contiguous_format)
        grid = (w.shape[0], triton.cdiv(w.shape[1], BLOCK_N), triton.cdiv(w.shape[2], BLOCK_K))
        _grouped_weight_kernel[grid](
            grad, x.contiguous(), d_w, ends, w.shape[1], w.shape[2], BM=BLOCK_M, BN=BLOCK_N, BK=BLOCK_K
        )
        return _multiply(grad, w, ends, True), d_w, None


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """`moe.grouped_mm` for segments of whole row blocks (only the last may end early)."""
    return _GroupedMm.apply(x, w, ends)  # type: ignore[no-any-return]


def linear(x: Tensor, w: Tensor) -> Tensor:
    """`numerics.linear`: x [N, m] times w.T [m, n]."""
    ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    return grouped_mm(x, w[None], ends)


@triton.jit
def _combine_kernel(y, weights, rows, out, width, K: tl.constexpr, BN: tl.constexpr):
    row, n = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for slot in range(K):
        place = tl.load(rows + row * K + slot)
        part = tl.load(y + place * width + n, mask=n < width, other=0.0).to(tl.float32)
        total += part * tl.load(weights + row * K + slot)
    tl.store(out + row * width + n, total.to(out.dtype.element_ty), mask=n < width)


def sum_slots(y: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """The forward of `combine`: rows [N, k] of y [P, d] times weights [N, k], in slot order, [N, d]."""
    n, k = rows.shape
    out, block = y.new_empty(n, y.shape[1]), 256
    _combine_kernel[(n, triton.cdiv(y.shape[1], block))](
        y, weights.contiguous(), rows.contiguous(), out, y.shape[1], K=k, BN=block
    )
    return out


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, rows: Tensor, source: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, rows, source, token)
        return sum_slots(y, rows, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*moe.combine_backward(grads[0], *ctx.saved_tensors), None, None, None)


def combine(y: Tensor, weights: Tensor, plan: moe.Plan) -> Tensor:
    """`moe.combine`."""
    return _Combine.apply(y, weights, plan.rows, plan.source, plan.token)  # type: ignore[no-any-return]


@triton.jit
def _rms_kernel(x, weight, out, scale, width, eps, BN: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BN,), tl.float32)
    for at in range(0, width, BN):
        n = at + tl.arange(0, BN)
        part = tl.load(x + row * width + n, mask=n < width, other=0.0).to(tl.float32)
        total += part * part
    inverse = tl.rsqrt(tl.sum(total) / width + eps)
    tl.store(scale + row, inverse)
    for at in range(0, width, BN):
        n = at + tl.arange(0, BN)
        part = tl.load(x + row * width + n, mask=n < width, other=0.0).to(tl.float32)
        part = part * inverse * tl.load(weight + n, mask=n < width, other=0.0).to(tl.float32)
        tl.store(out + row * width + n, part.to(out.dtype.element_ty), mask=n < width)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=torch.float32)
        _rms_kernel[(x.shape[0],)](x, weight, out, scale, x.shape[1], eps, BN=256)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return norms.rms_backward(grads[0], *ctx.saved_tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`norms.rms_norm`: x [N, d], weight [d]."""
    return _RmsNorm.apply(x.contiguous(), weight, eps)  # type: ignore[no-any-return]


@triton.jit
def _logprob_kernel(
    hidden, head, targets, heat, chosen, entropy, rows, vocabulary, inner,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    real = m < rows
    target = tl.load(targets + m, mask=real, other=0)
    temperature = tl.load(heat + m, mask=real, other=1.0)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)  # of exp(score - top)
    moment = tl.zeros((BM,), tl.float32)  # of exp(score - top) * score
    hit = tl.zeros((BM,), tl.float32)
    for at_n in range(0, vocabulary, BN):
        n = at_n + tl.arange(0, BN)
        scores = tl.zeros((BM, BN), tl.float32)
        for at_k in range(0, inner, BK):
            k = at_k + tl.arange(0, BK)
            left = tl.load(hidden + m[:, None] * inner + k, mask=real[:, None] & (k < inner), other=0.0)
            right = tl.load(head + n * inner + k[:, None], mask=(n < vocabulary) & (k[:, None] < inner), other=0.0)
            scores += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
        scores = tl.where(n < vocabulary, scores / temperature[:, None], float("-inf"))
        hit += tl.sum(tl.where(n == target[:, None], scores, 0.0), 1)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        moment = moment * shrink + tl.sum(weights * tl.where(n < vocabulary, scores, 0.0), 1)
        top = higher
    norm = top + tl.log(total)
    tl.store(chosen + m, hit - norm, mask=real)
    tl.store(entropy + m, norm - moment / total, mask=real)


def token_logprob_forward(hidden: Tensor, head: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of `logprob.token_logprob`: hidden [N, d], head [V, d], targets [N], heat [N, 1]. Holds no scores."""
    n = hidden.shape[0]
    chosen, entropy = heat.new_empty(n), heat.new_empty(n)
    _logprob_kernel[(triton.cdiv(n, BLOCK_M),)](
        hidden.contiguous(), head.contiguous(), targets, heat.contiguous(), chosen, entropy, n, *head.shape,
        BM=BLOCK_M, BN=BLOCK_N, BK=BLOCK_K,
    )  # fmt: skip
    return chosen, entropy


@triton.jit
def _attention_kernel(
    q, k, v, out, kv_rows, q_start, q_length, first_key, keys, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, U: tl.constexpr, stride_k, stride_v, head_k, head_v,
    BQ: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    sequence, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, begin = tl.load(q_length + sequence), tl.load(q_start + sequence)
    start = tl.load(first_key + sequence)  # keys before the first query
    at = tile * BQ + tl.arange(0, BQ)
    d, u = tl.arange(0, BD), tl.arange(0, BU)
    place = ((begin + at)[:, None] * H + head) * D + d
    queries = tl.load(q + place, mask=(at[:, None] < length) & (d < D), other=0.0).to(tl.float32)
    top = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, BU), tl.float32)
    last = tl.minimum(start + tile * BQ + BQ, start + length)
    for at_s in range(0, last, BS):
        s = at_s + tl.arange(0, BS)
        row = tl.load(kv_rows + sequence * keys + s, mask=s < last, other=0)
        key = tl.load(
            k + row * stride_k + (head // G) * head_k + d[:, None], mask=(s < last) & (d[:, None] < D), other=0.0
        )
        scores = tl.dot(queries, key.to(tl.float32), input_precision="ieee") * scale
        scores = tl.where(s <= (start + at)[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        value = tl.load(
            v + row[:, None] * stride_v + (head // G) * head_v + u, mask=(s[:, None] < last) & (u < U), other=0.0
        )
        acc = acc * shrink[:, None] + tl.dot(weights, value.to(tl.float32), input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    acc = acc / total[:, None]
    tl.store(out + ((begin + at)[:, None] * H + head) * U + u, acc, mask=(at[:, None] < length) & (u < U))


def attention(
    q: Tensor, k: Tensor, v: Tensor, kv_rows: Tensor, starts: Tensor, lengths: Tensor, kv_heads: int, scale: float,
    apart: int = 0, u: int = 0,
) -> Tensor:  # fmt: skip
    """Causal attention of packed queries [N, H, D] over keys and values that lie anywhere: [N, H, U] f32.

    k [R, K * D] and v [R, K * U] rows, or (a paged cache) rows of one head, whose others lie `apart` elements further
    on each, with `u` columns a value; kv_rows [b, S] i64: where position s of a sequence is. starts [b]: keys before
    its first query; lengths [b]: its queries. Decoding, chunks and whole sequences are the same program: a query sums
    its key blocks from the first on.
    """
    n, h, d = q.shape
    u = u or v.shape[1] // kv_heads
    out = torch.zeros(n, h, u, dtype=torch.float32, device=q.device)
    b, keys = kv_rows.shape
    grid = (b, h, triton.cdiv(int(lengths.max()), QUERIES))
    _attention_kernel[grid](
        q.contiguous(), k, v, out, kv_rows, lengths.cumsum(0) - lengths, lengths, starts, keys, scale,
        H=h, G=h // kv_heads, D=d, U=u, stride_k=k.stride(0), stride_v=v.stride(0),
        head_k=apart or d, head_v=apart or u,
        BQ=QUERIES, BS=KEYS, BD=max(16, triton.next_power_of_2(d)), BU=max(16, triton.next_power_of_2(u)),
    )  # fmt: skip
    return out


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
        chosen, entropy = token_logprob_forward(hidden, head, targets, heat)
        ctx.save_for_backward(hidden, head, targets, heat, entropy, None)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = logprob.backward(ctx.saved_tensors, grads, ctx.needs_input_grad[1])
        return d_hidden, d_head, None, None


def token_logprob(hidden: Tensor, head: Tensor, targets: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """`logprob.token_logprob` with heat [N, 1]."""
    return _TokenLogprob.apply(hidden, head, targets, heat)  # type: ignore[no-any-return]
