"""RMS norm, and the query/key norm joined with the rotary embedding, with hand-written backwards.

Written by hand because autograd's versions cost several times the forward on a CPU. Root mean squares are
taken in fp32, rows are independent of each other. RMS norm: Zhang and Sennrich 2019; rotary: Su et al. 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.kernels.numerics import INVARIANT, Numerics, blocks
from headway.kernels.rotary import rotate


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))


def _in_place(out: Tensor) -> Tensor | None:
    """`out`, where fp32 results can be written to it at once."""
    return out if out.dtype == torch.float32 else None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out, scale = torch.empty_like(x), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    for rows in blocks(*x.shape):
        wide = x[rows].float()
        scale[rows] = _inverse_rms(wide, eps)
        normed = torch.mul(wide, scale[rows], out=_in_place(out[rows])).mul_(weight)
        if out.dtype != wide.dtype:
            out[rows] = normed
    return out, scale


def _norm_backward(grad: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Gradient of x * scale, where scale is x's inverse root mean square and grad already has the weight."""
    lost = torch.linalg.vecdot(grad, x)[..., None] * scale.pow(3) / -x.shape[-1]
    return (grad * scale).addcmul_(x, lost)


def rms_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, None]:
    """Gradients of x and weight; scale [N, 1] is x's inverse root mean square."""
    d_x, d_weight = torch.empty_like(x), weight.new_zeros(weight.shape, dtype=torch.float32)
    for rows in blocks(*x.shape):
        g, wide, s = grad[rows].float(), x[rows].float(), scale[rows]
        d_weight += (g * wide).mul_(s).sum(0)
        d_x[rows] = _norm_backward(g * weight, wide, s)
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


def _qk_norm_rotary(qkv: Tensor, weight: Tensor, rotary: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    n, heads, width = qkv.shape[0], *weight.shape
    qk, scale = qkv.new_empty(n, heads, width), qkv.new_empty(n, heads, 1, dtype=torch.float32)
    for rows in blocks(n, heads * width):
        wide = qkv[rows, :heads].float()
        scale[rows] = _inverse_rms(wide, eps)
        normed = torch.mul(wide, scale[rows], out=_in_place(qk[rows])).mul_(weight)
        torch.view_as_complex(normed.unflatten(-1, (-1, 2))).mul_(rotary[rows])
        if qk.dtype != wide.dtype:
            qk[rows] = normed
    return qk, qkv[:, heads:].contiguous(), scale


class _QkNormRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, weight: Tensor, rotary: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        qk, v, scale = _qk_norm_rotary(qkv, weight, rotary, eps)
        ctx.save_for_backward(qkv, weight, rotary, scale)
        return qk, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        qkv, weight, rotary, scale = ctx.saved_tensors
        n, heads, width = qkv.shape[0], *weight.shape
        d_qkv, d_weight = torch.empty_like(qkv), weight.new_zeros(weight.shape, dtype=torch.float32)
        for rows in blocks(n, heads * width):
            wide, s = qkv[rows, :heads].float(), scale[rows]
            turned = torch.view_as_complex(grads[0][rows].float().unflatten(-1, (-1, 2))) * rotary[rows].conj()
            grad = torch.view_as_real(turned).flatten(-2)
            d_weight += (grad * wide).mul_(s).sum(0)
            d_qkv[rows, :heads] = _norm_backward(grad * weight, wide, s)
        d_qkv[:, heads:] = grads[1]
        return d_qkv, d_weight.to(weight.dtype), None, None


def qk_norm_rotary(
    qkv: Tensor, weight: Tensor, rotary: Tensor, eps: float, numerics: Numerics = INVARIANT
) -> tuple[Tensor, Tensor]:
    """Norm and turn the first heads of qkv [N, H + 2K, D]; returns them [N, H + K, D] and the values [N, K, D].

    weight [H + K, D]; rotary [N, 1, D / 2] complex64, pairs adjacent.
    """
    if numerics.on_gpu(qkv):
        from headway.kernels import triton_ops

        heads, width = weight.shape
        flat = qkv[:, :heads].float().reshape(-1, width)
        normed = triton_ops.rms_norm(flat, torch.ones_like(flat[0]), eps).view(-1, heads, width) * weight
        return rotate(normed, rotary).to(qkv.dtype), qkv[:, heads:].contiguous()
    if not torch.is_grad_enabled():
        return _qk_norm_rotary(qkv, weight, rotary, eps)[:2]
    return _QkNormRotary.apply(qkv, weight, rotary, eps)  # type: ignore[no-any-return]
