"""Hugging Face model folders in and out: config.json + safetensors, under the exact tensor names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headway.kernels.config import ModelConfig
from headway.kernels.weights import check_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
JSON_BYTES_MAX = 64 << 20


def load_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json. Raises ValueError (OSError when it can't be read)."""
    return ModelConfig.from_hf(_read_json(folder / "config.json"))


def load(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The config and every tensor, bf16 or fp32 as stored, on the CPU.

    Raises ValueError naming the first tensor that is missing, misshapen, unknown or of another dtype.
    """
    config = load_config(folder)
    weights: dict[str, Tensor] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error}") from error
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    try:
        check_tensors({name: tuple(w.shape) for name, w in weights.items()}, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    for name, w in weights.items():
        if w.dtype not in _DTYPES:
            raise ValueError(f"{folder}: tensor {name} is {w.dtype}, only bfloat16 and float32 are read")
    return config, weights


def save_folder(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors. The same weights give the same bytes.

    Raises ValueError for names, shapes or dtypes that don't fit config.
    """
    check_tensors({name: tuple(w.shape) for name, w in weights.items()}, config)
    dtypes = {w.dtype for w in weights.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        raise ValueError(f"weights must all be bfloat16 or all float32, got {sorted(map(str, dtypes))}")
    folder.mkdir(parents=True, exist_ok=True)
    described = {**config.to_hf(), "dtype": _DTYPES[dtypes.pop()]}
    (folder / "config.json").write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")
    plain = {name: weights[name].detach().cpu().contiguous() for name in sorted(weights)}
    (folder / SINGLE).write_bytes(save(plain, metadata={"format": "pt"}))


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        names = sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{folder / INDEX} names {name!r}, which is not a file of that folder")
        return [folder / name for name in names]
    if not (folder / SINGLE).exists():
        raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")
    return [folder / SINGLE]


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > JSON_BYTES_MAX:
        raise ValueError(f"{path} is larger than {JSON_BYTES_MAX} bytes")
    try:
        parsed = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} holds a JSON {type(parsed).__name__}, not an object")
    return parsed
