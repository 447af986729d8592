"""RMS norm, and the query/key norm joined with the rotary embedding, with hand-written backwards.

Written by hand because autograd's versions cost several times the forward on a CPU. Root mean squares are
taken in fp32, rows are independent of each other. RMS norm: Zhang and Sennrich 2019; rotary: Su et al. 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.kernels.numerics import INVARIANT, Numerics, in_blocks
from headway.kernels.rotary import rotate


def _inverse_rms(x: Tensor, eps: float, out: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps), out=out)


def _wide(out: Tensor) -> Tensor:
    """Where fp32 results that belong in `out` are computed: there, or beside it."""
    return out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, scale = torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    for narrow, s, to in in_blocks(x.shape[1], x, scale, out):
        wide, normed = narrow.float(), _wide(to)
        torch.mul(wide, _inverse_rms(wide, eps, s), out=normed).mul_(weight)
        if normed is not to:
            to.copy_(normed)
    return out, scale


def _norm_backward(grad: Tensor, weight: Tensor, x: Tensor, scale: Tensor, d_weight: Tensor, out: Tensor) -> None:
    """Gradients of x * scale * weight, where scale is x's inverse root mean square: x's to `out`, weight's added."""
    spare, d_x = grad * x, _wide(out)
    d_weight += spare.mul_(scale).sum(0)
    torch.mul(grad, weight, out=d_x)
    lost = torch.mul(d_x, x, out=spare).sum(-1, keepdim=True) * scale.pow(3) / -x.shape[-1]
    d_x.mul_(scale).addcmul_(x, lost)
    if d_x is not out:
        out.copy_(d_x)


def rms_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, None]:
    """Gradients of x and weight; scale [N, 1] is x's inverse root mean square."""
    d_x, d_weight = torch.empty_like(x), weight.new_zeros(weight.shape, dtype=torch.float32)
    for g, narrow, s, out in in_blocks(x.shape[1], grad, x, scale, d_x):
        _norm_backward(g.float(), weight, narrow.float(), s, d_weight, out)
    return d_x, d_weight.to(weight.dtype), None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return rms_backward(grads[0], *ctx.saved_tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float, numerics: Numerics = INVARIANT) -> Tensor:
    """x [N, d] scaled to unit root mean square, times weight [d]; in x's dtype."""
    if numerics.on_gpu(x):
        from headway.kernels import triton_ops

        return triton_ops.rms_norm(x, weight, eps)
    if not torch.is_grad_enabled():
        return _rms_norm(x, weight, eps)[0]
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def _qk_norm_rotary(qkv: Tensor, weight: Tensor, rotary: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, heads, width = qkv.shape[0], *weight.shape
    qk, scale = qkv.new_empty(n, heads, width), qkv.new_empty(n, heads, 1, dtype=torch.float32)
    for narrow, s, turn, to in in_blocks(heads * width, qkv[:, :heads], scale, rotary, qk):
        wide, normed = narrow.float(), _wide(to)
        torch.mul(wide, _inverse_rms(wide, eps, s), out=normed).mul_(weight)
        torch.view_as_complex(normed.unflatten(-1, (-1, 2))).mul_(turn)
        if normed is not to:
            to.copy_(normed)
    values = qkv[:, heads:].contiguous()
    return qk[:, : -values.shape[1]], qk[:, -values.shape[1] :], values, scale


class _QkNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, weight: Tensor, rotary: Tensor, eps: float) -> tuple[Tensor, ...]:
        *found, scale = _qk_norm_rotary(qkv, weight, rotary, eps)
        ctx.save_for_backward(qkv, weight, rotary, scale)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        qkv, weight, rotary, scale = ctx.saved_tensors
        heads, width = weight.shape
        d_qkv, d_weight = torch.empty_like(qkv), weight.new_zeros(weight.shape, dtype=torch.float32)
        parts = (*grads[:2], qkv[:, :heads], scale, rotary.conj().resolve_conj(), d_qkv[:, :heads])
        for d_q, d_k, narrow, s, back, out in in_blocks(heads * width, *parts):
            grad = torch.cat([d_q, d_k], 1).float()
            torch.view_as_complex(grad.unflatten(-1, (-1, 2))).mul_(back)
            _norm_backward(grad, weight, narrow.float(), s, d_weight, out)
        d_qkv[:, heads:] = grads[2]
        return d_qkv, d_weight.to(weight.dtype), None, None


def qk_norm_rotary(
    qkv: Tensor, weight: Tensor, rotary: Tensor, eps: float, numerics: Numerics = INVARIANT
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and turn the first heads of qkv [N, H + 2K, D]: queries [N, H, D], keys [N, K, D] and values [N, K, D].

    weight [H + K, D]; rotary [N, 1, D / 2] complex64, pairs adjacent.
    """
    if numerics.on_gpu(qkv):
        from headway.kernels import triton_ops

        heads, width = weight.shape
        flat = qkv[:, :heads].float().reshape(-1, width)
        normed = triton_ops.rms_norm(flat, torch.ones_like(flat[0]), eps).view(-1, heads, width) * weight
        values = qkv[:, heads:].contiguous()
        turned = rotate(normed, rotary).to(qkv.dtype)
        return *turned.split([heads - values.shape[1], values.shape[1]], 1), values
    if not torch.is_grad_enabled():
        return _qk_norm_rotary(qkv, weight, rotary, eps)[:3]
    return _QkNormRotary.apply(qkv, weight, rotary, eps)  # type: ignore[no-any-return]
