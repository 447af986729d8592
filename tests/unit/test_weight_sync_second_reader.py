"""A second reader of shards, slow and plain, written from docs/FORMAT.md alone; it agrees with ours.

It shares no line with `headway.weight_sync`: bytes are integers, bits come one at a time.
"""

import itertools
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.weight_sync.codec import Encoding, decode_chunk, encode_chunk
from headway.weight_sync.shard import EncodedChunk, build_shards


class Bits:
    """Bits of some bytes, each byte from its lowest one."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def bit(self):
        byte = self.data[self.at // 8]
        self.at += 1
        return byte >> (self.at - 1) % 8 & 1

    def number(self, width):
        return sum(self.bit() << i for i in range(width))

    def zeros(self):
        count = 0
        while self.bit() == 0:
            count += 1
        return count


def read_list(data, count, group):
    if count == 0:
        assert data == b""
        return []
    n_groups = -(-count // group)
    parameters = [data[i // group] for i in range(count)]
    assert max(parameters) <= 31
    middle = n_groups + -(-sum(parameters) // 8)
    low, unary = Bits(data[n_groups:middle]), Bits(data[middle:])
    numbers = [low.number(p) + (unary.zeros() << p) for p in parameters]
    assert -(-unary.at // 8) == len(data) - middle
    return numbers


def elements(data, width):
    width = 1 if len(data) % width else width
    return width, [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


def key(element, width):
    bits = 8 * width
    magnitude = element & ((1 << bits - 1) - 1)
    return magnitude >> (bits - 1 - (4 if width == 1 else 8))


def inflate(frame, size):
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size) if size else b""


def from_planes(planes, width):
    n = len(planes) // width
    return [sum(planes[plane * n + i] << 8 * plane for plane in range(width)) for i in range(n)]


def read_sparse(payload, old, width):
    changed, large, gaps_size, large_size, top, n_classes, counts_size = struct.unpack("<IIIIBBH", payload[:20])
    cuts = [20, counts_size, gaps_size, -(-changed // 8), large_size]
    starts = list(itertools.accumulate(cuts))
    counts_list, gaps_list, signs, large_list = (payload[a:b] for a, b in itertools.pairwise(starts))
    counts = read_list(counts_list, n_classes, 8) if n_classes > 1 else [changed]
    gaps = read_list(gaps_list, changed, 256)
    moves = [1] * changed
    values = read_list(payload[starts[-1] :], large, 64)
    at = -1
    for gap, value in zip(read_list(large_list, large, 256), values, strict=True):
        at += gap + 1
        moves[at] = value + 2
    sign = Bits(signs)
    moves = [-move if sign.bit() else move for move in moves]
    new = list(old)
    for c in range(n_classes):
        members = [i for i, e in enumerate(old) if min(max((top - key(e, width)) // 2, 0), n_classes - 1) == c]
        rank = -1
        for _ in range(counts[c]):
            rank += gaps.pop(0) + 1
            new[members[rank]] += moves.pop(0)
    assert not gaps
    return new


def read_dense(payload, old, width, by_key):
    n_exceptions, size = struct.unpack("<II", payload[:8])
    codes = Bits(inflate(payload[8 : 8 + size], -(-len(old) // 4)))
    exceptions = from_planes(inflate(payload[8 + size :], n_exceptions * width), width)
    order = sorted(range(len(old)), key=lambda i: key(old[i], width)) if by_key else range(len(old))
    new = list(old)
    for i in order:
        symbol = codes.number(2)
        symbol += exceptions.pop(0) if symbol == 3 else 0
        new[i] += -(symbol + 1) // 2 if symbol % 2 else symbol // 2
    assert not exceptions
    return new


def read_chunk(encoding, payload, base, size, width):
    if encoding == 0:
        return base
    if encoding == 1:
        return payload
    if encoding == 2:
        return inflate(payload, size)
    if encoding == 3:
        width = 1 if size % width else width
        new = [(e >> 1) + (e % 2 << 8 * width - 1) for e in from_planes(inflate(payload, size), width)]
    else:
        width, old = elements(base, width)
        new = read_sparse(payload, old, width) if encoding in (4, 5) else read_dense(payload, old, width, encoding == 7)
    return b"".join((e % (1 << 8 * width)).to_bytes(width, "little") for e in new)


def read_shard(data, base):
    """Chunks as {row: bytes}, `base` alike."""
    magic, number, entry_size, n_chunks, reserved = struct.unpack("<4sHHII", data[:16])
    assert (magic, number, entry_size, reserved) == (b"HWSH", 1, 32, 0)
    rows = {}
    for i in range(n_chunks):
        entry = data[16 + 32 * i : 48 + 32 * i]
        row, start, raw, offset, size, encoding, width, _ = struct.unpack("<IQIQIBBH", entry)
        old = base[row][start : start + raw]
        rows.setdefault(row, bytearray())
        assert len(rows[row]) == start
        rows[row] += read_chunk(encoding, data[offset : offset + size], old, raw, width)
    return rows


def chunks_of(name, seed):
    """(new, base or None, width) that our writer encodes as `name`."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(5000, 6000)) if name.endswith("EXPONENT") else int(rng.integers(200, 900))
    width = int(rng.choice([1, 2, 4])) if name in ("UNCHANGED", "SPARSE", "DENSE") else 2
    weights = (rng.normal(0, 0.02, n).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    lanes = rng.integers(0, 1 << 8 * width, n, dtype=np.uint64).astype(f"<u{width}")
    spread = int(rng.integers(1, 400)) if width > 1 else 3
    moves = rng.integers(1, spread + 1, n) * rng.choice([-1, 1], n)
    if name == "STORED":
        return rng.integers(0, 256, n, dtype=np.uint8), None, 1
    if name == "ZSTD":
        return np.repeat(rng.integers(0, 256, 9, dtype=np.uint8), n), None, width
    if name == "PLANES":
        return weights.view(np.uint8), None, 2
    if name in ("SPARSE_BY_EXPONENT", "DENSE_BY_EXPONENT"):
        rate = (0.5 if name.startswith("SPARSE") else 40) * 2.0 ** (120.0 - (weights >> 7 & 255)) / 20
        moves[rng.random(n) >= rate] = 0
        return (weights + moves.astype("<u2")).view(np.uint8), weights.view(np.uint8), 2
    share = {"UNCHANGED": 0.0, "SPARSE": 0.02, "DENSE": 0.6}[name]
    moves[rng.random(n) >= share] = 0
    return (lanes + moves.astype(lanes.dtype)).view(np.uint8), lanes.view(np.uint8), width


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
@pytest.mark.parametrize("name", Encoding.__members__)
def test_both_readers_agree_on_what_the_writer_made(name, seed):
    new, base, width = chunks_of(name, seed)
    encoding, payload = encode_chunk(new, base, width)
    assert encoding.name == name or encoding in (Encoding.UNCHANGED, Encoding.SPARSE, Encoding.PLANES, Encoding.STORED)
    old = b"" if base is None else base.tobytes()
    assert read_chunk(int(encoding), payload, old, len(new), width) == new.tobytes()


@pytest.mark.parametrize("name", Encoding.__members__)
def test_every_encoding_is_among_what_the_second_reader_read(name):
    made = [encode_chunk(*chunks_of(name, seed))[0].name for seed in range(4)]
    assert name in made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=120), st.binary(max_size=120), st.sampled_from([1, 2, 4]))
