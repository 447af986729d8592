"""Few changed elements of a chunk: where they are, by how much they moved. Layout: docs/FORMAT.md, "Sparse chunks".

A step moves a weight by about the same amount whatever its size, so a bf16 rounding changes the more often
the smaller the weight: each halving doubles the rate. Both sides know the parent's exponents, so gaps
between changes are counted among the elements of one class of exponents alone: the classes are nearly geometric
sources, which Rice codes fit within a few per cent. Most differences are one unit in the last place; they cost
a sign bit and no more, the larger ones are a list of their own. The idea of gaps and small ulp codes is
public (PULSE, ARC).

`sparse_fast` does the same in compiled loops, with the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.weight_sync import rice
from headway.weight_sync.rice import I32, I64, U8

Lanes = NDArray[Any]
"""A chunk seen as unsigned little-endian integers of the element width."""
Words = NDArray[np.uint64]

HEAD = struct.Struct("<IIIIBBH")
"""changed, larger than one, bytes of gaps, bytes of large gaps, top key, classes, bytes of counts."""
CHANGED_TENTHS_MAX = 3
"""Of ten elements. Beyond, a code for each is smaller (measured on steps of bf16 weights)."""
CLASSES_MAX = 8
CLASS_KEYS = 2
"""Exponents a class; one alone would save 1% more and cost twice the time."""
CLASSES_FROM_ELEMENTS = 4096
TOP_TENTHS = 9
"""Of ten elements, so many have a key up to the top one: rarer, larger weights hardly change."""
TABLE_BITS = 128
"""About what the counts of the classes take."""
GAPS_GROUP = 256
LARGE_GROUP = 64


def changes_max(n: int) -> int:
    """How many of `n` elements a sparse chunk may change."""
    return n * CHANGED_TENTHS_MAX // 10


def keys(lanes: Lanes) -> U8:
    """The eight bits below the sign (the exponent of bf16 and fp32); of one-byte floats the four bits."""
    bits = 8 * lanes.itemsize
    return ((lanes << 1) >> max(bits - 8, 4)).astype(np.uint8)


def classes_of(lanes: Lanes, top: int, classes: int) -> U8:
    """0 for keys above `top` - 2, then a class for every two keys below, the last one for all the rest."""
    return np.clip((top - keys(lanes).astype(np.int16)) // CLASS_KEYS, 0, classes - 1).astype(np.uint8)


def encode(old: Lanes, new: Lanes) -> tuple[bool, bytes] | None:
    """(whether by exponent, payload) of the smaller of both kinds; b"" for no change, None for too many."""
    differ = old != new
    if np.count_nonzero(differ) > changes_max(len(old)):
        return None
    positions = np.flatnonzero(differ)
    if len(positions) == 0:
        return False, b""
    top, classes = _top(old)
    sizes, counts, gaps, diffs = _find(old, new, positions, top, classes)
    if classes > 1 and _bits(sizes, counts) + TABLE_BITS >= _bits(sizes.sum(keepdims=True), counts.sum(keepdims=True)):
        top, classes = 0, 1
        sizes, counts, gaps, diffs = _find(old, new, positions, top, classes)
    magnitudes = np.abs(diffs)
    large = np.flatnonzero(magnitudes > 1)
    table = rice.pack(counts, CLASSES_MAX) if classes > 1 else b""
    parts = [
        rice.pack(gaps, GAPS_GROUP),
        np.packbits(diffs < 0, bitorder="little").tobytes(),
        rice.pack(np.diff(large, prepend=-1) - 1, GAPS_GROUP),
        rice.pack(magnitudes[large] - 2, LARGE_GROUP),
    ]
    head = HEAD.pack(len(gaps), len(large), len(parts[0]), len(parts[2]), top, classes, len(table))
    return classes > 1, b"".join([head, table, *parts])


def changes(data: bytes, base: Lanes, by_exponent: bool) -> tuple[I32, Lanes] | None:
    """(positions of the changed elements, their new values) of a payload, or None when it is none.

    Positions are int32 [changed], each once, in no order.
    """
    n, bits = len(base), 8 * base.itemsize
    if len(data) < HEAD.size:
        return None
    n_changed, n_large, gaps_size, large_size, top, classes, table_size = HEAD.unpack_from(data)
    if not (0 < n_changed <= changes_max(n) and n_large <= n_changed):
        return None
    if not (2 <= classes <= CLASSES_MAX if by_exponent else (top, classes, table_size) == (0, 1, 0)):
        return None
    parts, start = [], HEAD.size
    for size in (table_size, gaps_size, -(-n_changed // 8), large_size):
        parts.append(data[start : start + size])
        start += size
    if start > len(data):
        return None
    counts = rice.unpack(parts[0], classes, CLASSES_MAX) if by_exponent else np.array([n_changed])
    gaps = rice.unpack(parts[1], n_changed, GAPS_GROUP)
    large_gaps = rice.unpack(parts[3], n_large, GAPS_GROUP)
    larger = rice.unpack(data[start:], n_large, LARGE_GROUP)
    if counts is None or gaps is None or large_gaps is None or larger is None:
        return None
    if counts.max() > n_changed or int(counts.sum()) != n_changed or int(gaps.max()) >= n:
        return None
    diffs = np.ones(n_changed, np.int64)
    if n_large:
        large = np.cumsum(large_gaps + 1) - 1
        if int(large[-1]) >= n_changed or int(larger.max()) > (1 << bits - 1) - 2:
            return None
        diffs[large] = larger + 2
    signs = np.unpackbits(np.frombuffer(parts[2], np.uint8), count=n_changed, bitorder="little")
    diffs[signs.view(bool)] *= -1
    where = _locate(base, top, counts, gaps)
    return None if where is None else (where, base[where] + diffs.astype(base.dtype))


def apply(data: bytes, lanes: Lanes, by_exponent: bool) -> bool:
    """Make the changes of a payload in `lanes`; false when it is none, and `lanes` are then undefined."""
    found = changes(data, lanes, by_exponent)
    if found is not None:
        scatter(lanes, *found)
    return found is not None


def scatter(out: Lanes, positions: I32, values: Lanes) -> None:
    """Write `values` where `positions` say."""
    out[positions] = values


def _find(old: Lanes, new: Lanes, positions: I64, top: int, classes: int) -> tuple[I64, I64, I64, I64]:
    """(elements of each class, changed ones of each, gaps, signed differences), the last two class by class."""
    diffs = (new[positions] - old[positions]).view(f"<i{old.itemsize}").astype(np.int64)
    if classes == 1:
        return np.array([len(old)]), np.array([len(positions)]), np.diff(positions, prepend=-1) - 1, diffs
    member = classes_of(old[positions], top, classes)
    word, bit = positions >> 6, (positions & 63).astype(np.uint64)
    ranks, sizes = np.empty_like(positions), []
    for c, words in enumerate(_members(old, top, classes)):
        upto, mine = np.cumsum(np.bitwise_count(words), dtype=np.int32), np.flatnonzero(member == c)
        sizes.append(int(upto[-1]))
        at = word[mine]
        ranks[mine] = upto[at] - np.bitwise_count(words[at] >> bit[mine])
    order, counts = np.argsort(member, kind="stable"), np.bincount(member, minlength=classes)
    ranks = ranks[order]
    gaps, has = np.diff(ranks, prepend=-1) - 1, counts > 0
    firsts = (np.cumsum(counts) - counts)[has]
    gaps[firsts] = ranks[firsts]
    return np.array(sizes), counts, gaps, diffs[order]


def _locate(base: Lanes, top: int, counts: I64, gaps: I64) -> I32 | None:
    """Positions of the changes that `gaps` give class by class; None when one lies beyond its class."""
    ends, ranks = np.cumsum(counts), np.cumsum(gaps + 1)
    ranks -= np.repeat(np.append(0, ranks)[ends - counts], counts) + 1
    if len(counts) == 1:
        return ranks.astype(np.int32) if ranks[-1] < len(base) else None
    where = np.empty(len(gaps), np.int32)
    for words, start, end in zip(_members(base, top, len(counts)), ends - counts, ends, strict=True):
        ones = np.bitwise_count(words)
        upto = np.cumsum(ones, dtype=np.int64)
        if start < end:
            if ranks[end - 1] >= upto[-1]:
                return None
            at = np.searchsorted(upto, ranks[start:end], side="right")
            where[start:end] = 64 * at + _select(words[at], ranks[start:end] - (upto[at] - ones[at]))
    return where


def _members(lanes: Lanes, top: int, classes: int) -> Iterator[Words]:
    """For each class the elements that are of it, 64 a word, the first in the lowest bit."""
    bits, held = 8 * lanes.itemsize, np.zeros((-(-len(lanes) // 64), 8), np.uint8)
    magnitudes, size, reach = lanes & ((1 << bits - 1) - 1), -(-len(lanes) // 8), np.empty(len(lanes), bool)
    before = np.zeros(len(held), np.uint64)
    for c in range(classes):
        floor = 0 if c == classes - 1 else (top - CLASS_KEYS * (c + 1) + 1) << max(bits - 8, 4) - 1
        np.greater_equal(magnitudes, min(max(floor, 0), (1 << bits) - 1), out=reach)
        held.reshape(-1)[:size] = np.packbits(reach, bitorder="little")
        words = held.view("<u8").reshape(-1).copy()
        yield words & ~before
        before = words


def _select(words: Words, ranks: I64) -> I64:
    """The number of the set bit below which `ranks` bits are set, by halves."""
    found = np.zeros_like(ranks)
    for width in (32, 16, 8, 4, 2, 1):
        below = np.bitwise_count(words & np.uint64((1 << width) - 1))
        beyond = ranks >= below
        ranks = ranks - np.where(beyond, below, 0)
        found += width * beyond
        words = np.where(beyond, words >> np.uint64(width), words)
    return found


def _top(old: Lanes) -> tuple[int, int]:
    """(top key, classes) that suit the parent's values: by a sample of about 4,096, at an odd distance."""
    if len(old) < CLASSES_FROM_ELEMENTS:
        return 0, 1
    sample = np.sort(keys(old[:: len(old) // 4096 | 1]), kind="stable")
    top = int(sample[len(sample) * TOP_TENTHS // 10])
    classes = min(CLASSES_MAX, top // CLASS_KEYS + 1)
    return (top, classes) if classes > 1 else (0, 1)


def _bits(sizes: I64, counts: I64) -> int:
    """About what gaps in classes of these sizes take: Rice codes with the parameter that the mean gap suggests."""
    pairs = [
        (m, n, max((n // m).bit_length() - 1, 0)) for n, m in zip(sizes.tolist(), counts.tolist(), strict=True) if m
    ]
    return sum(m * (k + 1) + (n >> k) for m, n, k in pairs)
