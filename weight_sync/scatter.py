"""A staged version as sparse writes into an engine's fused tensors: what `sglang_loader` puts in place.

One safetensors file for each rank, `<folder>/<rank>.safetensors`. A fused tensor that changed is either
`<name>.positions` (flat, i32 or i64) and `<name>.values`, the new elements as integers of their width, or
`<name>.whole`, whichever is smaller. The values are absolute, so that a write that is repeated does no harm.
The metadata's `shapes` holds [shape, bytes an element] of every tensor that the rank must have.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headway.schemas.errors import WireError
from headway.schemas.manifest import DTYPE_BYTES, Manifest
from headway.weight_sync.codec import U8
from headway.weight_sync.layouts import Fused, Piece, Range, Shape, fuse

INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
Ints = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank's loader said. `ms` is the time inside the worker; `sums` are of all live tensors, if taken."""

    tensors: int
    elements: int
    ms: float
    sums: dict[str, str] | None


def write_scatter(
    folder: Path, ranks: Sequence[Mapping[str, Fused]], manifest: Manifest, old: Mapping[str, U8], new: Mapping[str, U8]
) -> int:
    """Stage the step from `old` (the whole base) to `new` (tensors that differ); returns bytes written.

    An empty `new` stages a check: that each rank's live tensors have the names, shapes and widths of `manifest`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shapes = {entry.name: entry.shape for entry in manifest.tensors}
    widths = {entry.name: DTYPE_BYTES[entry.dtype] for entry in manifest.tensors}
    for number, fused in enumerate(ranks):
        due = {name: (list(t.shape), widths[t.pieces[0].source]) for name, t in fused.items()}
        arrays: dict[str, Ints] = {}
        for name, tensor in fused.items():
            if any(piece.source in new for piece in tensor.pieces):
                arrays |= _changes(name, tensor, shapes, due[name][1], old, new)
        save_file(arrays, folder / f"{number}.safetensors", metadata={"shapes": json.dumps(due)})
    return sum(path.stat().st_size for path in folder.iterdir())


def read_results(folder: Path, ranks: int) -> list[Written]:
    """What each rank wrote. Raises WireError("not_written") naming the first that did not, and why."""
    found = []
    for rank in range(ranks):
        try:
            result = json.loads((folder / f"{rank}.result").read_bytes())
            if result["ok"] is not True:
                raise ValueError(str(result["why"])[:400])
            counts = int(result["tensors"]), int(result["elements"]), float(result["ms"])
            found.append(Written(*counts, None if result["sums"] is None else dict(result["sums"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WireError("not_written", f"rank {rank} did not take the update", why=str(error)[:400]) from None
    return found


def _changes(
    name: str, tensor: Fused, shapes: Mapping[str, Shape], width: int, old: Mapping[str, U8], new: Mapping[str, U8]
) -> dict[str, Ints]:
    kind = INTEGERS[width]
    size = int(np.prod(tensor.shape))
    index = np.int32 if size <= np.iinfo(np.int32).max else np.int64
    at, values = [], []
    for piece in tensor.pieces:
        if piece.source in new:
            before, after = (
                side[piece.source].view(kind).reshape(shapes[piece.source])[_block(piece.take)] for side in (old, new)
            )
            where = np.flatnonzero(before != after)
            at.append(_flat(where, piece, tensor.shape).astype(index))
            values.append(after.reshape(-1)[where])
    positions, elements = np.concatenate(at), np.concatenate(values)
    if positions.nbytes + elements.nbytes >= size * width:
        whole = {p.source: new.get(p.source, old[p.source]) for p in tensor.pieces}
        return {f"{name}.whole": fuse(tensor, whole, shapes, width).view(kind)}
    return {f"{name}.positions": positions, f"{name}.values": elements}


def _block(ranges: tuple[Range, ...]) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in ranges)


def _flat(where: Ints, piece: Piece, shape: Shape) -> Ints:
    """Flat places in the fused tensor of the elements `where` (flat in the block)."""
    starts = [start for start, _ in piece.put]
    block = [stop - start for start, stop in piece.put]
    if block[-1] == shape[-1] and all(size == 1 for size in block[:-2]):  # one run of whole rows
        return where + np.ravel_multi_index(starts, shape)
    places = np.unravel_index(where, block)
    return np.ravel_multi_index([p + s for p, s in zip(places, starts, strict=True)], shape)
