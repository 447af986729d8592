"""What a staged version changes, as a file for an engine that keeps its old tensors while it makes the new ones.

`<folder>/weights.changes` is a safetensors file. A tensor that changed is `<name>.positions` (flat, int32 or int64)
with `<name>.values`, the new elements as unsigned integers, or `<name>.whole`, its bytes, whichever is smaller. The
values are absolute. The file is as large as the delta, not as the tensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from headway.schemas.errors import WireError
from headway.weight_sync.codec import U8
from headway.weight_sync.patch import Patch
from headway.weight_sync.staged import StagedUpdate

FILE = "weights.changes"
Ints = np.ndarray[Any, np.dtype[Any]]


def write_changes(folder: Path, staged: StagedUpdate, fresh: Mapping[str, U8]) -> Path:
    """Write `folder`, emptied before; `fresh` are the new bytes of what changed. Returns the folder."""
    arrays: dict[str, Ints] = {}
    for name, patch in staged.patches.items():
        places = _places(patch)
        if places is None:
            arrays[f"{name}.whole"] = fresh[name]
        else:
            arrays[f"{name}.positions"], arrays[f"{name}.values"] = places
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(arrays, folder / FILE)
    return folder


def read_changes(folder: Path) -> dict[str, tuple[Ints | None, Ints]]:
    """name -> (positions, new elements), or (None, all bytes). Raises WireError("bad_changes").

    That they fit the tensor is for whoever writes them to see.
    """
    try:
        arrays = load((folder / FILE).read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise WireError("bad_changes", f"cannot read {folder / FILE}", why=str(error)[:300]) from None
    found: dict[str, tuple[Ints | None, Ints]] = {}
    for key, array in arrays.items():
        name, _, kind = key.rpartition(".")
        if kind == "whole":
            found[name] = None, array
        elif kind == "values" and f"{name}.positions" in arrays:
            found[name] = arrays[f"{name}.positions"], array
        elif kind != "positions" or f"{name}.values" not in arrays:
            raise WireError("bad_changes", f"{folder / FILE}: {key[:200]!r} is no change", why="another format")
    return found


def _places(patch: Patch) -> tuple[Ints, Ints] | None:
    """Flat positions and new elements of a tensor's patch; None where all its bytes take no more."""
    size = sum(part.nbytes for part in patch.parts)
    kind = np.int32 if size <= np.iinfo(np.int32).max else np.int64
    positions, values = list[Ints](), list[Ints]()
    for part in patch.parts:
        if part.positions is None or part.values.itemsize != patch.parts[0].values.itemsize:
            return None
        positions.append((part.positions.astype(np.int64) + part.start // part.values.itemsize).astype(kind))
        values.append(part.values)
    if not positions:
        return None
    flat, elements = np.concatenate(positions), np.concatenate(values)
    return (flat, elements) if flat.nbytes + elements.nbytes < size else None
