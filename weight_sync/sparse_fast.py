"""`sparse.encode` and `sparse.changes` as compiled loops (numba), without the GIL. The bytes are the same.

Elements are looked at 64 at a time (`lanes_llvm`): which differ is a mask, how many are of a class a population count.
Where changes lie cannot be foreseen, so a loop that ends with them costs more than what it does: they are first listed
for 512 elements without a branch, then worked on in one loop. Compiled at the first call of each element width and
kept on disk by numba.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from headway.weight_sync.lanes_llvm import (
    BLOCK,
    HAS_DEPOSIT,
    SPAN,
    WORDS,
    classify,
    differ,
    inner,
    ones,
    outer,
    prefetch,
    put_bits,
    put_run,
    put_word,
    select,
    upto_rank,
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
CLASS_BITS = (CLASSES_MAX - 1).bit_length()
AHEAD = 1024
"""How many elements ahead memory is asked for: hardware stops at each page."""
OUT_BYTES_EACH = 20
"""A change takes at most a sign and three numbers of 34 bits, and a parameter of its own for each."""

NEVER = np.int64(1 << 60)
"""Above every rank."""

Notes = NDArray[np.int64]

_THREAD = threading.local()
"""Each thread keeps room for notes of changes and for a payload: fresh pages for every chunk cost a quarter."""
_NO_NOTES, _NONE = np.empty((CLASSES_MAX, 0), np.int64), np.empty(0, np.uint8)
_ONE = np.uint64(1)
_PAIRS, _QUADS, _NIBBLES = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_BYTES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_SELECT = np.array([[*(i for i in range(8) if byte >> i & 1), *[0] * 8][:8] for byte in range(256)], np.uint8)
"""[byte, rank] -> the number of that set bit."""


@inner
def _shift(lanes: Lanes) -> int:
    """By how much a magnitude is shifted to give its key."""
    return max(8 * lanes.itemsize - 8, 4) - 1


@inner
def _class_of(lane: int, lanes: Lanes, top: int, classes: int) -> int:
    key = (lane & ((1 << (8 * lanes.itemsize - 1)) - 1)) >> _shift(lanes)
    return min(max(top - key, 0) // CLASS_KEYS, classes - 1)


@inner
def _find(old: Lanes, new: Lanes, top: int, classes: int, limit: int, notes: Notes) -> tuple[int, I64, I64]:
    """How many elements differ, of how many in each class, and of those how many differ; -1 when above `limit`.

    A row of `notes` for each class takes its changes in order: difference (32 bits), gap (32).
    """
    n = len(old)
    counts, last, sizes = np.zeros(classes, np.int64), np.full(classes, -1, np.int64), np.zeros(classes, np.int64)
    masks, upto = np.full((CLASSES_MAX, WORDS), ~np.uint64(0)), np.zeros((CLASSES_MAX, WORDS), np.int64)
    spots, whole, m = np.empty(SPAN + 4, np.int64), n - n % SPAN, 0
    for at in range(0, whole, SPAN):
        if classes > 1:
            classify(old, at, top, classes - 1, masks, upto)
        found = 0
        for w in range(WORDS):
            start = at + w * BLOCK
            prefetch(old, start + AHEAD)
            prefetch(new, start + AHEAD)
            word = differ(old, new, start)
            rest, filled = put_bits(spots, found, word, w * BLOCK), found
            while rest != 0:
                filled += 4
                rest = put_bits(spots, filled, rest, w * BLOCK)
            found += ones(word)
            if classes == 1:
                upto[0, w] = start + BLOCK
        for k in range(found):
            spot = spots[k]
            lane = np.int64(old[at + spot])
            c, w = _class_of(lane, old, top, classes), spot >> 6
            rank = upto[c, w] - ones(masks[c, w] >> np.uint64(spot & 63))
            notes[c, counts[c]] = (np.int64(new[at + spot]) - lane) << 32 | (rank - last[c] - 1)
            counts[c] += 1
            last[c] = rank
        m += found
        if m > limit:
            return -1, sizes, counts
    for c in range(classes):
        sizes[c] = upto[c, WORDS - 1]
    for i in range(whole, n):
        lane = np.int64(old[i])
        c = _class_of(lane, old, top, classes)
        if lane != np.int64(new[i]):
            notes[c, counts[c]] = (np.int64(new[i]) - lane) << 32 | (sizes[c] - last[c] - 1)
            counts[c] += 1
            last[c] = sizes[c]
            m += 1
        sizes[c] += 1
    return m if m <= limit else -1, sizes, counts


@inner
def _sorted(lanes: Lanes, m: int, counts: I64, notes: Notes) -> tuple[I64, I64]:
    """(gaps, signed differences) of `m` changes, class by class."""
    gaps, diffs, unused = np.empty(m, np.int64), np.empty(m, np.int64), 64 - 8 * lanes.itemsize
    j = 0
    for c in range(len(counts)):
        for i in range(counts[c]):
            gaps[j] = notes[c, i] & 0xFFFFFFFF
            diffs[j] = (notes[c, i] >> 32) << unused >> unused
            j += 1
    return gaps, diffs


@inner
def _select_by_halves(word: int, rank: int) -> int:
    """The number of the set bit below which `rank` bits are set (Vigna, "Broadword rank/select", 2008)."""
    sums = word - ((word >> _ONE) & _PAIRS)
    sums = (sums & _QUADS) + ((sums >> np.uint64(2)) & _QUADS)
    sums = ((sums + (sums >> np.uint64(4))) & _NIBBLES) * _BYTES
    byte = np.uint64(8 * ones(((np.uint64(rank) * _BYTES | _TOPS) - sums) & _TOPS))
    rest = rank - np.int64((sums << np.uint64(8)) >> byte & np.uint64(255))
    return np.int64(byte) + _SELECT[np.int64(word >> byte & np.uint64(255)), rest]


_select = select if HAS_DEPOSIT else _select_by_halves


@inner
def _locate(lanes: Lanes, top: int, counts: I64, gaps: I64, diffs: I64) -> tuple[bool, I32, Lanes]:
    """Positions (int32 [changed]), new values of changes given class by class; false when one is beyond its class."""
    n, classes = len(lanes), len(counts)
    places, values = np.empty(len(gaps), np.int32), np.empty(len(gaps), lanes.dtype)
    if classes == 1:
        at = -1
        for j in range(len(gaps)):
            at += gaps[j] + 1
            if at >= n:
                return False, places, values
            places[j], values[j] = at, np.int64(lanes[at]) + diffs[j]
        return True, places, values
    ranks, cursors = _ranks(counts, gaps)
    due = np.empty(SPAN + 2 * WORDS, np.int64)
    masks, upto = np.zeros((CLASSES_MAX, WORDS), np.uint64), np.zeros((CLASSES_MAX, WORDS), np.int64)
    whole, flat_upto = n - n % SPAN, upto.reshape(-1)
    for at in range(0, whole, SPAN):
        for start in range(at, at + SPAN, BLOCK):
            prefetch(lanes, start + AHEAD)
        classify(lanes, at, top, classes - 1, masks, upto)
        found = 0
        for c in range(CLASSES_MAX):
            bound = (upto[c, WORDS - 1] << CLASS_BITS) - 1
            more = WORDS
            while more == WORDS:
                put_run(due, found, cursors[c])
                more = upto_rank(ranks, cursors[c], bound)
                found += more
                cursors[c] += more
        for k in range(found):
            place = due[k]
            c, rank = ranks[place] & (CLASSES_MAX - 1), ranks[place] >> CLASS_BITS
            w, j = upto_rank(flat_upto, c * WORDS, rank), place - c * WORDS
            members = masks[c, w]
            i = at + w * BLOCK + _select(members, rank - upto[c, w] + ones(members))
            places[j], values[j] = i, np.int64(lanes[i]) + diffs[j]
    sizes = upto[:, WORDS - 1].copy()
    for at in range(whole, n):
        c = _class_of(np.int64(lanes[at]), lanes, top, classes)
        if ranks[cursors[c]] >> CLASS_BITS == sizes[c]:
            j = cursors[c] - c * WORDS
            places[j], values[j] = at, np.int64(lanes[at]) + diffs[j]
            cursors[c] += 1
        sizes[c] += 1
    for c in range(classes):
        if ranks[cursors[c]] != NEVER:
            return False, places, values
    return True, places, values


@inner
def _ranks(counts: I64, gaps: I64) -> tuple[I64, I64]:
    """Each change's rank in its class, times CLASSES_MAX, plus its class; WORDS times NEVER after each class.

    And where each of CLASSES_MAX classes begins there, always WORDS times its number later than in `gaps`.
    """
    ranks, starts = np.full(len(gaps) + CLASSES_MAX * WORDS, NEVER), np.empty(CLASSES_MAX, np.int64)
    j = 0
    for c in range(CLASSES_MAX):
        starts[c] = j + c * WORDS
        rank = -1
        for _ in range(counts[c] if c < len(counts) else 0):
            rank += gaps[j] + 1
            ranks[j + c * WORDS] = rank << CLASS_BITS | c
            j += 1
    return ranks, starts


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
def _encode(old: Lanes, new: Lanes, limit: int, notes: Notes, out: U8) -> tuple[int, int]:
    """(payload bytes in `out`, classes); 0 bytes for no change, -1 for more than `limit`."""
    top, classes = _top(old)
    m, sizes, counts = _find(old, new, top, classes, limit, notes)
    if m <= 0:
        return m, 1
    if classes > 1:
        all_sizes, all_counts = np.array([len(old)]), np.array([m])
        if _bits(sizes, counts) + TABLE_BITS >= _bits(all_sizes, all_counts):
            top, classes = 0, 1
            m, sizes, counts = _find(old, new, top, classes, limit, notes)
    gaps, diffs = _sorted(old, m, counts, notes)
    large_gaps, larger, signs = np.empty(m, np.int64), np.empty(m, np.int64), np.uint64(0)
    table_end = pack(counts, CLASSES_MAX, out, HEAD_SIZE) if classes > 1 else HEAD_SIZE
    gaps_end = pack(gaps, GAPS_GROUP, out, table_end)
    signs_end = gaps_end + (m + 7) // 8
    n_large, last = 0, -1
    for j in range(m):
        signs |= np.uint64(diffs[j] < 0) << np.uint64(j & 63)
        if j & 63 == 63 or j == m - 1:
            put_word(out, gaps_end + (j >> 6) * 8, signs)
            signs = np.uint64(0)
        size = abs(diffs[j])
        large_gaps[n_large], larger[n_large] = j - last - 1, size - 2  # overwritten unless large: no branch to guess
        n_large, last = n_large + (size > 1), j if size > 1 else last
    large_gaps, larger = large_gaps[:n_large], larger[:n_large]
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
    diffs = np.empty(m, np.int64)
    for j in range(m):
        diffs[j] = 1 - 2 * (np.int64(raw[gaps_end + (j >> 3)]) >> (j & 7) & 1)
    j = -1
    for i in range(n_large):
        j += large_gaps[i] + 1
        if j >= m or larger[i] > most:
            return False, none, values
        diffs[j] *= larger[i] + 2
    return _locate(base, top, counts, gaps, diffs)


@outer
def scatter(out: Lanes, positions: I32, values: Lanes) -> None:
    """`sparse.scatter`."""
    for j in range(len(positions)):
        out[positions[j]] = values[j]


def encode(old: Lanes, new: Lanes) -> tuple[bool, bytes] | None:
    limit = changes_max(len(old))
    notes, out = getattr(_THREAD, "room", (_NO_NOTES, _NONE))
    if notes.shape[1] < limit + SPAN:
        notes, out = np.empty((CLASSES_MAX, limit + SPAN), np.int64), np.empty(OUT_BYTES_EACH * limit + 256, np.uint8)
        _THREAD.room = notes, out
    size, classes = _encode(old, new, limit, notes, out)
    return None if size < 0 else (classes > 1, out[:size].tobytes())


def changes(data: bytes, base: Lanes, by_exponent: bool) -> tuple[I32, Lanes] | None:
    raw = np.frombuffer(data + bytes(8), np.uint8)
    right, positions, values = _changes(raw, len(data), base, changes_max(len(base)), by_exponent)
    return (positions, values) if right else None
