"""Shard files: chunks of tensors behind an index, named by the SHA-256 of the file.

A shard belongs to a manifest: a chunk names its tensor by its row in the manifest's table. Chunks lie in
table order; a tensor may go on in the next shard, a chunk never does. Layout: docs/FORMAT.md, "Shards".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.schemas.errors import WireError
from headway.schemas.manifest import DTYPE_BYTES, SHARD_BYTES_MAX, TensorEntry
from headway.weight_sync.codec import CHUNK_BYTES_MAX, U8, decode_chunk
from headway.weight_sync.patch import Hashed, Part, part_of

MAGIC = b"HWSH"
FORMAT = 1
HEAD = struct.Struct("<4sHHII")
"""magic, format, entry size in bytes, number of chunks, reserved (0)."""
ENTRY = np.dtype(
    [
        ("row", "<u4"),
        ("raw_offset", "<u8"),
        ("raw_bytes", "<u4"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("encoding", "u1"),
        ("width", "u1"),
        ("reserved", "<u2"),
    ]
)
CHUNKS_MAX = 1 << 20
RAW_BYTES_MAX = 256 << 20
"""A shard is closed by the chunk that brings what it stands for to this."""
CHUNK_BYTES_MIN = 4096
TENSOR_PARALLEL_MAX = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Raw bytes [raw_offset, raw_offset + raw_bytes) of tensor `row`, as bytes [offset, offset + size) of a shard."""

    row: int
    raw_offset: int
    raw_bytes: int
    offset: int
    size: int
    encoding: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChunk:
    """A chunk that has not got its place in a shard yet."""

    row: int
    raw_offset: int
    raw_bytes: int
    encoding: int
    width: int
    payload: bytes


def element_width(dtype: str) -> int:
    """The width the codec works in: eight-byte elements are coded as pairs of four."""
    return min(DTYPE_BYTES[dtype], 4)


