"""What a rank tells the others of the micro-batches it computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from headway.schemas.errors import HeadwayError
from headway.trainer.mesh import Mesh

FAILURE = "failure"
FAILURE_CHARS_MAX = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Of one micro-batch. sums: over its tokens. columns: what `Agreement` judges, by token."""

    sums: dict[str, float]
    columns: dict[str, Tensor]


def exchange(mesh: Mesh, mine: Mapping[int, Report], failure: Exception | None) -> list[Report]:
    """The reports of all micro-batches, by their place; `mine` are this rank's.

    Raises `failure`, or on the other ranks a HeadwayError that tells of it, so that no rank goes on without another.
    """
    if mesh.size > 1:
        given = mesh.gather(_pack(mine, failure))
    if failure is not None:
        raise failure
    if mesh.size == 1:
        return [mine[number] for number in sorted(mine)]
    found: dict[int, Report] = {}
    for rank, data in enumerate(given):
        found |= _unpack(rank, data)
    return [found[number] for number in sorted(found)]


def _pack(reports: Mapping[int, Report], failure: Exception | None) -> bytes:
    if failure is not None:
        text = repr(failure)[:FAILURE_CHARS_MAX].encode()
        return save({FAILURE: torch.frombuffer(bytearray(text), dtype=torch.uint8)})
    tensors = {}
    for number, report in reports.items():
        for name, value in report.sums.items():
            tensors[f"{number}/sums/{name}"] = torch.tensor(value, dtype=torch.float64)
        for name, column in report.columns.items():
            tensors[f"{number}/columns/{name}"] = column.contiguous()
    return save(tensors)


def _unpack(rank: int, data: bytes) -> dict[int, Report]:
    tensors = load(data)
    if FAILURE in tensors:
        why = tensors[FAILURE].numpy().tobytes().decode("utf-8", "replace")
        raise HeadwayError(f"rank {rank} could not compute its share of the step", why=why)
    found: dict[int, Report] = {}
    for key, tensor in tensors.items():
        number, kind, name = key.split("/", 2)
        report = found.setdefault(int(number), Report(sums={}, columns={}))
        if kind == "sums":
            report.sums[name] = float(tensor)
        else:
            report.columns[name] = tensor
    return found


def summed(reports: Sequence[Report]) -> dict[str, float]:
    """Sums over all tokens, in the order of micro-batches."""
    sums: dict[str, float] = {"loss": 0.0}
    for report in reports:
        for name, value in report.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
