"""The checksums that an engine must give for a version: of each rank's fused tensors.

Ours, XXH3-128, from our loader, and those of SGLang's `weights_checker`. On a CPU that is the first 8 bytes of the
SHA-256 of a tensor's bytes; on a GPU a sum of mixed 32-bit words (`gpu_tensor_hash` of SGLang 0.5.23), which is
computed here the same way on the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headway.schemas.manifest import DTYPE_BYTES, Manifest
from headway.weight_sync.codec import U8
from headway.weight_sync.layouts import Fused, fuse
from headway.weight_sync.tensors import checksum

TILE_WORDS = 8192
SEED = 0x243F6A88
SEEDS = (SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF)
PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
"""What a word's index is multiplied by and rotated, for each of the two halves of a sum."""
Words = np.ndarray[Any, np.dtype[np.uint32]]


Kind = Literal["ours", "stock"]


@dataclass(slots=True)
class ServingSums:
    """For engines on `device`. Remembers one checksum a fused tensor: what did not change is not hashed again."""

    device: str = "cpu"
    _known: dict[tuple[Kind, Fused], tuple[tuple[str, ...], str]] = field(default_factory=dict)

    def of(
        self, kind: Kind, fused: Mapping[str, Fused], manifest: Manifest, tensors: Mapping[str, U8]
    ) -> dict[str, str]:
        """Fused name -> checksum of a rank that serves `manifest`, whose bytes are `tensors`."""
        entries = {entry.name: entry for entry in manifest.tensors}
        shapes = {entry.name: entry.shape for entry in manifest.tensors}
        found = {}
        for name, tensor in fused.items():
            key = tuple(entries[piece.source].xxh3 for piece in tensor.pieces)
            known = self._known.get((kind, tensor))
            if known is None or known[0] != key:
                width = DTYPE_BYTES[entries[tensor.pieces[0].source].dtype]
                data = fuse(tensor, tensors, shapes, width)
                known = self._known[kind, tensor] = (key, checksum(data) if kind == "ours" else self._stock(data))
            found[name] = known[1]
        return found

    def _stock(self, data: U8) -> str:
        return hashlib.sha256(data.data).hexdigest()[:16] if self.device == "cpu" else f"{gpu_sum(data):016x}"


def gpu_sum(data: U8) -> int:
    """SGLang's 64-bit hash of a tensor on a GPU."""
    padded = np.zeros(-(-len(data) // 4) * 4, np.uint8)
    padded[: len(data)] = data
    words = padded.view(np.uint32)
    total = sum(_tile(words[at : at + TILE_WORDS], at, len(padded)) for at in range(0, len(words), TILE_WORDS))
    return _spread(total & (1 << 64) - 1) if len(words) else 0


def _tile(words: Words, start: int, size_bytes: int) -> int:
    index = np.arange(start, start + len(words), dtype=np.uint64).astype(np.uint32)
    halves = []
    for seed, (factor, turn) in zip(SEEDS, PLACES, strict=True):
        place = (index * np.uint32(factor) + np.uint32(seed)) ^ (
            index << np.uint32(turn) | index >> np.uint32(32 - turn)
        )
        mixed = int(_mix(words ^ place).sum(dtype=np.uint64)) ^ size_bytes
        halves.append(int(_mix(np.array([mixed & 0xFFFFFFFF], np.uint32))[0]))
    return halves[0] << 32 | halves[1]


def _mix(x: Words) -> Words:
    """The 32-bit finaliser of MurmurHash3."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def _spread(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ x >> 31
