"""Promise: whatever a chunk or a shard says, reading it ends in bytes of the right size or a typed error.

Every stream of every encoding is left out, cut short and flipped; hostile shards are read under a bound on memory.
"""

import contextlib
import os
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.schemas.errors import WireError
from headway.schemas.manifest import TensorEntry
from headway.weight_sync import codec
from headway.weight_sync.codec import Encoding, decode_chunk, encode_chunk
from headway.weight_sync.shard import EncodedChunk, build_shards, check_coverage, decode_shard

N = 5000


def weights():
    floats = np.random.default_rng(0).normal(0, 0.02, N).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype("<u2")


def made(name):
    """(encoding, payload, parent's bytes or None, new bytes) of bf16 weights."""
    rng, old = np.random.default_rng(1), weights()
    moves = rng.choice([-900, -2, -1, 1, 2, 40], N)
    rate = {"SPARSE": np.full(N, 0.05), "DENSE": np.full(N, 0.5)}
    rate["SPARSE_BY_EXPONENT"] = 2.0 ** (115.0 - (old >> 7 & 255))
    rate["DENSE_BY_EXPONENT"] = rate["DENSE"]
    n = 999 if name == "DENSE" else N
    if name in ("STORED", "ZSTD", "PLANES"):
        new = {"STORED": rng.integers(0, 256, N, np.uint8), "ZSTD": np.repeat(np.arange(50, dtype=np.uint8), 200)}
        data, base = new.get(name, old.view(np.uint8)), None
    else:
        base = old[:n].view(np.uint8)
        data = (old + np.where(rng.random(N) < rate.get(name, 0), moves, 0).astype("<u2"))[:n].view(np.uint8)
    encoding, payload = encode_chunk(data, base, 1 if name == "STORED" else 2)
    assert encoding.name == name
    return encoding, payload, base, data


