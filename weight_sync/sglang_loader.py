"""A custom weight loader for SGLang: writes what `scatter.py` staged into the live weights, in place.

This file imports nothing of ours and runs in each of SGLang's workers. `--custom-weight-loader
headway.weight_sync.sglang_loader.load` offers it; `/update_weights_from_tensor` with that `load_format` calls
`load(model, [(path, tensor)])`, whose tensor is empty: the name is the folder of a staged update.

An exception here would kill the server, so none leaves: what came of it is `<folder>/<rank>.result`, JSON with
`ok`, `why`, `tensors`, `elements`, `ms` and `sums`: the XXH3-128 of all live tensors after the write, where they lie
in host memory. Everything is checked against the live model before the first write.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

try:
    import xxhash
except ImportError:  # SGLang brings it; where it doesn't, SGLang's own checksums are asked for
    xxhash = None  # type: ignore[assignment]

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
THREADS_MAX = 8
"""That write and hash tensors in host memory side by side: one core would make everyone wait for each in turn."""
POSITIONS, VALUES, WHOLE = ".positions", ".values", ".whole"
Write = tuple[Tensor, Tensor | None, Tensor]


def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write each update named in `named_tensors` into `model`; never raises."""
    rank = _rank()
    for name, _ in named_tensors:
        started_s = time.perf_counter()
        try:
            with torch.no_grad():
                written = _write(dict(model.named_parameters()), Path(name), rank)
            result: dict[str, Any] = {"ok": True, "why": "", **written}
        except BaseException as error:
            result = {"ok": False, "why": repr(error)[:1000]}
        result["ms"] = (time.perf_counter() - started_s) * 1e3
        _tell(Path(name), rank, result)


def _write(params: Mapping[str, Tensor], folder: Path, rank: int) -> dict[str, Any]:
    """Check the whole update, then write it; returns counts and sums. Raises ValueError, OSError, SafetensorError."""
    with safe_open(folder / f"{rank}.safetensors", framework="pt") as staged:
        shapes = json.loads(staged.metadata()["shapes"])
        if extra := shapes.keys() ^ params.keys():
            raise ValueError(f"{len(extra)} tensors are not in both model and update, such as {min(extra)!r}")
        for name, (shape, width) in shapes.items():
            live = params[name]
            if list(live.shape) != shape or live.element_size() != width or not live.is_contiguous():
                raise ValueError(f"{name!r} is {live.dtype} {list(live.shape)} here, not {shape} of {width} bytes")
        keys = [key for key in sorted(staged.keys()) if not key.endswith(VALUES)]
        writes = {key.rpartition(".")[0]: _fitting(staged, key, params) for key in keys}
        elements, sums = _put_all(params, writes)
    return {"tensors": len(writes), "elements": elements, "sums": sums}


def _put_all(params: Mapping[str, Tensor], writes: Mapping[str, Write]) -> tuple[int, dict[str, str] | None]:
    """Make the writes; how many elements, and the sums of all tensors afterwards.

    No sums on a GPU, where SGLang's own checksums are the faster ones, and without xxhash.
    """
    if xxhash is None or any(live.device.type != "cpu" for live in params.values()):
        return sum(_put(*write) for write in writes.values()), None

    inference = torch.is_inference_mode_enabled()  # each thread has modes of its own

    def put_and_sum(name: str) -> tuple[int, str]:
        with torch.no_grad(), torch.inference_mode(inference):
            count = _put(*writes[name]) if name in writes else 0
            view = params[name].detach().view(-1).view(torch.uint8).numpy()
        return count, xxhash.xxh3_128_hexdigest(view.data)

    largest_first = sorted(params, key=lambda name: params[name].nbytes, reverse=True)
    with ThreadPoolExecutor(min(THREADS_MAX, os.cpu_count() or 1)) as threads:
        done = dict(zip(largest_first, threads.map(put_and_sum, largest_first), strict=True))
    return sum(count for count, _ in done.values()), {name: digest for name, (_, digest) in done.items()}


def _fitting(staged: Any, key: str, params: Mapping[str, Tensor]) -> Write:
    """(flat live tensor as integers, positions or None, values), checked. Raises ValueError."""
    name, _, kind = key.rpartition(".")
    live = params[name].detach()
    flat = live.view(-1).view(INTEGERS[live.element_size()])
    found = staged.get_tensor(key)
    positions, values = (found, staged.get_tensor(name + VALUES)) if f".{kind}" == POSITIONS else (None, found)
    due = flat.shape if positions is None else positions.shape
    if values.dtype != flat.dtype or values.shape != due:
        raise ValueError(f"{name!r} has values {values.dtype} {list(values.shape)}, {flat.dtype} {list(due)} are due")
    if positions is not None and len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(flat):
        raise ValueError(f"{name!r} has positions outside its {len(flat)} elements")
    return flat, positions, values


def _put(flat: Tensor, positions: Tensor | None, values: Tensor) -> int:
    if positions is None:
        flat.copy_(values)
    else:
        flat.index_copy_(0, positions.to(flat.device, torch.int64), values.to(flat.device))
    return len(values)


def _rank() -> int:
    """This worker's place in its tensor-parallel group."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)
    except (ImportError, AttributeError, ValueError, RuntimeError):  # no SGLang, or none with ranks
        return 0


def _tell(folder: Path, rank: int, result: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # no result, or a torn one, is a failure to whoever waits for it
        (folder / f"{rank}.result").write_text(json.dumps(result))
