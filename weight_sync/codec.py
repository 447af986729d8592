"""How one chunk of a tensor becomes bytes: whole, or as integer differences to the parent's bytes.

Elements are compared and subtracted as unsigned integers with wrap-around, never as floats, so ±0, NaN
payloads and infinities survive. Few changes are listed with their places (`sparse`). Of many, a difference d
is folded to u = 2d or -2d-1 (zigzag), so that one unit in the last place is 1 or 2; codes of two bits hold u
below 3, the rest are exceptions; both go through zstd.

`*_BY_EXPONENT` groups elements by the exponent of the *parent's* value, which both sides know: small
weights move by many ulps and large ones by none. Byte layout: docs/FORMAT.md, "Chunk payloads".
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import struct
from collections.abc import Sequence
from enum import IntEnum
from types import ModuleType
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from headway.schemas.errors import WireError
from headway.weight_sync import sparse
from headway.weight_sync.rice import I32
from headway.weight_sync.sparse import Lanes, keys

U8 = NDArray[np.uint8]

CHUNK_BYTES_MAX = 4 << 20
"""With it a chunk takes at most about 128 MiB while it is worked on, whatever its bytes say."""
WIDTHS = (1, 2, 4)
SORT_FROM_ELEMENTS = 4096
BLOCK_BYTES_MIN = 1024
"""A zstd block, with its own entropy table, must be this large to pay for itself."""
DELTA_LEVEL = 1
FULL_LEVEL = 3
FAST_FROM_BYTES = 1 << 18
"""From this chunk size on compiled loops are worth loading."""

_ESCAPE_CODE = 3
_DENSE_HEAD = struct.Struct("<II")
_BYTE = np.arange(256, dtype="<u4")
_UNPACK = _BYTE & 3 | (_BYTE >> 2 & 3) << 8 | (_BYTE >> 4 & 3) << 16 | (_BYTE >> 6) << 24
"""A packed byte -> four bytes of one code each."""


class Encoding(IntEnum):
    UNCHANGED = 0
    STORED = 1
    ZSTD = 2
    PLANES = 3
    SPARSE = 4
    SPARSE_BY_EXPONENT = 5
    DENSE = 6
    DENSE_BY_EXPONENT = 7


def encode_chunk(new: U8, base: U8 | None, width: int) -> tuple[Encoding, bytes]:
    """Encode `new` (uint8 [n]) against the parent's bytes `base` (uint8 [n], or None for an anchor).

    `width` is the element size in bytes, one of WIDTHS. Returns the smallest encoding found and its payload;
    the same input gives the same bytes with the same zstd build. Raises ValueError on sizes that don't fit.
    """
    if width not in WIDTHS or len(new) > CHUNK_BYTES_MAX or (base is not None and len(base) != len(new)):
        raise ValueError(f"a chunk of {len(new)} bytes of width {width} cannot be encoded")
    if base is None:
        return _encode_full(new, width)
    old_lanes, new_lanes = _lanes(base, width), _lanes(new, width)
    n = len(new_lanes)
    few = _sparse(len(new)).encode(old_lanes, new_lanes)
    if few is not None:
        by_exponent, payload = few
        if not payload:
            return Encoding.UNCHANGED, b""
        encoding = Encoding.SPARSE
    else:
        by_exponent, encoding = n >= SORT_FROM_ELEMENTS, Encoding.DENSE
        payload = _encode_dense(old_lanes, new_lanes, by_exponent)
    if len(payload) > len(new) // 2:
        full, whole = _encode_full(new, width)
        if len(whole) <= len(payload):
            return full, whole
    return Encoding(encoding + by_exponent), payload


def decode_chunk(encoding: int, payload: bytes | memoryview, base: U8 | None, out: U8, width: int) -> None:
    """Write the chunk's bytes into `out` (uint8 [n]); `base` is the parent's chunk (uint8 [n]) or None.

    `out` may be `base` itself, which is faster. Allocates at most 32 n + 1 MiB whatever the payload says.
    Raises WireError("bad_chunk") on anything that `encode_chunk` would not have written; `out` is then
    undefined.
    """
    _require(width in WIDTHS and len(out) <= CHUNK_BYTES_MAX, "width or size out of range")
    _require(encoding in Encoding.__members__.values(), f"unknown encoding {encoding}")
    kind, data = Encoding(encoding), bytes(payload)
    if kind is Encoding.STORED:
        _require(len(data) == len(out), "stored bytes do not fill the chunk")
        out[:] = np.frombuffer(data, np.uint8)
    elif kind is Encoding.ZSTD:
        out[:] = _inflate(data, len(out))
    elif kind is Encoding.PLANES:
        _decode_planes(data, _lanes(out, width))
    else:
        _require(base is not None and len(base) == len(out), "a difference without its parent's bytes")
        assert base is not None
        lanes = _lanes(out, width)
        _decode_difference(kind, data, lanes if base is out else _lanes(base, width), lanes)


def chunk_changes(encoding: int, payload: bytes, base: U8, width: int) -> tuple[I32, Lanes] | None:
    """(positions, new values) of the elements of `width` bytes that a sparse or unchanged chunk changes.

    Positions are int32 [changed], each once; None for chunks that hold all their elements, or when `base`
    is no row of such elements. Raises WireError("bad_chunk").
    """
    if len(base) % width:
        return None
    lanes = _lanes(base, width)
    if encoding == Encoding.UNCHANGED:
        _require(not payload, "an unchanged chunk carries bytes")
        return np.empty(0, np.int32), np.empty(0, lanes.dtype)
    if encoding not in (Encoding.SPARSE, Encoding.SPARSE_BY_EXPONENT):
        return None
    found = _sparse(lanes.nbytes).changes(payload, lanes, encoding == Encoding.SPARSE_BY_EXPONENT)
    _require(found is not None, "lists of changes do not fit the chunk")
    return found  # type: ignore[no-any-return]


def changes_in(encoding: int, payload: bytes) -> int | None:
    """How many elements a chunk of ours changes, where it says so."""
    if encoding in (Encoding.SPARSE, Encoding.SPARSE_BY_EXPONENT):
        return int.from_bytes(payload[:4], "little")
    return 0 if encoding == Encoding.UNCHANGED else None


def scatter(out: Lanes, positions: I32, values: Lanes) -> None:
    """Write `values` into `out` where `positions` say, which lie inside it."""
    _sparse(out.nbytes).scatter(out, positions, values)


def _decode_difference(kind: Encoding, data: bytes, base: Lanes, out: Lanes) -> None:
    if kind in (Encoding.DENSE, Encoding.DENSE_BY_EXPONENT):
        diff = _unzigzag(_decode_dense(data, len(out), out.dtype))
        if kind is Encoding.DENSE_BY_EXPONENT:
            unsorted = np.empty_like(diff)
            unsorted[np.argsort(keys(base), kind="stable")] = diff
            diff = unsorted
        np.add(base, diff, out=out)
        return
    if out is not base:
        out[:] = base
    if kind is Encoding.UNCHANGED:
        _require(not data, "an unchanged chunk carries bytes")
    else:
        right = _sparse(out.nbytes).apply(data, out, kind is Encoding.SPARSE_BY_EXPONENT)
        _require(right, "lists of changes do not fit the chunk")


def warm_up(width: int) -> None:
    """Have what reads chunks of this width compiled, or loaded: a second or two that the first delta need not wait."""
    lanes = np.zeros(FAST_FROM_BYTES // width, f"<u{width}")
    fresh, held = lanes.copy(), lanes.copy()
    fresh[:100] += 1
    held.flags.writeable = False
    _, payload = encode_chunk(fresh.view(np.uint8), lanes.view(np.uint8), width)
    decode_chunk(Encoding.SPARSE, payload, lanes.view(np.uint8), lanes.view(np.uint8), width)
    found = chunk_changes(Encoding.SPARSE, payload, held.view(np.uint8), width)
    assert found is not None
    scatter(lanes, *found)


def _sparse(size_bytes: int) -> ModuleType:
    """Compiled loops where numba is installed and the chunk is worth them, numpy otherwise; the same bytes."""
    return _compiled() if size_bytes >= FAST_FROM_BYTES else sparse


@functools.cache
def _compiled() -> ModuleType:
    return importlib.import_module(f"{__package__}.sparse_fast") if importlib.util.find_spec("numba") else sparse


# Whole chunks


def _encode_full(new: U8, width: int) -> tuple[Encoding, bytes]:
    lanes = _lanes(new, width)
    candidates = [(Encoding.STORED, new.tobytes()), (Encoding.ZSTD, _deflate([new.tobytes()], FULL_LEVEL))]
    if lanes.itemsize > 1:
        rotated = lanes << 1 | lanes >> (8 * lanes.itemsize - 1)  # the exponent becomes the top byte
        planes = [plane.tobytes() for plane in _to_planes(rotated)]
        candidates.append((Encoding.PLANES, _deflate(planes, FULL_LEVEL)))
    return min(candidates, key=lambda candidate: (len(candidate[1]), candidate[0]))


def _decode_planes(data: bytes, out: Lanes) -> None:
    rotated = _from_planes(_inflate(data, out.nbytes), out.dtype)
    out[:] = rotated >> 1 | rotated << (8 * out.itemsize - 1)


# Differences


def _encode_dense(old: Lanes, new: Lanes, by_exponent: bool) -> bytes:
    """Codes, exceptions; by exponent, block borders are wished for where the exponent changes."""
    cuts: list[int] = []
    if by_exponent:
        exponents = keys(old)
        order = np.argsort(exponents, kind="stable")
        cuts = np.searchsorted(exponents[order], np.arange(1, 256)).tolist()
        old, new = old[order], new[order]
    codes, exceptions = _pack(_zigzag(new - old))
    frame = _deflate(_split(codes, [cut // 4 for cut in cuts]), DELTA_LEVEL)
    rest = _deflate([plane.tobytes() for plane in _to_planes(exceptions)], DELTA_LEVEL)
    return _DENSE_HEAD.pack(len(exceptions), len(frame)) + frame + rest


def _decode_dense(data: bytes, n: int, dtype: np.dtype[Any]) -> Lanes:
    _require(len(data) >= _DENSE_HEAD.size, "a dense header is cut off")
    n_exceptions, codes_size = _DENSE_HEAD.unpack_from(data)
    codes, exceptions = _frames(data[_DENSE_HEAD.size :], codes_size)
    return _unpack(codes, exceptions, n, n_exceptions, dtype)


def _pack(symbols: Lanes) -> tuple[U8, Lanes]:
    """Two-bit codes, four a byte (uint8 [ceil(n/4)]), and what exceeds them (symbol - 3)."""
    codes = np.zeros(-(-len(symbols) // 4) * 4, np.uint8)
    np.minimum(symbols, _ESCAPE_CODE, out=codes[: len(symbols)], casting="unsafe")
    quads = codes.view("<u4")
    packed = (quads | quads >> 6 | quads >> 12 | quads >> 18).astype(np.uint8)
    return packed, symbols[np.flatnonzero(symbols >= _ESCAPE_CODE)] - _ESCAPE_CODE


def _unpack(codes: bytes, exceptions: bytes, n: int, n_exceptions: int, dtype: np.dtype[Any]) -> Lanes:
    _require(n_exceptions <= n, "more exceptions than elements")
    packed = _inflate(codes, -(-n // 4))
    symbols = _UNPACK[packed].view(np.uint8)[:n].astype(dtype)
    large = _from_planes(_inflate(exceptions, n_exceptions * dtype.itemsize), dtype)
    where = np.flatnonzero(symbols == _ESCAPE_CODE)
    _require(len(where) == n_exceptions, "codes and exceptions disagree")
    symbols[where] += large
    return symbols


# Small parts


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise WireError("bad_chunk", "a weight chunk cannot be decoded", why=why)


def _lanes(raw: U8, width: int) -> Lanes:
    """`raw` as integers of `width` bytes, or as bytes where the size is no multiple (both sides agree)."""
    return raw.view(f"<u{width}") if len(raw) % width == 0 else raw


def _zigzag(diff: Lanes) -> Lanes:
    folded: Lanes = diff << 1 ^ np.negative(diff >> (8 * diff.itemsize - 1))
    return folded


def _unzigzag(symbols: Lanes) -> Lanes:
    diff: Lanes = symbols >> 1 ^ np.negative(symbols & 1)
    return diff


def _to_planes(lanes: Lanes) -> U8:
    """uint8 [itemsize, n]: least significant bytes first."""
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(len(lanes), lanes.itemsize).T


def _from_planes(planes: U8, dtype: np.dtype[Any]) -> Lanes:
    lanes: Lanes = np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)
    return lanes


def _split(stream: U8, cuts: Sequence[int]) -> list[bytes]:
    """Cut `stream` at `cuts` (rising), skipping cuts that would leave less than a useful block."""
    borders = [0]
    for cut in cuts:
        if cut - borders[-1] >= BLOCK_BYTES_MIN and len(stream) - cut >= BLOCK_BYTES_MIN:
            borders.append(cut)
    return [stream[a:b].tobytes() for a, b in zip(borders, [*borders[1:], len(stream)], strict=True)]


def _deflate(parts: Sequence[bytes], level: int) -> bytes:
    """One zstd frame that declares its size, with a block border after each part; b"" for no bytes."""
    size = sum(map(len, parts))
    if size == 0:
        return b""
    compressor = zstandard.ZstdCompressor(level=level).compressobj(size=size)
    out = []
    for part in parts[:-1]:
        out += [compressor.compress(part), compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*out, compressor.compress(parts[-1]), compressor.flush()])


def _inflate(frame: bytes, size: int) -> U8:
    """Exactly `size` bytes (the caller bounded it) from one frame that declares exactly that."""
    if size == 0:
        _require(not frame, "a frame where no bytes are due")
        return np.empty(0, np.uint8)
    try:
        _require(zstandard.frame_content_size(frame) == size, "a frame declares another size")
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError("bad_chunk", "a weight chunk cannot be decoded", why=str(error)[:200]) from None
    _require(len(raw) == size, "a frame holds another size")
    return np.frombuffer(raw, np.uint8)


def _frames(data: bytes, *sizes: int) -> list[bytes]:
    """Cut `data` into frames of `sizes` and the rest."""
    _require(sum(sizes) <= len(data), "frames overrun the payload")
    frames, start = [], 0
    for size in sizes:
        frames.append(data[start : start + size])
        start += size
    return [*frames, data[start:]]
