"""`sparse.encode` and `sparse.changes` as compiled loops (numba), without the GIL. The bytes are the same.

Elements are looked at 64 at a time (`lanes_llvm`): which differ is a mask, how many are of a class a
population count. Compiled at the first call of each element width and kept on disk by numba.
"""

from __future__ import annotations

import threading

import numpy as np

from headway.weight_sync.lanes_llvm import (
    BLOCK,
    SPAN,
    WORDS,
    count_reach,
    differ,
    inner,
    lowest,
    members,
    note_reach,
    ones,
    outer,
    prefetch,
    word_at,
)
from headway.weight_sync.rice import I32, I64, U8
from headway.weight_sync.rice_fast import pack, unpack
from headway.weight_sync.sparse import (
    CLASS_KEYS,
    CLASSES_FROM_ELEMENTS,
    CLASSES_MAX,
    GAPS_GROUP,
    HEAD,
    LARGE_GROUP,
    TABLE_BITS,
    TOP_TENTHS,
    Lanes,
    changes_max,
)

HEAD_SIZE = HEAD.size
AHEAD = 2048
"""How many elements ahead memory is asked for: hardware stops at each page."""
OUT_BYTES_EACH = 20
"""A change takes at most a sign and three numbers of 34 bits, and a parameter of its own for each."""

NEVER = np.int32(1 << 30)
"""More than a chunk has elements."""

_THREAD = threading.local()
"""Each thread keeps room for notes of changes and for a payload: fresh pages for every chunk cost a quarter."""
_NONE = np.empty(0, np.int64)
_ONE = np.uint64(1)
_PAIRS, _QUADS, _NIBBLES = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_BYTES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_SELECT = np.array([[*(i for i in range(8) if byte >> i & 1), *[0] * 8][:8] for byte in range(256)], np.uint8)
"""[byte, rank] -> the number of that set bit."""


@inner
def _floors(lanes: Lanes, top: int, classes: int) -> Lanes:
    """The least magnitude of each class (lanes [9], above all at 0); 0 for the last one and those that don't exist."""
    floors = np.zeros(CLASSES_MAX + 1, lanes.dtype)
    most, shift = (1 << (8 * lanes.itemsize - 1)) - 1, _shift(lanes)
    floors[0] = most + 1
    for c in range(classes - 1):
        floors[c + 1] = min(max((top - CLASS_KEYS * (c + 1) + 1) << shift, 0), most + 1)
    return floors


@inner
def _shift(lanes: Lanes) -> int:
    """By how much a magnitude is shifted to give its key."""
    return max(8 * lanes.itemsize - 8, 4) - 1


