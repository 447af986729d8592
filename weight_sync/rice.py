"""Lists of non-negative integers as Rice codes, a parameter for each group, without a loop over elements.

A value v of a group with parameter k is k low bits and v >> k in unary (Rice & Plaunt 1971; near-optimal for
geometric gaps). Low bits and unary parts lie apart, so that both can be written and read as whole arrays.
Layout: docs/FORMAT.md, "Lists".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

K_MAX = 31


def pack(values: I64, group: int) -> bytes:
    """`values` (int64 [n], in 0 ... 2^31 - 1), a parameter for every `group` of them."""
    if len(values) == 0:
        return b""
    parameters = _parameters(values, group)
    k = np.repeat(parameters, group)[: len(values)].astype(np.int64)
    low_starts = np.cumsum(k) - k
    low = np.zeros(int(low_starts[-1] + k[-1]), np.uint8)
    for bit in range(int(parameters.max())):
        has = k > bit
        low[low_starts[has] + bit] = values[has] >> bit & 1
    stops = np.cumsum((values >> k) + 1) - 1
    unary = np.zeros(int(stops[-1]) + 1, np.uint8)
    unary[stops] = 1
    packed = [np.packbits(bits, bitorder="little").tobytes() for bits in (low, unary)]
    return parameters.tobytes() + b"".join(packed)


def unpack(data: bytes, n: int, group: int) -> I64 | None:
    """The `n` values (int64, below 2^60 in sum) of a list, or None when `data` is no such list."""
    raw = np.frombuffer(data, np.uint8)
    n_groups = -(-n // group)
    if n == 0 or len(raw) < n_groups or raw[:n_groups].max() > K_MAX:
        return np.empty(0, np.int64) if n == 0 and len(raw) == 0 else None
    k = np.repeat(raw[:n_groups], group)[:n].astype(np.int64)
    low_starts = np.cumsum(k) - k
    unary_start = n_groups + -(-int(low_starts[-1] + k[-1]) // 8)
    unary = raw[unary_start:]
    if len(unary) == 0 or unary[-1] == 0 or int(np.bitwise_count(unary).sum()) != n:
        return None
    values = np.diff(np.flatnonzero(np.unpackbits(unary, bitorder="little")), prepend=-1) - 1 << k
    low = np.unpackbits(raw[n_groups:unary_start], bitorder="little")
    for bit in range(int(k.max())):
        has = k > bit
        values[has] |= low[low_starts[has] + bit].astype(np.int64) << bit
    return values


def _parameters(values: I64, group: int) -> U8:
    """uint8 [groups]: the smallest k with the fewest bits, which is the first where k + 1 would save nothing."""
    starts = np.arange(0, len(values), group)
    sizes = np.minimum(group, len(values) - starts)
    parameters = np.zeros(len(starts), np.uint8)
    growing = np.ones(len(starts), bool)
    for k in range(K_MAX):
        growing &= np.add.reduceat((values >> k) + 1 >> 1, starts) > sizes
        if not growing.any():
            break
        parameters[growing] = k + 1
    return parameters
