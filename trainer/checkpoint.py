"""A trainer's whole state as one safetensors blob: fp32 masters, Adam's moments, counters. Nothing is pickled.

The same state gives the same bytes, hence the same SHA-256: the object store keeps a checkpoint under its
digest and writing it twice is a no-op. Tensors are named `master/<name>`, `exp_avg/<name>` and
`exp_avg_sq/<name>`; the counters are JSON under the single metadata key `headway` (one key, because
safetensors does not fix the order of several).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from headway.bus.failpoints import failpoint
from headway.schemas.errors import InputError
from headway.trainer.optim import MOMENTS

FORMAT = 1
COUNTERS_MAX = 64
COUNTER_MAX = 1 << 53
HEADER_BYTES_MAX = 100 << 20
MASTER = "master"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """masters: name -> fp32; moments: `exp_avg/<name>` and `exp_avg_sq/<name>` -> fp32; counters: whole numbers."""

    masters: dict[str, Tensor]
    moments: dict[str, Tensor]
    counters: dict[str, int]


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """The blob. Raises ValueError for a state that `from_bytes` would refuse."""
    tensors = {f"{MASTER}/{name}": tensor for name, tensor in checkpoint.masters.items()} | checkpoint.moments
    _check_shapes(tensors, {name: tuple(t.shape) for name, t in checkpoint.masters.items()})
    _check_counters(checkpoint.counters)
    note = json.dumps({"format": FORMAT, "counters": checkpoint.counters}, sort_keys=True)
    plain = {name: tensors[name].detach().contiguous().cpu().numpy() for name in sorted(tensors)}
    blob = _safetensors(plain, note)
    values_bytes = sum(array.nbytes for array in plain.values())
    if not np.isfinite(np.frombuffer(blob, "<f4", offset=len(blob) - values_bytes)).all():  # one pass over all of it
        _check_finite(tensors)
    return blob


def _safetensors(arrays: Mapping[str, np.ndarray[Any, Any]], note: str) -> bytes:
    """What safetensors writes of float32 arrays in the order of their names, with one copy of the values, not three."""
    header: dict[str, Any] = {"__metadata__": {"headway": note}}
    at = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    values = (array.astype("<f4", copy=False).data for array in arrays.values())
    return b"".join([len(text).to_bytes(8, "little"), text, *values])


def from_bytes(data: bytes, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Read a blob back; `shapes` says exactly which masters it must hold.

    Raises InputError for another format, a missing, surplus, misshapen or non-finite tensor.
    """
    try:
        counters = _read_counters(data)
        tensors = load(data)
        _check_shapes(tensors, shapes)
        _check_finite(tensors)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"a checkpoint of {len(data)} bytes cannot be used",
            why=str(error)[:300],
            hint="resume from an older checkpoint, or check that [model] is what the run began with",
        ) from None
    return Checkpoint(
        masters={name: tensors[f"{MASTER}/{name}"] for name in sorted(shapes)},
        moments={f"{kind}/{name}": tensors[f"{kind}/{name}"] for name in sorted(shapes) for kind in MOMENTS},
        counters=counters,
    )


def save_file(checkpoint: Checkpoint, path: Path) -> None:
    """Write the blob so that `path` holds either the old bytes or all of the new ones, also after power loss."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(to_bytes(checkpoint))
        file.flush()
        failpoint("checkpoint.fsync.before")
        os.fsync(file.fileno())
        failpoint("checkpoint.fsync.after")
    failpoint("checkpoint.rename.before")
    partial.replace(path)
    failpoint("checkpoint.rename.after")
    folder = os.open(path.parent, os.O_RDONLY)
    failpoint("checkpoint.folder.before")
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    failpoint("checkpoint.folder.after")


def load_file(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Read a file of `save_file`. Raises InputError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the checkpoint {path}", why=str(error)) from None
    return from_bytes(data, shapes)


def _read_counters(data: bytes) -> dict[str, int]:
    size = int.from_bytes(data[:8], "little")
    if not 2 <= size <= min(HEADER_BYTES_MAX, len(data) - 8):
        raise ValueError("not a safetensors file")
    note = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["headway"])
    if note["format"] != FORMAT:
        raise ValueError(f"format {str(note['format'])[:20]}, this build reads {FORMAT}")
    _check_counters(note["counters"])
    return dict(note["counters"])


def _check_counters(counters: Any) -> None:
    if not isinstance(counters, dict) or len(counters) > COUNTERS_MAX:
        raise ValueError("the counters are no small map")
    for name, value in counters.items():
        if type(value) is not int or not 0 <= value <= COUNTER_MAX:
            raise ValueError(f"counter {str(name)[:40]} is {str(value)[:40]}")


def _check_shapes(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    expected = {f"{kind}/{name}": shape for kind in (MASTER, *MOMENTS) for name, shape in shapes.items()}
    if odd := sorted(expected.keys() ^ tensors.keys()):
        raise ValueError(f"{len(odd)} tensors are missing or surplus, the first is {odd[0][:200]}")
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not float32 {expected[name]}")


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds NaN or infinity")
