"""Hugging Face checkpoint folders from raw bytes: config.json and one model.safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.bus.failpoints import failpoint
from headway.schemas.manifest import TensorEntry
from headway.weight_sync.codec import U8


def write_checkpoint(
    folder: Path, config_json: bytes, entries: Sequence[TensorEntry], tensors: Mapping[str, U8]
) -> Path:
    """Write `folder`/config.json and `folder`/model.safetensors; the latter appears whole or not at all.

    `tensors` is asked for one of `entries` at a time. Returns the folder, which is made when absent.
    Format: 8-byte header size, JSON header, tensors.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        span = [offset, offset + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(config_json)
    partial = folder / "model.safetensors.partial"
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            file.write(tensors[entry.name].data)
    failpoint("weights.rename.before")
    os.replace(partial, folder / "model.safetensors")
    failpoint("weights.rename.after")
    return folder
