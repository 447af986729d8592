"""Mixture of experts: dispatch into expert segments, grouped matmuls, slot-ordered combine.

Shapes: N rows, d hidden width, E experts, k experts a token, f expert width, P padded assignments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.numerics import INVARIANT, ROW_TILE, Numerics, in_blocks, tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Assignments sorted by expert. Padding rows compute on row 0 and are read by nobody."""

    rows: Tensor  # [N, k] i64: where assignment (n, slot) was put
    source: Tensor  # [P] i64: which assignment n * k + slot a place holds, -1 for padding
    token: Tensor  # [P] i64: the row that a place computes on
    ends: Tensor  # [E] i32: where each expert's segment ends


def make_plan(ids: Tensor, experts: int, row_tile: int = 1) -> Plan:
    """Where the assignments ids [N, k] go; segments are padded to a multiple of row_tile. Keeps row order."""
    flat = ids.flatten()
    by_expert = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + row_tile - 1) // row_tile * row_tile
    ends = padded.cumsum(0)
    shift = ends - padded - counts.cumsum(0) + counts
    place = torch.arange(flat.numel(), device=flat.device) + shift[flat[by_expert]]
    source = flat.new_full((int(ends[-1]),), -1).index_copy_(0, place, by_expert)
    rows = torch.empty_like(flat).index_copy_(0, by_expert, place).view(ids.shape)
    return Plan(rows=rows, source=source, token=source.clamp(min=0) // ids.shape[1], ends=ends.to(torch.int32))


def _sum_slots(y: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Rows [N, k] of y times weights [N, k], added in fp32 in slot order: [N, d] in y's dtype."""
    out = y.new_empty(rows.shape[0], y.shape[1])
    for place, weight, to in in_blocks(y.shape[1], rows, weights, out):
        total = y.index_select(0, place[:, 0]).float().mul_(weight[:, :1])
        for slot in range(1, rows.shape[1]):
            total.addcmul_(y.index_select(0, place[:, slot]), weight[:, slot : slot + 1])
        to.copy_(total)
    return out


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,), grad = ctx.saved_tensors, grads[0]
        d_x = grad.new_empty(rows.shape[0], grad.shape[1])
        for place, out in in_blocks(grad.shape[1], rows, d_x):
            torch.index_select(grad, 0, place[:, 0], out=out)
            for slot in range(1, rows.shape[1]):
                out += grad.index_select(0, place[:, slot])
        return d_x, None, None


def dispatch(x: Tensor, plan: Plan) -> Tensor:
    """x [N, d] -> [P, d], each row once for each of its experts."""
    if not torch.is_grad_enabled():
        return x.index_select(0, plan.token)
    return _Dispatch.apply(x, plan.token, plan.rows)  # type: ignore[no-any-return]


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        return F.grouped_mm(x, w.transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        return F.grouped_mm(grad, w, offs=ends), F.grouped_mm(grad.T, x, offs=ends), None


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """x [P, m] times w[e].T [m, n] within the segment of each expert e: [P, n]. w [E, n, m], ends [E] i32."""
    if not torch.is_grad_enabled():
        return F.grouped_mm(x, w.transpose(1, 2), offs=ends)
    return _GroupedMm.apply(x, w, ends)  # type: ignore[no-any-return]


def _swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    out = hidden.new_empty(gate.shape)
    for g, u, to in in_blocks(hidden[0].numel(), gate, up, out):
        torch.ops.aten.silu.out(g, out=to).mul_(u)
    return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return _swiglu(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (hidden,) = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        parts = (*hidden.chunk(2, 1), *d_hidden.chunk(2, 1))
        for grad, gate, up, d_gate, d_up in in_blocks(hidden.shape[1], grads[0], *parts):
            torch.ops.aten.silu.out(gate, out=d_up).mul_(grad)
            torch.mul(grad, up, out=d_gate)
            torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return d_hidden


def swiglu(hidden: Tensor) -> Tensor:
    """hidden [P, 2f] -> silu(first half) * second half, [P, f] (Shazeer 2020)."""
    if not torch.is_grad_enabled():
        return _swiglu(hidden)
    return _SwiGlu.apply(hidden)  # type: ignore[no-any-return]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, rows: Tensor, source: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, rows, source, token)
        return _sum_slots(y, rows, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*combine_backward(grads[0], *ctx.saved_tensors), None, None, None)


def combine_backward(
    grad: Tensor, y: Tensor, weights: Tensor, rows: Tensor, source: Tensor, token: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of y and weights."""
    weight_of_place = weights.flatten()[source.clamp(min=0)].masked_fill_(source < 0, 0.0)
    d_y, products = torch.empty_like(y), y.new_empty(y.shape[0])
    for places, result, weight, product, moved in in_blocks(y.shape[1], token, y, weight_of_place, products, d_y):
        torch.index_select(grad, 0, places, out=moved)
        product.copy_(torch.linalg.vecdot(moved, result))
        moved.mul_(weight[:, None])
    return d_y, products[rows].to(weights.dtype)


def combine(y: Tensor, weights: Tensor, plan: Plan) -> Tensor:
    """Sum of a row's k results y [P, d] times weights [N, k] f32: added in fp32 in slot order, [N, d] in y's dtype."""
    if not torch.is_grad_enabled():
        return _sum_slots(y, plan.rows, weights)
    return _Combine.apply(y, weights, plan.rows, plan.source, plan.token)  # type: ignore[no-any-return]


def moe_forward(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, numerics: Numerics = INVARIANT
) -> Tensor:
    """Weighted sum over each row's k experts: x [N, d] -> [N, d] in x's dtype.

    ids and weights [N, k] as `select` returns them, w13 [E, 2f, d] (gate rows, then up rows), w2 [E, d, f].
    In invariant numerics each expert's segment is padded to a multiple of ROW_TILE rows.
    """
    if numerics.on_gpu(x):
        from headway.kernels import triton_ops

        plan = make_plan(ids, w13.shape[0], triton_ops.BLOCK_M)
        active = swiglu(triton_ops.grouped_mm(dispatch(x, plan), w13, plan.ends))
        return triton_ops.combine(triton_ops.grouped_mm(active, w2, plan.ends), weights, plan)
    if not torch.is_grad_enabled() and numerics.pad_experts and x.shape[0] <= ROW_TILE:
        return _few_rows(x, ids, weights, w13, w2)
    plan = make_plan(ids, w13.shape[0], ROW_TILE if numerics.pad_experts else 1)
    active = swiglu(grouped_mm(dispatch(x, plan), w13, plan.ends))
    return combine(grouped_mm(active, w2, plan.ends), weights, plan)


def _few_rows(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """`moe_forward` of so few rows that each chosen expert computes on all of them, without a plan.

    The bits are the same: a row's product doesn't depend on the rows beside it.
    """
    n, d = x.shape
    rows = tile(n, ROW_TILE)
    padded = x if n == rows else F.pad(x, (0, 0, 0, rows - n))
    chosen = ids.tolist()
    experts = sorted({e for row in chosen for e in row})
    hidden, y = x.new_empty(len(experts), rows, w13.shape[1]), x.new_empty(len(experts), rows, d)
    for e, out in zip(experts, hidden.unbind(0), strict=True):
        torch.mm(padded, w13[e].T, out=out)
    for e, active, out in zip(experts, _swiglu(hidden).unbind(0), y.unbind(0), strict=True):
        torch.mm(active, w2[e].T, out=out)
    at = {e: i * rows for i, e in enumerate(experts)}
    places = torch.tensor([[at[e] + row for e in slots] for row, slots in enumerate(chosen)])
    return _sum_slots(y.view(-1, d), places, weights)
