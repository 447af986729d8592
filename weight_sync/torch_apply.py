"""Live torch tensors and raw bytes: reading them for publishing and checksums, writing them in place.

The only file of the package that imports torch. What concerns CUDA was written without a GPU at hand: unverified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headway.schemas.errors import WireError
from headway.schemas.manifest import root_of
from headway.weight_sync.patch import Part, Patch
from headway.weight_sync.staged import StagedUpdate
from headway.weight_sync.tensors import RawTensor, checksum, table_of

DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.float64: "F64",
}

INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32}


def raw_tensors(live: Mapping[str, torch.Tensor]) -> dict[str, RawTensor]:
    """Each tensor's bytes: a view of contiguous CPU memory where there is one, else a copy.

    A view follows the tensor; pass detached clones to `Publisher.publish`, which keeps them as its base.
    Raises ValueError on a dtype that manifests don't know.
    """
    return {name: _raw(name, tensor) for name, tensor in live.items()}


def _raw(name: str, tensor: torch.Tensor) -> RawTensor:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name!r} has dtype {tensor.dtype}; one of {list(DTYPE_NAMES)}")
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return RawTensor(dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), data=flat.numpy())


def checksums(live: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """XXH3-128 of each tensor's bytes, 32 hex digits."""
    return {name: checksum(raw.data) for name, raw in raw_tensors(live).items()}


def root(live: Mapping[str, torch.Tensor]) -> str:
    """The root of live weights; equals the manifest's exactly when every byte does.

    `live` holds tied tensors under each of their names.
    """
    return root_of(table_of(raw_tensors(live)))


def check_layout(live: Mapping[str, torch.Tensor], staged: StagedUpdate) -> None:
    """Raise WireError("layout_changed") unless `live` has exactly the version's names, dtypes and shapes."""
    theirs = {e.name: (e.dtype, e.shape) for e in staged.manifest.tensors}
    ours = {name: (DTYPE_NAMES.get(t.dtype), tuple(t.shape)) for name, t in live.items()}
    for name in sorted(theirs.keys() | ours.keys()):
        if theirs.get(name) != ours.get(name):
            raise WireError(
                "layout_changed",
                f"tensor {name!r} is {ours.get(name)} in the model and {theirs.get(name)} in {staged.manifest.version}",
                why="a model takes only weights of its own layout",
            )
        if not live[name].is_contiguous():
            raise WireError("layout_changed", f"tensor {name!r} of the model is not contiguous")


def pinned(staged: StagedUpdate, device: torch.device) -> StagedUpdate:
    """`staged` in page-locked memory, from which `apply` copies to a CUDA device directly; for others `staged` itself.

    Call it while serving.
    """
    if device.type != "cuda":
        return staged
    return replace(staged, patches={name: _pinned(patch) for name, patch in staged.patches.items()})


def _pinned(patch: Patch) -> Patch:
    def locked(array: Any) -> Any:
        return None if array is None else torch.from_numpy(np.array(array)).pin_memory().numpy()

    return Patch(tuple(Part(p.start, p.nbytes, locked(p.positions), locked(p.values)) for p in patch.parts))


@torch.no_grad()
def apply(live: Mapping[str, torch.Tensor], staged: StagedUpdate) -> None:
    """Write what is staged into `live`, which holds the version it was staged against, in place, after checking it all.

    `live` holds tied tensors under each of their names, sharing memory or not. Pause the engine around it.
    Raises WireError("layout_changed") before the first write.
    """
    check_layout(live, staged)
    for entry in staged.manifest.tensors:
        owner = entry.alias or entry.name
        if owner in staged.patches:
            flat = live[entry.name].detach().view(-1).view(torch.uint8)
            if flat.device.type == "cpu":
                staged.patches[owner].write(flat.numpy())
            else:
                _write(flat, staged.patches[owner])
    for device in {tensor.device for tensor in live.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)  # before anybody computes with half of it


@torch.no_grad()
def changed(held: torch.Tensor, positions: Any, values: Any) -> torch.Tensor:
    """A copy of `held`, in host memory, with `values` (integers of an element's size) at flat `positions`.

    Without positions (None) `values` are all its bytes. Raises ValueError when they don't fit.
    """
    fresh = held.detach().clone(memory_format=torch.contiguous_format)
    raw = fresh.view(-1).view(torch.uint8).numpy()
    if positions is None:
        if values.dtype != np.uint8 or values.shape != raw.shape:
            raise ValueError(f"{values.nbytes} bytes for a tensor of {raw.nbytes}")
        raw[:] = values
        return fresh
    if values.dtype.kind != "u" or raw.nbytes % values.itemsize or values.itemsize > held.element_size():
        raise ValueError(f"elements of {values.dtype} for a tensor of {held.dtype}")
    lanes = raw.view(values.dtype)
    if positions.dtype.kind != "i" or positions.ndim != 1 or positions.shape != values.shape:
        raise ValueError(f"{positions.dtype} {positions.shape} positions of {values.shape} values")
    if len(positions) and not 0 <= positions.min() <= positions.max() < len(lanes):
        raise ValueError(f"positions beyond {len(lanes)} elements")
    lanes[positions] = values
    return fresh


def _write(flat: torch.Tensor, patch: Patch) -> None:
    """`Patch.write` for a tensor (uint8, flat) that is not in host memory."""
    for part in patch.parts:
        run = flat[part.start : part.start + part.nbytes]
        if part.positions is None:
            run.copy_(_writable(part.values), non_blocking=True)
        else:
            values = _writable(part.values.view(INTEGERS[part.values.itemsize]))
            places = _writable(part.positions).to(flat.device, torch.int64, non_blocking=True)
            run.view(values.dtype).index_copy_(0, places, values.to(flat.device, non_blocking=True))


def _writable(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.require(array, requirements="W"))
