"""Weights as raw bytes with a dtype and a shape, and their entries in a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from headway.schemas.manifest import DTYPE_BYTES, TensorEntry
from headway.weight_sync.codec import U8


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTensor:
    """A tensor in the rollout's dtype: safetensors' name of it, its shape, its bytes (uint8 [nbytes], C order)."""

    dtype: str
    shape: tuple[int, ...]
    data: U8

    def __post_init__(self) -> None:
        expected = int(np.prod(self.shape, dtype=np.int64)) * DTYPE_BYTES[self.dtype]
        if self.data.dtype != np.uint8 or self.data.shape != (expected,):
            raise ValueError(f"{self.dtype} {self.shape} has {expected} bytes, not {self.data.shape}")


def checksum(data: U8) -> str:
    """XXH3-128 of the bytes, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data.data)


def table_of(tensors: Mapping[str, RawTensor], aliases: Mapping[str, str] | None = None) -> tuple[TensorEntry, ...]:
    """Manifest rows, sorted by name. `aliases` maps a tied tensor's name to the one that carries the bytes."""
    rows = {
        name: TensorEntry(name=name, dtype=raw.dtype, shape=raw.shape, xxh3=checksum(raw.data))
        for name, raw in tensors.items()
        if name not in (aliases or {})
    }
    return with_aliases(rows, aliases)


def with_aliases(entries: Mapping[str, TensorEntry], aliases: Mapping[str, str] | None) -> tuple[TensorEntry, ...]:
    """Manifest rows, sorted by name, with those of tied tensors (tied -> owner)."""
    rows = dict(entries)
    for name, owner in (aliases or {}).items():
        if owner not in rows:
            raise ValueError(f"{name!r} is tied to {owner!r}, which carries no bytes")
        rows[name] = rows[owner].model_copy(update={"name": name, "alias": owner})
    return tuple(rows[name] for name in sorted(rows))