def streams(encoding, payload):
    """name -> (start, end) of the parts that docs/FORMAT.md names."""
    if encoding in (Encoding.SPARSE, Encoding.SPARSE_BY_EXPONENT):
        changed, _, gaps, large, _, _, counts = struct.unpack("<IIIIBBH", payload[:20])
        sizes = {"head": 20, "counts": counts, "gaps": gaps, "signs": -(-changed // 8), "large gaps": large}
    elif encoding in (Encoding.DENSE, Encoding.DENSE_BY_EXPONENT):
        sizes = {"head": 8, "codes": struct.unpack("<II", payload[:8])[1]}
    else:
        sizes = {}
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = at, at + size
        at += size
    return {**found, "rest": (at, len(payload))}


def outcome(encoding, payload, base, size, width=2):
    out = np.zeros(size, np.uint8)
    try:
        decode_chunk(int(encoding), payload, base, out, width)
    except WireError as error:
        if error.reason != "bad_chunk":
            raise
        return None
    return out.tobytes()


@pytest.fixture(params=["numpy", "compiled"])
def loops(request, monkeypatch):
    if request.param == "compiled":
        pytest.importorskip("numba", reason="the extra `fast` is not installed")
        monkeypatch.setattr(codec, "FAST_FROM_BYTES", 0)


CODED = [name for name in Encoding.__members__ if name not in ("UNCHANGED", "STORED")]


@pytest.mark.parametrize("name", CODED)
def test_a_missing_or_short_stream_is_refused(name, loops):
    encoding, payload, base, data = made(name)
    for start, end in streams(encoding, payload).values():
        assert start == end or outcome(encoding, payload[:start] + payload[end:], base, len(data)) is None
        for cut in {1, 2, (end - start) // 2} - {0}:
            if end - start >= cut:
                assert outcome(encoding, payload[: end - cut] + payload[end:], base, len(data)) is None
    assert outcome(encoding, payload + b"\0", base, len(data)) is None
    assert outcome(encoding, b"", base, len(data)) is None


@pytest.mark.parametrize("name", CODED)
def test_a_flipped_bit_in_any_stream_is_refused_or_gives_other_bytes_of_the_right_size(name, loops):
    encoding, payload, base, data = made(name)
    unharmed = 0
    for start, end in streams(encoding, payload).values():
        for at in {*range(start, min(end, start + 24)), *range(start, end, max(1, (end - start) // 40))}:
            damaged = bytearray(payload)
            damaged[at] ^= 1 << at % 8
            found = outcome(encoding, bytes(damaged), base, len(data))
            assert found is None or len(found) == len(data)
            unharmed += found == data.tobytes()
    assert unharmed <= 4  # bits that fill up a byte, or that a frame's header leaves unused


ROWS = [
    TensorEntry(name="a", dtype="BF16", shape=(N,), xxh3="0" * 32),
    TensorEntry(name="b", dtype="U8", shape=(300,), xxh3="0" * 32),
]
EXTREMES = st.sampled_from([0, 1, 2, 3, 7, 8, 255, 1 << 15, (1 << 20) + 1, (1 << 31) - 1, (1 << 32) - 1])


def whole_shard(name):
    encoding, payload, base, data = made(name)
    chunk = EncodedChunk(row=0, raw_offset=0, raw_bytes=len(data), encoding=int(encoding), width=2, payload=payload)
    (shard,) = build_shards([chunk], 1 << 20)
    return shard, {"a": base if base is not None else weights().view(np.uint8), "b": np.zeros(300, np.uint8)}


@st.composite
def hostile_shards(draw):
    """A shard with fields of its head, index or payload overwritten, bytes flipped, cut or added."""
    shard, base = whole_shard(draw(st.sampled_from(["SPARSE", "SPARSE_BY_EXPONENT", "DENSE_BY_EXPONENT", "PLANES"])))
    data = bytearray(shard)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.one_of(st.integers(0, 72), st.integers(0, len(data) - 4)))
        data[at : at + 4] = struct.pack("<I", draw(st.one_of(EXTREMES, st.integers(0, 2**32 - 1))))
        if draw(st.booleans()):
            data[16 + 28] = draw(st.integers(0, 9))
    if draw(st.booleans()):
        del data[draw(st.integers(1, len(data))) :]
    return bytes(data) + draw(st.binary(max_size=4)), base


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(hostile_shards())
def test_hostile_shards_raise_typed_errors_within_the_declared_memory(case):
    data, base = case
    out = {name: np.zeros(len(raw), np.uint8) for name, raw in base.items()}
    tracemalloc.start()
    try:
        with contextlib.suppress(WireError):
            check_coverage(decode_shard(data, ROWS, base, out), ROWS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 32 * 2 * N + 8 * len(data) + (1 << 20)


CHILD = """
import random, resource, struct, sys
import numpy as np
from headway.schemas.errors import WireError
from headway.weight_sync import codec
codec.FAST_FROM_BYTES = int(sys.argv[1])
n, rng = codec.CHUNK_BYTES_MAX, random.Random(0)
old = (np.random.default_rng(0).normal(0, .02, n // 2).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
new = old + (np.random.default_rng(1).random(n // 2) < .29) * np.uint16(3)
made = [codec.encode_chunk(new.view(np.uint8), old.view(np.uint8), 2), codec.encode_chunk(new.view(np.uint8), None, 2)]
made.append(codec.encode_chunk(new.view(np.uint8), old.view(np.uint8), 1))
out = np.empty(n, np.uint8)
codec.decode_chunk(*made[0], old.view(np.uint8), out, 2)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 32 * n + (64 << 20),) * 2)
refused = 0
for i in range(40):
    encoding, payload = made[i % 3]
    data = bytearray(payload)
    for _ in range(rng.randint(0, 2)):
        at = rng.choice([0, 4, 8, 12, 16, 18, rng.randrange(len(data) - 4)])
        data[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 2**31 - 1, 2**32 - 1, n, n // 2, rng.getrandbits(32)]))
    try:
        codec.decode_chunk(rng.choice([int(encoding), rng.randrange(8)]), bytes(data), old.view(np.uint8), out, 2)
    except WireError:
        refused += 1
assert refused > 10, refused
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("fast_from", [1 << 18, 1 << 40])
def test_the_largest_chunk_is_read_within_the_declared_memory_whatever_it_says(fast_from):
    subprocess.run([sys.executable, "-P", "-W", "error", "-c", CHILD, str(fast_from)], check=True, timeout=300)
