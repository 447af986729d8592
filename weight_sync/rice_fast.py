"""`rice` as compiled loops, into and out of a larger buffer. The bytes are the same."""

from __future__ import annotations

import numpy as np

from headway.weight_sync.lanes_llvm import inner, lowest, outer, put_word, word_at
from headway.weight_sync.rice import I64, K_MAX, U8

_ONE = np.uint64(1)


@outer
def pack(values: I64, group: int, out: U8, start: int) -> int:
    """Write a list to `out` from `start` on, and up to eight bytes after it; where it ends."""
    n = len(values)
    n_groups = -(-n // group)
    low_bits, unary_bits = 0, n
    for g in range(n_groups):
        part = values[g * group : (g + 1) * group]
        k, total = 0, 0
        for v in part:
            total += v
        while k < K_MAX and (len(part) << (k + 2)) < total:  # a start below the best: there k + 1 still saves
            k += 1
        while k < K_MAX and _halves(part, k) > len(part):
            k += 1
        out[start + g] = k
        low_bits += k * len(part)
        for v in part:
            unary_bits += v >> k
    low_at = start + n_groups
    unary_at = low_at + (low_bits + 7) // 8
    end = unary_at + (unary_bits + 7) // 8
    held, filled = np.uint64(0), 0
    for g in range(n_groups):
        k = np.int64(out[start + g])
        mask = (1 << k) - 1
        for v in values[g * group : (g + 1) * group]:
            held |= np.uint64(v & mask) << np.uint64(filled)
            filled += k
            put_word(out, low_at, held)  # beyond what is filled lies only what is written later
            low_at += filled >> 3
            held >>= np.uint64(filled & ~7)
            filled &= 7
    held, bit = np.uint64(0), -1
    for g in range(n_groups):
        k = np.int64(out[start + g])
        for v in values[g * group : (g + 1) * group]:
            bit += (v >> k) + 1
            while bit >= 64:
                put_word(out, unary_at, held)
                held, unary_at, bit = np.uint64(0), unary_at + 8, bit - 64
            held |= _ONE << np.uint64(bit)
    if n > 0:
        put_word(out, unary_at, held)
    return end


@inner
def _halves(values: I64, k: int) -> int:
    """How many bits of unary k + 1 saves over k."""
    saved = 0
    for v in values:
        saved += ((v >> k) + 1) >> 1
    return saved


@outer
def unpack(raw: U8, start: int, stop: int, n: int, group: int) -> tuple[bool, I64]:
    """The list in `raw[start:stop]`, which eight more bytes follow."""
    n_groups = -(-n // group)
    values = np.empty(n, np.int64)
    if n == 0 or stop - start < n_groups:
        return n == 0 and start == stop, values
    low_bits = 0
    for g in range(n_groups):
        if raw[start + g] > K_MAX:
            return False, values
        low_bits += min(group, n - g * group) * np.int64(raw[start + g])
    low, end = (start + n_groups) * 8, stop * 8
    unary = low + (low_bits + 7) // 8 * 8
    word, left = np.uint64(0), 0  # of the unary part: the bits from `unary` on, so many
    for g in range(n_groups):
        k = np.int64(raw[start + g])
        mask = (_ONE << np.uint64(k)) - _ONE
        for i in range(g * group, min((g + 1) * group, n)):
            high = 0
            while word == 0:
                high, unary = high + left, unary + left
                if unary >= end:
                    return False, values
                word, left = word_at(raw, unary >> 3), 64
            zeros = lowest(word)
            word = word >> np.uint64(zeros) >> _ONE
            high, unary, left = high + zeros, unary + zeros + 1, left - zeros - 1
            low_word = word_at(raw, low >> 3) >> np.uint64(low & 7)
            low += k
            values[i] = high << k | np.int64(low_word & mask)
    rest = word_at(raw, unary >> 3) >> np.uint64(unary & 7) if unary < end else np.uint64(0)
    return end - 8 < unary <= end and rest << np.uint64(max(64 - (end - unary), 0) & 63) == 0, values
