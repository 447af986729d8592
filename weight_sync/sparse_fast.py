"""`sparse.encode` and `sparse.changes` as compiled loops (numba), without the GIL. The bytes are the same.

Elements are looked at 64 at a time (`lanes_llvm`): which differ is a mask, how many are of a class a population count.
Where changes lie cannot be foreseen, so a loop that ends with them costs more than what it does: they are first listed
for a group of 2,048 elements without a branch, then worked on in one loop. Compiled at the first call of each element
width and kept on disk by numba.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from headway.weight_sync.groups_fast import PLANE_WORDS, class_of, key_shift, number, room
from headway.weight_sync.lanes_llvm import (
    BLOCK,
    GROUP,
    HAS_DEPOSIT,
    SPAN,
    SPANS,
    WORDS,
    classify,
    count,
    differ,
    inner,
    ones,
    outer,
    prefetch,
    put_below,
    put_bits,
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
AHEAD = GROUP
"""How many elements ahead two arrays are asked for at once; one alone the hardware foresees."""
OUT_BYTES_EACH = 20
"""A change takes at most a sign and three numbers of 34 bits, and a parameter of its own for each."""

RANK_SHIFT = 32 + CLASS_BITS
NEVER = np.int64(1 << 62)
"""Above every rank, shifted."""

Notes = NDArray[np.int64]
Put = tuple[Lanes] | tuple[I32, Lanes]
"""Where changes go: the chunk itself, or room for their positions and values."""

_THREAD = threading.local()
"""Each thread keeps room for notes of changes and for a payload: fresh pages for every chunk cost a quarter."""
_NO_NOTES, _NONE = np.empty((CLASSES_MAX, 0), np.int64), np.empty(0, np.uint8)
_ONE = np.uint64(1)
_PAIRS, _QUADS, _NIBBLES = np.uint64(0x5555555555555555), np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_BYTES, _TOPS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_SELECT = np.array([[*(i for i in range(8) if byte >> i & 1), *[0] * 8][:8] for byte in range(256)], np.uint8)
"""[byte, rank] -> the number of that set bit."""


@inner
def _find(old: Lanes, new: Lanes, top: int, classes: int, limit: int, notes: Notes) -> tuple[int, I64, I64]:
    """How many elements differ, of how many in each class, and of those how many differ; -1 when above `limit`.

    A row of `notes` for each class takes its changes in order: difference (32 bits), gap (32).
    """
    n = len(old)
    counts, last, sizes = np.zeros(classes, np.int64), np.full(classes, -1, np.int64), np.zeros(classes, np.int64)
    planes, masks, upto, totals = room()
    if classes == 1:
        masks[:] = ~np.uint64(0)
        for w in range(SPANS * WORDS):
            upto[number(w // WORDS, w % WORDS, 0)] = (w + 1) * BLOCK
    spots, whole, m = np.empty(GROUP + 4, np.int64), n - n % SPAN, 0
    for first in range(0, whole, GROUP):
        found, spans = 0, min(SPANS, (whole - first) // SPAN)
        for span in range(spans):
            at = first + span * SPAN
            if classes > 1:
                classify(old, at, top, classes - 1, planes, span * PLANE_WORDS)
            for w in range(WORDS):
                prefetch(old, at + w * BLOCK + AHEAD)
                prefetch(new, at + w * BLOCK + AHEAD)
                word, start = differ(old, new, at + w * BLOCK), span * SPAN + w * BLOCK
                rest, filled = put_bits(spots, found, word, start), found
                while rest != 0:
                    filled += 4
                    rest = put_bits(spots, filled, rest, start)
                found += ones(word)
        if classes > 1:
            for span in range(spans):
                count(planes, span, masks, upto, totals)
        for k in range(found):
            spot = spots[k]
            lane = np.int64(old[first + spot])
            c, span, w = class_of(lane, old, top, classes), spot >> 9, spot >> 6 & 7
            members = masks[(span * CLASSES_MAX + c) * WORDS + w] >> np.uint64(spot & 63)
            rank = sizes[c] + np.int64(upto[number(span, w, c)]) - ones(members)
            notes[c, counts[c]] = (np.int64(new[first + spot]) - lane) << 32 | (rank - last[c] - 1)
            counts[c] += 1
            last[c] = rank
        m += found
        if m > limit:
            return -1, sizes, counts
        for c in range(classes):
            sizes[c] += totals[spans * CLASSES_MAX + c] if classes > 1 else spans * SPAN
    for i in range(whole, n):
        lane = np.int64(old[i])
        c = class_of(lane, old, top, classes)
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
def _locate(lanes: Lanes, top: int, counts: I64, gaps: I64, diffs: I64, put: Put) -> bool:
    """Find the changes given class by class, and put them: false when one is beyond its class."""
    n, classes = len(lanes), len(counts)
    if classes == 1:
        at = -1
        for j in range(len(gaps)):
            at += gaps[j] + 1
            if at >= n:
                return False
            _put(put, j, at, np.int64(lanes[at]) + diffs[j])
        return True
    entries, cursors = _entries(n, counts, gaps, diffs)
    due, whole, done = np.empty(GROUP + CLASSES_MAX * WORDS, np.int64), n - n % SPAN, 0
    planes, masks, upto, totals = room()
    sizes = np.zeros(CLASSES_MAX, np.int64)
    for first in range(0, whole, GROUP):
        spans, found = min(SPANS, (whole - first) // SPAN), 0
        for span in range(spans):
            at = first + span * SPAN
            classify(lanes, at, top, classes - 1, planes, span * PLANE_WORDS)
        for span in range(spans):
            count(planes, span, masks, upto, totals)
        if spans < SPANS:
            totals[(spans + 1) * CLASSES_MAX :] = GROUP
        for c in range(classes):
            reach, more = (sizes[c] + np.int64(totals[spans * CLASSES_MAX + c])) << RANK_SHIFT, WORDS
            while more == WORDS:
                more = put_below(due, found, entries, cursors[c], reach)
                found += more
                cursors[c] += more
        for k in range(found):
            entry = due[k]
            c = entry >> 32 & (CLASSES_MAX - 1)
            rank = (entry >> RANK_SHIFT) - sizes[c]
            span = upto_rank(totals, CLASSES_MAX, 0x01010101 << c, rank)
            w = upto_rank(upto, number(span, 0, c) - (c & 3), 0x11111111 << (c & 3), rank)
            members = masks[(span * CLASSES_MAX + c) * WORDS + w]
            before = np.int64(upto[number(span, w, c)]) - ones(members)
            i = np.uint64(first + span * SPAN + w * BLOCK + _select(members, rank - before))
            _put(put, done + k, i, np.int64(lanes[i]) + entry)
        done += found
        for c in range(classes):
            sizes[c] += totals[spans * CLASSES_MAX + c]
    for at in range(whole, n):
        c = class_of(np.int64(lanes[at]), lanes, top, classes)
        entry = entries[cursors[c]]
        if entry >> RANK_SHIFT == sizes[c]:
            _put(put, done, at, np.int64(lanes[at]) + entry)
            cursors[c] += 1
            done += 1
        sizes[c] += 1
    return done == len(gaps)


@inner
def _entries(n: int, counts: I64, gaps: I64, diffs: I64) -> tuple[I64, I64]:
    """Each change's rank in its class, its class and its difference in one number; WORDS times NEVER after each class.

    And where each class begins there. A rank beyond `n` elements counts as `n`, which no class reaches.
    """
    entries, starts = np.full(len(gaps) + len(counts) * WORDS, NEVER), np.empty(len(counts), np.int64)
    j = 0
    for c in range(len(counts)):
        at, rank = j + c * WORDS, -1
        starts[c] = at
        for _ in range(counts[c]):
            rank = min(rank + gaps[j] + 1, n)
            entries[at] = rank << RANK_SHIFT | c << 32 | (diffs[j] & 0xFFFFFFFF)
            at += 1
            j += 1
    return entries, starts


@inner
def _put(put: Put, j: int, at: int, value: int) -> None:
    """Change number j, in no order: write it where `put` is the chunk itself, else note it."""
    if len(put) == 1:
        put[0][at] = value
    else:
        put[0][j], put[1][j] = at, value


@inner
def _top(old: Lanes) -> tuple[int, int]:
    n = len(old)
    if n < CLASSES_FROM_ELEMENTS:
        return 0, 1
    histogram, sampled = np.zeros(256, np.int64), 0
    most, shift = (1 << (8 * old.itemsize - 1)) - 1, key_shift(old)
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
def _read(raw: U8, size: int, base: Lanes, m_max: int, by_exponent: bool, put: Put) -> bool:
    """Whether it is a payload, whose changes are then put; `raw` holds `size` bytes and eight more."""
    n, most = len(base), (1 << (8 * base.itemsize - 1)) - 2
    if size < HEAD_SIZE:
        return False
    m, n_large, top, classes = _field(raw, 0), _field(raw, 4), np.int64(raw[16]), np.int64(raw[17])
    table_end = HEAD_SIZE + np.int64(raw[18]) + 256 * np.int64(raw[19])
    gaps_end = table_end + _field(raw, 8)
    signs_end = gaps_end + (m + 7) // 8
    large_end = signs_end + _field(raw, 12)
    if m == 0 or m > m_max or n_large > m or large_end > size:
        return False
    if not (2 <= classes <= CLASSES_MAX if by_exponent else top == 0 and classes == 1 and table_end == HEAD_SIZE):
        return False
    counts = np.array([m])
    if by_exponent:
        right, counts = unpack(raw, HEAD_SIZE, table_end, classes, CLASSES_MAX)
        if not right or counts.max() > m or counts.sum() != m:
            return False
    right, gaps = unpack(raw, table_end, gaps_end, m, GAPS_GROUP)
    right_too, large_gaps = unpack(raw, signs_end, large_end, n_large, GAPS_GROUP)
    right_as_well, larger = unpack(raw, large_end, size, n_large, LARGE_GROUP)
    if not (right and right_too and right_as_well) or gaps.max() >= n:
        return False
    diffs = np.empty(m, np.int64)
    for j in range(m):
        diffs[j] = 1 - 2 * (np.int64(raw[gaps_end + (j >> 3)]) >> (j & 7) & 1)
    j = -1
    for i in range(n_large):
        j += large_gaps[i] + 1
        if j >= m or larger[i] > most:
            return False
        diffs[j] *= larger[i] + 2
    return _locate(base, top, counts, gaps, diffs, put)


@outer
def scatter(out: Lanes, positions: I32, values: Lanes) -> None:
    """`sparse.scatter`."""
    for j in range(len(positions)):
        out[positions[j]] = values[j]


def encode(old: Lanes, new: Lanes) -> tuple[bool, bytes] | None:
    limit = changes_max(len(old))
    notes, out = getattr(_THREAD, "room", (_NO_NOTES, _NONE))
    if notes.shape[1] < limit + GROUP:
        notes, out = np.empty((CLASSES_MAX, limit + GROUP), np.int64), np.empty(OUT_BYTES_EACH * limit + 256, np.uint8)
        _THREAD.room = notes, out
    size, classes = _encode(old, new, limit, notes, out)
    return None if size < 0 else (classes > 1, out[:size].tobytes())


def changes(data: bytes, base: Lanes, by_exponent: bool) -> tuple[I32, Lanes] | None:
    m = min(int.from_bytes(data[:4], "little"), changes_max(len(base)))
    found = np.empty(m, np.int32), np.empty(m, base.dtype)
    return found if _read_into(data, base, by_exponent, found) else None


def apply(data: bytes, lanes: Lanes, by_exponent: bool) -> bool:
    return _read_into(data, lanes, by_exponent, (lanes,))


def _read_into(data: bytes, base: Lanes, by_exponent: bool, put: Put) -> bool:
    raw = np.frombuffer(data + bytes(8), np.uint8)
    right: bool = _read(raw, len(data), base, changes_max(len(base)), by_exponent, put)
    return right