def chunk_ranges(shape: Sequence[int], itemsize: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, end) of a tensor's chunks, of at most `chunk_bytes`, a multiple of 8 between 4 KiB and 4 MiB.

    Borders fall on those of stacked experts (the first of three dimensions) and of tensor-parallel blocks of rows: a
    dimension is halved until the block fits, rows at most to TENSOR_PARALLEL_MAX. So whoever needs one expert or
    the rows of one rank reads few bytes of others, none where blocks are not smaller than a chunk.
    """
    if chunk_bytes % 8 or not CHUNK_BYTES_MIN <= chunk_bytes <= CHUNK_BYTES_MAX:
        raise ValueError(f"chunk_bytes {chunk_bytes} is no multiple of 8 in {CHUNK_BYTES_MIN}..{CHUNK_BYTES_MAX}")
    nbytes = math.prod(shape) * itemsize
    block = _block_bytes(shape, nbytes, chunk_bytes)
    return (
        (start, min(start + chunk_bytes, first + block))
        for first in range(0, nbytes, max(block, 1))
        for start in range(first, first + block, chunk_bytes)
    )


def _block_bytes(shape: Sequence[int], nbytes: int, chunk_bytes: int) -> int:
    """The largest of the nested blocks that fits a chunk, or the smallest there is; it divides `nbytes`."""
    experts, rows = (shape[0] if len(shape) > 2 else 1), (shape[-2] if len(shape) > 1 else 1)
    while nbytes > chunk_bytes and experts > 1:
        step = 2 if experts % 2 == 0 else experts
        nbytes, experts = nbytes // step, experts // step
    parts = 1
    while nbytes > chunk_bytes and parts < TENSOR_PARALLEL_MAX and rows % 2 == 0:
        nbytes, rows, parts = nbytes // 2, rows // 2, parts * 2
    return nbytes


def build_shards(chunks: Iterable[EncodedChunk], shard_bytes: int) -> Iterator[bytes]:
    """Pack chunks, in order, into shards of about `shard_bytes` (one chunk more at most), fewer where they say much.

    What a reader decodes of one shard, RAW_BYTES_MAX, it decodes while the next one arrives.
    """
    if not CHUNK_BYTES_MIN <= shard_bytes <= SHARD_BYTES_MAX // 2:
        raise ValueError(f"shard_bytes {shard_bytes} is not in {CHUNK_BYTES_MIN}..{SHARD_BYTES_MAX // 2}")
    held: list[EncodedChunk] = []
    size = raw = 0
    for chunk in chunks:
        held.append(chunk)
        size += len(chunk.payload) + ENTRY.itemsize
        raw += chunk.raw_bytes
        if size >= shard_bytes or raw >= RAW_BYTES_MAX:
            yield _assemble(held)
            held, size, raw = [], 0, 0
    if held:
        yield _assemble(held)


def _assemble(chunks: list[EncodedChunk]) -> bytes:
    offset = HEAD.size + ENTRY.itemsize * len(chunks)
    index = np.zeros(len(chunks), ENTRY)
    for i, c in enumerate(chunks):
        index[i] = (c.row, c.raw_offset, c.raw_bytes, offset, len(c.payload), c.encoding, c.width, 0)
        offset += len(c.payload)
    head = HEAD.pack(MAGIC, FORMAT, ENTRY.itemsize, len(chunks), 0)
    return b"".join([head, index.tobytes(), *(c.payload for c in chunks)])


def index_bytes(head: bytes) -> int:
    """How many bytes from the start of a shard hold its index; `head` is the first HEAD.size bytes or more.

    Raises WireError("bad_shard").
    """
    _require(len(head) >= HEAD.size, "the header is cut off")
    magic, number, entry_size, n_chunks, reserved = HEAD.unpack_from(head)
    _require(magic == MAGIC, "not a shard file")
    _require(number == FORMAT, f"format {number}; this build reads {FORMAT}")
    _require(entry_size == ENTRY.itemsize and reserved == 0, "header fields out of range")
    _require(0 < n_chunks <= CHUNKS_MAX, f"{n_chunks} chunks")
    return int(HEAD.size + ENTRY.itemsize * n_chunks)


def read_index(start: bytes, size_bytes: int) -> list[Chunk]:
    """The chunks of a shard of `size_bytes`, from its first `index_bytes` bytes or more.

    Payloads must tile the rest of the file exactly. Raises WireError("bad_shard").
    """
    end = index_bytes(start)
    _require(end <= len(start) and end <= size_bytes, "the index is cut off")
    index = np.frombuffer(start, ENTRY, offset=HEAD.size, count=(end - HEAD.size) // ENTRY.itemsize)
    stops = end + np.cumsum(index["size"], dtype=np.uint64)
    _require(int(stops[-1]) == size_bytes, "payloads do not fill the file")
    _require(bool((index["offset"] == stops - index["size"]).all()), "payloads overlap or leave gaps")
    _require(int(index["raw_bytes"].max()) <= CHUNK_BYTES_MAX, "a chunk is too large")
    _require(int(index["raw_bytes"].min()) > 0 and not index["reserved"].any(), "chunk fields out of range")
    fields = [name for name in ENTRY.names or () if name != "reserved"]
    return [Chunk(**dict(zip(fields, map(int, entry), strict=False))) for entry in index[fields]]


def decode_shard(
    data: bytes, rows: list[TensorEntry], base: Mapping[str, U8] | None, out: Mapping[str, U8]
) -> list[Chunk]:
    """Decode a whole shard into `out` (name -> uint8 [nbytes], writable) against the parent's bytes `base`.

    `out` holds exactly the tensors that may have chunks.

    `rows` is the manifest's table. Returns the chunks, for the check that they cover their tensors.
    Raises WireError("bad_shard" | "bad_chunk"); `out` is then undefined.
    """
    chunks = read_index(data, len(data))
    for chunk in chunks:
        entry = _entry_of(chunk, rows, out)
        old = None if base is None else _bytes_of(chunk, base[entry.name])
        payload = data[chunk.offset : chunk.offset + chunk.size]
        decode_chunk(chunk.encoding, payload, old, _bytes_of(chunk, out[entry.name]), chunk.width)
    return chunks


def patch_shard(
    data: bytes, rows: list[TensorEntry], base: Mapping[str, U8], changed: Container[str]
) -> tuple[list[Chunk], list[Part], dict[int, str]]:
    """What a whole shard of a delta changes of the parent's bytes `base`: its chunks, a part for each, and checksums.

    `changed` are the tensors that may have chunks. The checksums (row -> XXH3-128 of the new bytes) are of tensors that
    lie in this shard from their first chunk to their last. Raises WireError("bad_shard" | "bad_chunk").
    """
    chunks, parts, sums = read_index(data, len(data)), list[Part](), dict[int, str]()
    hashed, row = Hashed(), -1
    for chunk in chunks:
        entry = _entry_of(chunk, rows, changed)
        old, payload = _bytes_of(chunk, base[entry.name]), data[chunk.offset : chunk.offset + chunk.size]
        part = part_of(chunk.raw_offset, chunk.encoding, payload, old, chunk.width)
        parts.append(part)
        if chunk.raw_offset == 0:
            row = chunk.row
            hashed.restart()
        if (chunk.row, chunk.raw_offset) == (row, hashed.at):
            hashed.take(part, old)
            if hashed.at == entry.nbytes:
                sums[row] = hashed.hexdigest()
    return chunks, parts, sums


def _entry_of(chunk: Chunk, rows: list[TensorEntry], allowed: Container[str]) -> TensorEntry:
    _require(chunk.row < len(rows), f"row {chunk.row} of a table of {len(rows)}")
    entry = rows[chunk.row]
    _require(entry.name in allowed, f"chunks for {entry.name!r}, which did not change or is tied")
    _require(chunk.raw_offset + chunk.raw_bytes <= entry.nbytes, f"a chunk beyond the end of {entry.name!r}")
    _require(chunk.width == element_width(entry.dtype), f"{entry.name!r} is not of that width")
    return entry


def _bytes_of(chunk: Chunk, tensor: U8) -> U8:
    return tensor[chunk.raw_offset : chunk.raw_offset + chunk.raw_bytes]


def check_coverage(chunks: Iterable[Chunk], rows: list[TensorEntry]) -> set[str]:
    """The names of the tensors that `chunks` cover, each exactly once and whole, else WireError("bad_shard")."""
    by_row: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_row.setdefault(chunk.row, []).append(chunk)
    for row, parts in by_row.items():
        at = 0
        for chunk in sorted(parts, key=lambda chunk: chunk.raw_offset):
            _require(chunk.raw_offset == at, f"{rows[row].name!r} has gaps or overlaps")
            at += chunk.raw_bytes
        _require(at == rows[row].nbytes, f"{rows[row].name!r} is not whole")
    return {rows[row].name for row in by_row}


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise WireError("bad_shard", "a weight shard cannot be read", why=why)