def test_both_readers_agree_on_arbitrary_bytes_of_any_width(old, new, width):
    n = min(len(old), len(new))
    encoding, payload = encode_chunk(np.frombuffer(new[:n], np.uint8), np.frombuffer(old[:n], np.uint8), width)
    assert read_chunk(int(encoding), payload, old[:n], n, width) == new[:n]


def test_both_readers_agree_on_a_whole_shard():
    base, made = {}, []
    for row, name in enumerate(Encoding.__members__):
        new, old, width = chunks_of(name, 7)
        base[row] = b"" if old is None else old.tobytes()
        encoding, payload = encode_chunk(new, old, width)
        made.append(
            (
                new,
                EncodedChunk(
                    row=row, raw_offset=0, raw_bytes=len(new), encoding=int(encoding), width=width, payload=payload
                ),
            )
        )
    (shard,) = build_shards([chunk for _, chunk in made], 1 << 24)
    assert read_shard(shard, base) == {row: new.tobytes() for row, (new, _) in enumerate(made)}
    for new, chunk in made:
        out = np.zeros(len(new), np.uint8)
        old = base[chunk.row]
        decode_chunk(chunk.encoding, chunk.payload, np.frombuffer(old, np.uint8) if old else None, out, chunk.width)
        assert out.tobytes() == new.tobytes()
