"""Elements of a chunk in groups, by class, as compiled loops: what encoding and decoding share.

A group is SPANS spans of 512 elements. Counts within it fit 16 bits, so that one comparison finds where a rank lies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headway.weight_sync.lanes_llvm import GROUP, PLANES, SPANS, WORDS, inner
from headway.weight_sync.sparse import CLASS_KEYS, CLASSES_MAX, Lanes, Words

Counts = NDArray[np.uint16]
PLANE_WORDS = PLANES * WORDS


@inner
def key_shift(lanes: Lanes) -> int:
    """By how much a magnitude is shifted to give its key."""
    return max(8 * lanes.itemsize - 8, 4) - 1


@inner
def class_of(lane: int, lanes: Lanes, top: int, classes: int) -> int:
    key = (lane & ((1 << (8 * lanes.itemsize - 1)) - 1)) >> key_shift(lanes)
    return min(max(top - key, 0) // CLASS_KEYS, classes - 1)


@inner
def _aligned(n_words: int) -> Words:
    """Zeros (uint64) that begin where a line of the cache does."""
    room = np.zeros(n_words + WORDS, np.uint64)
    start = (-room.ctypes.data & 63) >> 3
    return room[start : start + n_words]


@inner
def room() -> tuple[Words, Words, Counts, Counts]:
    """What `classify` and `count` write of a group: planes, masks, counts up to each word, counts up to each span."""
    masks, words = _aligned(SPANS * CLASSES_MAX * WORDS), SPANS * WORDS * CLASSES_MAX // 4
    planes = _aligned(SPANS * PLANE_WORDS)
    counts = _aligned(words + (1 + SPANS) * CLASSES_MAX // 4).view(np.uint16)
    upto, totals = counts[: 4 * words], counts[4 * words :]
    totals[CLASSES_MAX:] = GROUP  # above every rank where there is no span
    return planes, masks, upto, totals


@inner
def number(span: int, word: int, c: int) -> int:
    """Where the count of class `c` up to a word stands."""
    return ((span * 2 + (c >> 2)) * WORDS + word) * 4 + (c & 3)
