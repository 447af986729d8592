"""Weights of the engine: read from a checkpoint folder, checked whole, then swapped by one assignment.

Nothing of a new version touches the model before every name, shape and dtype was compared with the model
that is loaded, so a wrong or torn checkpoint leaves the old weights serving.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from headway.kernels.compiled import Order, Packed, pack
from headway.kernels.config import ModelConfig
from headway.kernels.numerics import INVARIANT, Numerics
from headway.kernels.quant import dequantise, stored_layout
from headway.kernels.selftest import compiled_decoding
from headway.kernels.weights import Prepared, prepare
from headway.rollout_agent.engine.requests import BadRequest
from headway.schemas.errors import WireError
from headway.weight_sync.changes import FILE as CHANGES
from headway.weight_sync.changes import read_changes
from headway.weight_sync.torch_apply import changed

CONFIG_BYTES_MAX = 1 << 20
HEADER_BYTES_MAX = 100 << 20
FILES_MAX = 4096
FLOATS = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One version: the tensors as they were read, and the fused ones that the model computes with."""

    version: str
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    prepared: Prepared
    packed: Packed | None = None  # for compiled decoding, where that is proven


def load_weights(
    folder: Path,
    version: str,
    current: Weights | None,
    compute_dtype: torch.dtype,
    numerics: Numerics = INVARIANT,
) -> tuple[Weights, int]:
    """The weights after `folder`, and how many tensors it touched.

    It is a full checkpoint, one of only the changed tensors, or what changes in them (`weight_sync/changes.py`). Copies
    everything out of the files. Raises BadRequest naming what doesn't fit; `current` is left alone.
    """
    config = _read_config(folder, current)
    bytes_max = 4 * sum(math.prod(shape) for shape in config.tensor_shapes().values())
    changes = current is not None and (folder / CHANGES).exists()
    fresh = _changed(folder, current, bytes_max) if changes else _read_tensors(folder, bytes_max)
    expected = _layout(config, current.tensors if current is not None else fresh)
    for name, tensor in fresh.items():
        if name not in expected:
            raise BadRequest(f"{folder}: tensor {name[:200]!r} is not part of the model")
        shape, due = expected[name]
        if tuple(tensor.shape) != shape:
            raise BadRequest(f"{folder}: {name} has shape {list(tensor.shape)}, {list(shape)} is due")
        if current is not None:
            due = (current.tensors[name].dtype,)
        if tensor.dtype not in due:
            raise BadRequest(f"{folder}: {name} is {tensor.dtype}, {' or '.join(map(str, due))} is due")
    tensors = {**(current.tensors if current is not None else {}), **fresh}
    if missing := expected.keys() - tensors.keys():
        raise BadRequest(
            f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)}",
            hint="the first checkpoint must be a full one",
        )
    with torch.no_grad():
        prepared = prepare(dequantise(tensors, torch.float32), config, compute_dtype)
        order = compiled_decoding(config, compute_dtype, numerics)
        packed = pack(prepared, config, order) if isinstance(order, Order) else None
    found = MappingProxyType(tensors)
    return Weights(version=version, config=config, tensors=found, prepared=prepared, packed=packed), len(fresh)


def _layout(
    config: ModelConfig, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]:
    """Shape and allowed dtypes of each tensor of a checkpoint that is quantised as `tensors` are, or not."""
    shapes = config.tensor_shapes()
    if any(name.endswith("_packed") for name in tensors):
        return {name: (shape, (dtype,)) for name, (shape, dtype) in stored_layout(shapes, "int4").items()}
    if any(tensor.dtype is torch.float8_e4m3fn for tensor in tensors.values()):
        return {name: (shape, (dtype,)) for name, (shape, dtype) in stored_layout(shapes, "fp8").items()}
    return {name: (shape, FLOATS) for name, shape in shapes.items()}


def _read_config(folder: Path, current: Weights | None) -> ModelConfig:
    path = folder / "config.json"
    if not path.exists() and current is not None:
        return current.config
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise BadRequest(f"{path} is larger than {CONFIG_BYTES_MAX} bytes")
        found: Any = json.loads(path.read_bytes())
        config = ModelConfig.from_hf(found if isinstance(found, dict) else {})
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BadRequest(f"cannot read {path}", why=str(error)[:300]) from None
    if current is not None and config != current.config:
        raise BadRequest(f"{path} describes another model than the one loaded", hint="restart the engine")
    return config


def _changed(folder: Path, current: Weights | None, bytes_max: int) -> dict[str, Tensor]:
    """Copies of the tensors of `current` that `folder` changes, with the changes."""
    assert current is not None
    if (folder / CHANGES).stat().st_size > bytes_max + HEADER_BYTES_MAX:
        raise BadRequest(f"{folder / CHANGES} is larger than the model")
    try:
        changes = read_changes(folder)
    except WireError as error:
        raise BadRequest(error.what, why=error.why) from None
    fresh = {}
    for name, (positions, values) in changes.items():
        if name not in current.tensors:
            raise BadRequest(f"{folder}: tensor {name[:200]!r} is not part of the model")
        try:
            fresh[name] = changed(current.tensors[name], positions, values)
        except ValueError as error:
            raise BadRequest(f"{folder}: changes of {name} do not fit it", why=str(error)[:300]) from None
    return fresh


def _read_tensors(folder: Path, bytes_max: int) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files or len(files) > FILES_MAX:
        raise BadRequest(f"{folder} holds {len(files)} safetensors files")
    found: dict[str, Tensor] = {}
    for path in files:
        try:
            if path.stat().st_size > bytes_max + HEADER_BYTES_MAX:
                raise BadRequest(f"{path} is larger than the model")
            part = safetensors.torch.load(path.read_bytes())
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
            raise BadRequest(f"cannot read {path}", why=str(error)[:300], hint="write it again") from None
        if twice := found.keys() & part.keys():
            raise BadRequest(f"{folder}: tensor {min(twice)[:200]} is in two files")
        found |= part
    return found
