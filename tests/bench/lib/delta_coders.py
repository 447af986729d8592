"""Coders of weight deltas as `deltas.py` measures them.

Each is encode(parent, new, spans) -> (something to decode, stored bytes) and decode(that, served, spans), in place.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import xxhash
import zstandard

from headway.weight_sync import codec, sparse
from headway.weight_sync.codec import U8, decode_chunk, encode_chunk
from headway.weight_sync.shard import EncodedChunk, build_shards

CHUNK_BYTES, SHARD_BYTES = 1 << 20, 64 << 20
Span = tuple[int, int]


def flat_module() -> ModuleType:
    """The sparse coder, compiled where it can be, without classes."""
    name = "sparse_fast" if importlib.util.find_spec("numba") else "sparse"
    with mock.patch.object(sparse, "CLASSES_FROM_ELEMENTS", 1 << 40):
        copied = shutil.copy(Path(sparse.__file__).with_name(f"{name}.py"), tempfile.mkdtemp())  # a cache of its own
        spec = importlib.util.spec_from_file_location(f"{name}_flat", copied)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    if name == "sparse":
        module.CLASSES_FROM_ELEMENTS = 1 << 40
    return module


FLAT = flat_module()


@dataclass(slots=True)
class Coder:
    name: str
    encode: Callable[[U8, U8, list[Span]], tuple[Any, int]]
    decode: Callable[[Any, U8, list[Span]], None] | None
    slow: bool = False
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    size: int = 0
    nbytes: int = 0
    encode_over_memcpy: list[float] = field(default_factory=list)
    decode_over_memcpy: list[float] = field(default_factory=list)
    encode_gb_s: list[float] = field(default_factory=list)
    decode_gb_s: list[float] = field(default_factory=list)


def cuts(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    return (
        (row, (at, min(at + CHUNK_BYTES, end)))
        for row, (start, end) in enumerate(spans)
        for at in range(start, end, CHUNK_BYTES)
    )


def ours_encode(old: U8, new: U8, spans: list[Span]) -> tuple[Any, int]:
    def chunks() -> Iterator[EncodedChunk]:
        for row, (a, b) in cuts(spans):
            encoding, payload = encode_chunk(new[a:b], old[a:b], 2)
            made.append((a, b, int(encoding), payload))
            yield EncodedChunk(row=row, raw_offset=a, raw_bytes=b - a, encoding=encoding, width=2, payload=payload)

    made: list[tuple[int, int, int, bytes]] = []
    size = 0
    for shard in build_shards(chunks(), SHARD_BYTES):
        hashlib.sha256(shard).digest()
        size += len(shard)
    for a, b in spans:
        xxhash.xxh3_128_digest(new[a:b])
    return made, size


def ours_decode(made: Any, served: U8, spans: list[Span]) -> None:
    for a, b, encoding, payload in made:
        here = served[a:b]
        decode_chunk(encoding, payload, here, here, 2)


def xor_encode(old: U8, new: U8, spans: list[Span]) -> tuple[Any, int]:
    made, size, compressor = [], 0, zstandard.ZstdCompressor(level=1)
    for _, (a, b) in cuts(spans):
        made.append((a, b, compressor.compress(np.bitwise_xor(new[a:b], old[a:b]))))
        hashlib.sha256(made[-1][2]).digest()
        size += len(made[-1][2])
    for a, b in spans:
        xxhash.xxh3_128_digest(new[a:b])
    return made, size


def xor_decode(made: Any, served: U8, spans: list[Span]) -> None:
    decompressor = zstandard.ZstdDecompressor()
    for a, b, payload in made:
        served[a:b] ^= np.frombuffer(decompressor.decompress(payload), np.uint8)


def indices_encode(old: U8, new: U8, spans: list[Span]) -> tuple[Any, int]:
    made, size = [], 0
    for _, (a, b) in cuts(spans):
        x, y = old[a:b].view("<u2"), new[a:b].view("<u2")
        where = np.flatnonzero(x != y).astype("<u4")
        made.append((a, b, where, y[where]))
        hashlib.sha256(where).update(made[-1][3])
        size += where.nbytes + made[-1][3].nbytes
    for a, b in spans:
        xxhash.xxh3_128_digest(new[a:b])
    return made, size


def indices_decode(made: Any, served: U8, spans: list[Span]) -> None:
    for a, b, where, values in made:
        served[a:b].view("<u2")[where] = values


def arc_tensors(data: U8, spans: list[Span]) -> dict[str, Any]:
    import torch

    return {
        f"t{i:05}": torch.from_numpy(data[a:b]).view(torch.bfloat16).view(-1, 4096 if (b - a) % 8192 == 0 else 1)
        for i, (a, b) in enumerate(spans)
    }


def arc_encode(old: U8, new: U8, spans: list[Span]) -> tuple[Any, int]:
    from fireworks_delta_compression import delta_compress_dicts

    diffs, checksums = delta_compress_dicts(arc_tensors(old, spans), arc_tensors(new, spans), "arc_v3")
    return (diffs, checksums), sum(diff.nbytes for diff in diffs.values())


def arc_decode_seconds(made: Any, old: U8, new: U8, spans: list[Span]) -> float:
    """CPU seconds of its in-place decoder, which works on files (here in memory)."""
    import torch
    from fireworks_delta_compression import delta_decompress_inplace
    from safetensors.torch import load_file, save_file

    diffs, checksums = made
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        base, diff = f"{folder}/base.safetensors", f"{folder}/diff.safetensors"
        save_file(arc_tensors(old.copy(), spans), base)
        save_file(diffs, diff, metadata=checksums)
        began = time.process_time()
        delta_decompress_inplace(base_path=base, diff_path=diff, compression_format="arc_v3")
        took = time.process_time() - began
        for name, tensor in load_file(base).items():
            a, b = spans[int(name[1:])]
            assert np.array_equal(tensor.view(-1).view(torch.uint8).numpy(), new[a:b])
    return took


def only_numpy() -> AbstractContextManager[Any]:
    return mock.patch.object(codec, "_compiled", return_value=sparse)


def only_flat() -> AbstractContextManager[Any]:
    return mock.patch.object(codec, "_compiled", return_value=FLAT)


def coders() -> list[Coder]:
    made = [
        Coder("ours", ours_encode, ours_decode),
        Coder("ours, flat", ours_encode, ours_decode, within=only_flat),
        Coder("ours, numpy", ours_encode, ours_decode, slow=True, within=only_numpy),
        Coder("xor + zstd-1", xor_encode, xor_decode),
        Coder("idx32 + values", indices_encode, indices_decode),
    ]
    if importlib.util.find_spec("fireworks_delta_compression"):
        made.append(Coder("arc_v3", arc_encode, None, slow=True))
    if importlib.util.find_spec("numba") is None:
        made[0].slow = made[1].slow = True
    return made