@inner
def _class_of(lane: int, lanes: Lanes, top: int, classes: int) -> int:
    key = (np.int64(lane) & ((1 << (8 * lanes.itemsize - 1)) - 1)) >> _shift(lanes)
    return min(max(top - key, 0) // CLASS_KEYS, classes - 1)


@inner
def _find(old: Lanes, new: Lanes, top: int, classes: int, scratch: I64) -> tuple[int, I64, I64, I64, I64]:
    """As in `sparse`, after the number of changes; -1 when `scratch` is too short for them.

    A change is noted in `scratch` as difference (32 bits), rank in its class (28), class (4).
    """
    n, bits = len(old), 8 * old.itemsize
    counts, sizes = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    floors, reached = _floors(old, top, classes), np.zeros(CLASSES_MAX + 1, np.int32)
    whole, m = n - n % BLOCK, 0
    for at in range(0, whole, BLOCK):
        prefetch(old, at + AHEAD)
        prefetch(new, at + AHEAD)
        word = differ(old, new, at)
        while word != 0:
            if m == len(scratch):
                return -1, sizes, counts, sizes, sizes
            i = at + lowest(word)
            c, rank = 0, i
            if classes > 1:
                c = _class_of(old[i], old, top, classes)
                below = (word & (~word + _ONE)) - _ONE
                rank = reached[c + 1] - reached[c] + ones(members(old, at, floors, c) & below)
            word &= word - _ONE
            scratch[m] = (np.int64(new[i]) - np.int64(old[i])) << 32 | rank << 4 | c
            counts[c] += 1
            m += 1
        if classes > 1:
            count_reach(old, at, floors, reached)
        reached[CLASSES_MAX] = at + BLOCK
    for c in range(classes):
        sizes[c] = reached[c + 1] - reached[c] if classes > 1 else whole
    for i in range(whole, n):
        c = _class_of(old[i], old, top, classes)
        if old[i] != new[i]:
            if m == len(scratch):
                return -1, sizes, counts, sizes, sizes
            scratch[m] = (np.int64(new[i]) - np.int64(old[i])) << 32 | sizes[c] << 4 | c
            counts[c] += 1
            m += 1
        sizes[c] += 1
    cursors, last = np.cumsum(counts) - counts, np.full(classes, -1, np.int64)
    gaps, diffs = np.empty(m, np.int64), np.empty(m, np.int64)
    for note in scratch[:m]:
        c, rank = note & 15, note >> 4 & 0xFFFFFFF
        gaps[cursors[c]] = rank - last[c] - 1
        diffs[cursors[c]] = (note >> 32) << (64 - bits) >> (64 - bits)
        last[c] = rank
        cursors[c] += 1
    return m, sizes, counts, gaps, diffs


@inner
def _select(word: int, rank: int) -> int:
    """The number of the set bit below which `rank` bits are set (Vigna, "Broadword rank/select", 2008)."""
    sums = word - ((word >> _ONE) & _PAIRS)
    sums = (sums & _QUADS) + ((sums >> np.uint64(2)) & _QUADS)
    sums = ((sums + (sums >> np.uint64(4))) & _NIBBLES) * _BYTES
    byte = np.uint64(8 * ones(((np.uint64(rank) * _BYTES | _TOPS) - sums) & _TOPS))
    rest = rank - np.int64((sums << np.uint64(8)) >> byte & np.uint64(255))
    return np.int64(byte) + _SELECT[np.int64(word >> byte & np.uint64(255)), rest]


@inner
def _locate(lanes: Lanes, top: int, counts: I64, gaps: I64) -> tuple[bool, I32]:
    """Positions (int32 [changed]) of changes given class by class; false when one lies beyond its class."""
    n, classes = len(lanes), len(counts)
    places = np.empty(len(gaps), np.int32)
    if classes == 1:
        at = -1
        for j in range(len(gaps)):
            at += gaps[j] + 1
            if at >= n:
                return False, places
            places[j] = at
        return True, places
    ends = np.cumsum(counts)
    cursors = ends - counts
    left = np.full(CLASSES_MAX, NEVER, np.int32)  # members of each class that are passed before its next change
    for c in range(classes):
        if counts[c] > 0:
            left[c] = gaps[cursors[c]]
    floors = _floors(lanes, top, classes)
    words, reached = np.full((CLASSES_MAX + 1, WORDS), ~np.uint64(0)), np.full(CLASSES_MAX + 1, SPAN, np.int32)
    words[0], reached[0], upto = 0, 0, np.zeros(WORDS, np.int64)
    whole = n - n % SPAN
    for at in range(0, whole, SPAN):
        for block in range(at, at + SPAN, BLOCK):
            prefetch(lanes, block + AHEAD)
        note_reach(lanes, at, floors, words, reached)
        hit = 0
        for c in range(CLASSES_MAX):
            left[c] -= reached[c + 1] - reached[c]
            hit |= (left[c] < 0) << c
        while hit != 0:
            c = lowest(np.uint64(hit))
            hit &= hit - 1
            of_class = reached[c + 1] - reached[c]
            w0, w1, w2 = words[c + 1, 0] & ~words[c, 0], words[c + 1, 1] & ~words[c, 1], words[c + 1, 2] & ~words[c, 2]
            upto[1] = ones(w0)
            upto[2] = upto[1] + ones(w1)
            upto[3] = upto[2] + ones(w2)
            j, end = cursors[c], ends[c]
            while left[c] < 0:
                rank = left[c] + of_class
                i = (rank >= upto[1]) + (rank >= upto[2]) + (rank >= upto[3])  # branches would be mispredicted
                places[j] = at + i * BLOCK + _select(words[c + 1, i] & ~words[c, i], rank - upto[i])
                j += 1
                left[c] = left[c] + gaps[j] + 1 if j < end else NEVER
            cursors[c] = j
    for at in range(whole, n):
        c = _class_of(lanes[at], lanes, top, classes)
        if left[c] == 0:
            places[cursors[c]] = at
            cursors[c] += 1
            left[c] = gaps[cursors[c]] if cursors[c] < ends[c] else NEVER
        else:
            left[c] -= 1
    return bool((cursors == ends).all()), places


@inner
def _top(old: Lanes) -> tuple[int, int]:
    n = len(old)
    if n < CLASSES_FROM_ELEMENTS:
        return 0, 1
    histogram, sampled = np.zeros(256, np.int64), 0
    most, shift = (1 << (8 * old.itemsize - 1)) - 1, _shift(old)
    for i in range(0, n, n // 4096 | 1):
        histogram[(np.int64(old[i]) & most) >> shift] += 1
        sampled += 1
    top, seen = 0, histogram[0]
    while seen <= sampled * TOP_TENTHS // 10:
        top += 1
        seen += histogram[top]
    classes = min(CLASSES_MAX, top // CLASS_KEYS + 1)
    return (top, classes) if classes > 1 else (0, 1)


@inner
def _bits(sizes: I64, counts: I64) -> int:
    total = 0
    for n, m in zip(sizes, counts):  # noqa: B905
        k, mean = 0, n // max(m, 1)
        while mean >> (k + 1) > 0:
            k += 1
        if m > 0:
            total += m * (k + 1) + (n >> k)
    return total


@outer
def _encode(old: Lanes, new: Lanes, scratch: I64, out: U8) -> tuple[int, int]:
    """(payload bytes in `out`, classes); 0 bytes for no change, -1 for more than `scratch` holds."""
    top, classes = _top(old)
    m, sizes, counts, gaps, diffs = _find(old, new, top, classes, scratch)
    if m <= 0:
        return m, 1
    if classes > 1:
        all_sizes, all_counts = np.array([len(old)]), np.array([m])
        if _bits(sizes, counts) + TABLE_BITS >= _bits(all_sizes, all_counts):
            top, classes = 0, 1
            m, sizes, counts, gaps, diffs = _find(old, new, top, classes, scratch)
    n_large = 0
    for diff in diffs:
        n_large += abs(diff) > 1
    large_gaps, larger = np.empty(n_large, np.int64), np.empty(n_large, np.int64)
    table_end = pack(counts, CLASSES_MAX, out, HEAD_SIZE) if classes > 1 else HEAD_SIZE
    gaps_end = pack(gaps, GAPS_GROUP, out, table_end)
    signs_end = gaps_end + (m + 7) // 8
    for i in range(gaps_end, signs_end):
        out[i] = 0
    i, last = 0, -1
    for j in range(m):
        out[gaps_end + (j >> 3)] |= np.uint8((diffs[j] < 0) << (j & 7))
        if abs(diffs[j]) > 1:
            large_gaps[i], larger[i], last = j - last - 1, abs(diffs[j]) - 2, j
            i += 1
    large_end = pack(large_gaps, GAPS_GROUP, out, signs_end)
    fields = (m, n_large, gaps_end - table_end, large_end - signs_end)
    for i in range(4):
        for byte in range(4):
            out[4 * i + byte] = fields[i] >> 8 * byte & 255
    out[16], out[17], out[18], out[19] = top, classes, (table_end - HEAD_SIZE) & 255, (table_end - HEAD_SIZE) >> 8
    return pack(larger, LARGE_GROUP, out, large_end), classes


@inner
def _field(raw: U8, at: int) -> int:
    return np.int64(word_at(raw, at) & np.uint64(0xFFFFFFFF))


@outer
def _changes(raw: U8, size: int, base: Lanes, m_max: int, by_exponent: bool) -> tuple[bool, I32, Lanes]:
    """Whether it is a payload, and `sparse.changes`; `raw` holds `size` bytes and eight more."""
    n, most = len(base), (1 << (8 * base.itemsize - 1)) - 2
    none, values = np.empty(0, np.int32), np.empty(0, base.dtype)
    if size < HEAD_SIZE:
        return False, none, values
    m, n_large, top, classes = _field(raw, 0), _field(raw, 4), np.int64(raw[16]), np.int64(raw[17])
    table_end = HEAD_SIZE + np.int64(raw[18]) + 256 * np.int64(raw[19])
    gaps_end = table_end + _field(raw, 8)
    signs_end = gaps_end + (m + 7) // 8
    large_end = signs_end + _field(raw, 12)
    if m == 0 or m > m_max or n_large > m or large_end > size:
        return False, none, values
    if not (2 <= classes <= CLASSES_MAX if by_exponent else top == 0 and classes == 1 and table_end == HEAD_SIZE):
        return False, none, values
    counts = np.array([m])
    if by_exponent:
        right, counts = unpack(raw, HEAD_SIZE, table_end, classes, CLASSES_MAX)
        if not right or counts.max() > m or counts.sum() != m:
            return False, none, values
    right, gaps = unpack(raw, table_end, gaps_end, m, GAPS_GROUP)
    right_too, large_gaps = unpack(raw, signs_end, large_end, n_large, GAPS_GROUP)
    right_as_well, larger = unpack(raw, large_end, size, n_large, LARGE_GROUP)
    if not (right and right_too and right_as_well) or gaps.max() >= n:
        return False, none, values
    diffs = np.ones(m, np.int64)
    j = -1
    for i in range(n_large):
        j += large_gaps[i] + 1
        if j >= m or larger[i] > most:
            return False, none, values
        diffs[j] = larger[i] + 2
    right, places = _locate(base, top, counts, gaps)
    if not right:
        return False, none, values
    values = np.empty(m, base.dtype)
    for j in range(m):
        sign = 1 - 2 * (np.int64(raw[gaps_end + (j >> 3)]) >> (j & 7) & 1)
        values[j] = np.int64(base[places[j]]) + sign * diffs[j]
    return True, places, values


@outer
def scatter(out: Lanes, positions: I32, values: Lanes) -> None:
    """`sparse.scatter`."""
    for j in range(len(positions)):
        out[positions[j]] = values[j]


def encode(old: Lanes, new: Lanes) -> tuple[bool, bytes] | None:
    limit = changes_max(len(old))
    scratch, out = getattr(_THREAD, "scratch", (_NONE, _NONE))
    if len(scratch) < limit:
        scratch, out = _THREAD.scratch = np.empty(limit, np.int64), np.empty(OUT_BYTES_EACH * limit + 256, np.uint8)
    size, classes = _encode(old, new, scratch[:limit], out)
    return None if size < 0 else (classes > 1, out[:size].tobytes())


def changes(data: bytes, base: Lanes, by_exponent: bool) -> tuple[I32, Lanes] | None:
    raw = np.frombuffer(data + bytes(8), np.uint8)
    right, positions, values = _changes(raw, len(data), base, changes_max(len(base)), by_exponent)
    return (positions, values) if right else None
