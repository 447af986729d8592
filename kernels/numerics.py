"""Which order-stability measures a forward takes, and the row gather all of them are built on.

Invariant here means: a token's hidden state, routes and log-probability have the same bits whatever
else is in the batch, however the sequence was cut into chunks, and in whichever cache pages it sits.
On a CPU the BLAS picks another summation order for very few rows (M <= 3 in fp32), and vectorised elementwise loops
treat a ragged tail differently; both vanish when every row count is a multiple of ROW_TILE. On Intel's processors MKL
must be asked as well (`blas.py`), which importing this does. The idea is batch invariance as described by He et al.,
"Defeating Nondeterminism in LLM Inference" (2025). It is a property of the installed BLAS: `selftest.py` checks it at
start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.blas import sum_rows_alike

sum_rows_alike()  # here, so that nothing computes with these kernels without it

ARITHMETIC = "2"
"""Raised by a change that means to give a forward other bits, so that replays of older runs are known as approximate.
1: attention's scale multiplied scores; 2: it multiplies queries."""
ROW_TILE = 8
BLOCK_ELEMENTS = 1 << 17  # 512 KB of floats
LANES = 16  # floats of a vector register, in AVX-512
PAGE = 16  # positions of one page of the KV cache; attention reads whole pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Each measure can be switched off alone, so that a test can show that it is needed."""

    pad_rows: bool = True  # every matmul's row count is a multiple of ROW_TILE
    pad_experts: bool = True  # so is every expert's segment
    block_attention: bool = True  # decoding attends in full sequences' fixed order, not by the library's fused kernel
    triton: bool = False  # compute with the kernels of triton_ops on a CPU too: for tests, in Triton's interpreter

    def on_gpu(self, x: Tensor) -> bool:
        """Whether x is computed on by Triton's kernels: on a GPU always."""
        return self.triton or x.is_cuda

    def rows(self, n: int) -> int:
        return tile(n, ROW_TILE) if self.pad_rows else n


INVARIANT = Numerics()
FAST = Numerics(pad_rows=False, pad_experts=False, block_attention=False)


def tile(n: int, step: int) -> int:
    """The next multiple of step."""
    return -(-n // step) * step


def linear(x: Tensor, w: Tensor, numerics: Numerics = INVARIANT) -> Tensor:
    """x [N, m] times w.T [m, n]: [N, n]. In invariant numerics on a multiple of ROW_TILE rows."""
    if numerics.on_gpu(x):
        from headway.kernels import triton_ops

        return triton_ops.linear(x, w)
    n = x.shape[0]
    rows = numerics.rows(n)
    return x @ w.T if rows == n else (F.pad(x, (0, 0, 0, rows - n)) @ w.T)[:n]


def in_blocks(width: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same rows of each tensor, so few that `width` columns of them fit a core's cache several times.

    What passes over activations more than once does so block by block, and has the same bits.
    """
    rows = max(BLOCK_ELEMENTS // width // ROW_TILE, 1) * ROW_TILE
    return zip(*(t.split(rows) for t in tensors), strict=True)


def batched(x: Tensor, w: Tensor, numerics: Numerics = INVARIANT) -> Tensor:
    """x [H, N, m] times w [H, n, m], each with its own: [H, N, n]."""
    if not numerics.on_gpu(x):
        return torch.bmm(x, w.mT)
    from headway.kernels import triton_ops

    heads, n, m = x.shape
    rows = tile(n, triton_ops.BLOCK_M)
    ends = torch.arange(1, heads + 1, dtype=torch.int32, device=x.device) * rows
    y = triton_ops.grouped_mm(F.pad(x, (0, 0, 0, rows - n)).view(-1, m), w, ends)
    return y.view(heads, rows, -1)[:, :n]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, unread: Tensor) -> Tensor:
        ctx.save_for_backward(inverse, unread)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        inverse, unread = ctx.saved_tensors
        grad = grads[0].contiguous()
        total = grad.index_select(0, inverse[:, 0].contiguous())
        for slot in range(1, inverse.shape[1]):
            total += grad.index_select(0, inverse[:, slot].contiguous())
        return total.index_fill_(0, unread, 0.0), None, None, None


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor, unread: Tensor) -> Tensor:
    """`x[index]` for x [R, d], with a backward made of gathers too (scatter-adds are slow on CPU).

    inverse [R, m] names, for each row of x, the m rows of the result whose gradients it receives;
    rows listed in `unread` receive zero. Rows of the result that no entry names are padding.
    """
    return _GatherRows.apply(x, index, inverse, unread)  # type: ignore[no-any-return]
