"""What a version changes of a tensor: new elements at their places, or whole runs of bytes.

Values are absolute, never differences: a write that is repeated, or that follows one which was cut off, ends with the
same bytes. What is staged is so as large as the delta that brought it, not as the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash

from headway.weight_sync.codec import CHUNK_BYTES_MAX, U8, chunk_changes, decode_chunk, scatter
from headway.weight_sync.rice import I32
from headway.weight_sync.sparse import Lanes


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [start, start + nbytes) of a tensor: `values` (uint8) are all of them or, with `positions`, some elements.

    `positions` (int32 [changed]) count elements of the width of `values` from `start` on.
    """

    start: int
    nbytes: int
    positions: I32 | None
    values: Lanes

    def write(self, into: U8) -> None:
        """Bring `into` (uint8 [nbytes]), the parent's bytes or a mixture of them and the new, to the new."""
        if self.positions is None:
            into[:] = self.values
        else:
            scatter(into.view(self.values.dtype), self.positions, self.values)


@dataclass(frozen=True, slots=True)
class Patch:
    """Parts of one tensor, in order. What they leave out stays."""

    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, data: U8) -> Patch:
        """Everything is new."""
        return cls((Part(0, len(data), None, data),))

    @property
    def is_whole(self) -> bool:
        return all(part.positions is None for part in self.parts)

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(p.values.nbytes + (0 if p.positions is None else p.positions.nbytes) for p in self.parts)

    def write(self, into: U8) -> None:
        """Bring the tensor's bytes `into` (uint8, writable) from the parent's to the new ones."""
        for part in self.parts:
            part.write(into[part.start : part.start + part.nbytes])

    def dense(self, base: U8 | None) -> U8:
        """The new bytes; `base` are the parent's, not needed where everything is new."""
        if len(self.parts) == 1 and self.is_whole:
            return self.parts[0].values
        if base is None:
            raise ValueError("a patch of places without its parent's bytes")
        fresh = base.copy()
        self.write(fresh)
        return fresh


class Hashed:
    """XXH3-128 of a tensor's new bytes, while its parts come in order from the first on."""

    def __init__(self) -> None:
        self._hash, self._room, self.at = xxhash.xxh3_128(), np.empty(CHUNK_BYTES_MAX, np.uint8), 0

    def restart(self) -> None:
        """Another tensor begins."""
        self._hash.reset()
        self.at = 0

    def take(self, part: Part, base: U8) -> None:
        """The part that begins at `at`; `base` are its parent's bytes."""
        fresh = part.values
        if part.positions is not None:  # in a place that stays in the processor's cache
            fresh = self._room[: part.nbytes]
            fresh[:] = base
            part.write(fresh)
        self._hash.update(fresh.data)
        self.at = part.start + part.nbytes

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def checksum_after(patch: Patch, base: U8) -> str:
    """XXH3-128 of the tensor with `patch`, whose parts cover it, without making it."""
    hashed = Hashed()
    for part in patch.parts:
        hashed.take(part, base[part.start : part.start + part.nbytes])
    return hashed.hexdigest()


def part_of(start: int, encoding: int, payload: bytes, base: U8, width: int) -> Part:
    """A chunk as a part of its tensor; `base` are the parent's bytes. Raises WireError("bad_chunk")."""
    found = chunk_changes(encoding, payload, base, width)
    if found is not None:
        return Part(start, len(base), *found)
    fresh = np.empty(len(base), np.uint8)
    decode_chunk(encoding, payload, base, fresh, width)
    return Part(start, len(base), None, fresh)


def join(parts: Iterable[tuple[int, Part]], names: Mapping[int, str]) -> dict[str, Patch]:
    """Patches by tensor from parts in any order, each with its tensor's row."""
    by_row: dict[int, list[Part]] = {}
    for row, part in parts:
        by_row.setdefault(row, []).append(part)
    return {names[row]: Patch(tuple(sorted(found, key=lambda part: part.start))) for row, found in by_row.items()}


@dataclass(slots=True)
class After(Mapping[str, U8]):
    """name -> bytes as they will be with `patches`: those of `base` that stay, and new ones made when asked for."""

    base: Mapping[str, U8]
    patches: Mapping[str, Patch]
    names: tuple[str, ...]
    _last: tuple[str, U8] | None = field(default=None)

    def __getitem__(self, name: str) -> U8:
        if name not in self.patches:
            return self.base[name]
        if self._last is None or self._last[0] != name:  # whoever cuts a tensor into pieces asks for it often
            self._last = name, self.patches[name].dense(self.base.get(name))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names
