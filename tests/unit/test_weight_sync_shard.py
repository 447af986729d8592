import math
import random

import numpy as np
import pytest

from headway.schemas.errors import WireError
from headway.schemas.manifest import TensorEntry
from headway.weight_sync.codec import decode_chunk
from headway.weight_sync.shard import (
    ENTRY,
    HEAD,
    EncodedChunk,
    build_shards,
    check_coverage,
    chunk_ranges,
    decode_shard,
    index_bytes,
    read_index,
)


def rows(*sizes):
    return [TensorEntry(name=f"t{i}", dtype="U8", shape=(size,), xxh3="0" * 32) for i, size in enumerate(sizes)]


def stored(row, offset, data):
    return EncodedChunk(row=row, raw_offset=offset, raw_bytes=len(data), encoding=1, width=1, payload=bytes(data))


def sample():
    chunks = [stored(0, 0, b"abc"), stored(0, 3, b"de"), stored(1, 0, b"xyz")]
    (shard,) = build_shards(chunks, 1 << 16)
    return shard


def test_a_shard_gives_back_its_tensors():
    out = {"t0": np.zeros(5, np.uint8), "t1": np.zeros(3, np.uint8)}
    chunks = decode_shard(sample(), rows(5, 3), None, out)
    assert check_coverage(chunks, rows(5, 3)) == {"t0", "t1"}
    assert (out["t0"].tobytes(), out["t1"].tobytes()) == (b"abcde", b"xyz")


def test_the_index_alone_locates_every_chunk_for_range_reads():
    shard = sample()
    end = index_bytes(shard[: HEAD.size])
    spans = [shard[c.offset : c.offset + c.size] for c in read_index(shard[:end], len(shard))]
    assert end == HEAD.size + 3 * ENTRY.itemsize
    assert spans == [b"abc", b"de", b"xyz"]


def test_layout_is_the_one_that_format_md_fixes():
    assert sample()[:48].hex() == (
        "48575348010020000300000000000000"  # HWSH, format 1, entries of 32 bytes, 3 chunks
        "0000000000000000000000000300000070000000000000000300000001010000"  # row, offsets, sizes, stored, width
    )


def test_chunks_are_cut_into_shards_in_order_without_splitting_one():
    chunks = [stored(0, i * 3000, bytes(3000)) for i in range(5)]
    shards = list(build_shards(chunks, 4096))
    assert [len(read_index(shard, len(shard))) for shard in shards] == [2, 2, 1]
    assert list(chunk_ranges([10_000], 1, 4096)) == [(0, 4096), (4096, 8192), (8192, 10_000)]
    assert list(chunk_ranges([0], 1, 4096)) == list(chunk_ranges([3, 0], 2, 4096)) == []


@pytest.mark.parametrize("shape", [(64, 96, 64), (6, 128, 64), (5, 40, 64), (512, 64), (24, 3000), (7, 9000), (9,)])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_chunks_tile_a_tensor_and_stay_inside_an_expert_and_a_rank_where_those_are_larger(shape, parts):
    ranges = list(chunk_ranges(shape, 2, 8192))
    nbytes = 2 * math.prod(shape)
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == nbytes
    assert all(0 < end - start <= 8192 for start, end in ranges)
    experts, rows = shape[0] if len(shape) > 2 else 1, shape[-2] if len(shape) > 1 else 1
    part = nbytes // experts // parts
    if rows % parts == 0 and part >= 8192:
        assert all(start // part == (end - 1) // part for start, end in ranges)


@pytest.mark.parametrize(("shape", "expert"), [((16, 64, 96), 5), ((16, 24, 20), 11)])
def test_a_reader_of_one_expert_fetches_its_bytes_and_few_of_others(shape, expert):
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, math.prod(shape) * 2, dtype=np.uint8)
    chunks = [stored(0, start, data[start:end]) for start, end in chunk_ranges(shape, 2, 4096)]
    shards = list(build_shards(chunks, 1 << 15))
    fetched, size = 0, len(data) // shape[0]
    out = {}

    def get(number, start, end):
        nonlocal fetched
        fetched += end - start
        return shards[number][start:end]

    for number, shard in enumerate(shards):
        index = get(number, 0, index_bytes(get(number, 0, HEAD.size)))
        for chunk in read_index(index, len(shard)):
            if chunk.raw_offset < (expert + 1) * size and chunk.raw_offset + chunk.raw_bytes > expert * size:
                raw = np.empty(chunk.raw_bytes, np.uint8)
                payload = get(number, chunk.offset, chunk.offset + chunk.size)
                decode_chunk(chunk.encoding, payload, None, raw, chunk.width)
                out[chunk.raw_offset] = raw.tobytes()
    begin = min(out)
    joined = b"".join(out[at] for at in sorted(out))
    assert joined[expert * size - begin :][:size] == data[expert * size :][:size].tobytes()
    overhead = sum(index_bytes(shard) + HEAD.size for shard in shards)
    assert fetched == overhead + len(joined)
    assert len(joined) == size if size >= 4096 else len(joined) <= 4096


@pytest.mark.parametrize("bad", [0, 1000, 4097, 1 << 30])
def test_unusable_chunk_and_shard_sizes_are_refused(bad):
    with pytest.raises(ValueError):
        chunk_ranges([10], 1, bad)
    with pytest.raises(ValueError):
        list(build_shards([], bad if bad != 4097 else 5))


def test_every_cut_and_every_flip_in_head_and_index_is_refused_or_harmless():
    shard, refused = sample(), 0
    for cut in range(len(shard)):
        with pytest.raises(WireError) as error:
            decode_shard(shard[:cut], rows(5, 3), None, {"t0": np.zeros(5, np.uint8), "t1": np.zeros(3, np.uint8)})
        assert error.value.reason == "bad_shard"
    for at in range(HEAD.size + 3 * ENTRY.itemsize):
        for bit in range(8):
            data = bytearray(shard)
            data[at] ^= 1 << bit
            refused += is_refused(bytes(data))
    assert refused == 8 * (HEAD.size + 3 * ENTRY.itemsize)


def is_refused(data):
    out = {"t0": np.zeros(5, np.uint8), "t1": np.zeros(3, np.uint8)}
    try:
        check_coverage(decode_shard(data, rows(5, 3), None, out), rows(5, 3))
    except WireError:
        return True
    return False


def test_random_bytes_never_crash():
    rng = random.Random(0)
    head = sample()[:8]
    assert all(is_refused(head + rng.randbytes(rng.randrange(200))) for _ in range(300))


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([stored(0, 0, b"abc")], "not whole"),
        ([stored(0, 0, b"abc"), stored(0, 2, b"cde")], "gaps or overlaps"),
        ([stored(0, 0, b"abc"), stored(0, 0, b"abc"), stored(0, 3, b"de")], "gaps or overlaps"),
        ([stored(0, 1, b"bcde")], "gaps or overlaps"),
        ([stored(0, 3, b"def")], "beyond the end"),
        ([stored(2, 0, b"abc")], "row 2"),
        ([stored(1, 0, b"xyz")], "did not change or is tied"),
    ],
)
def test_chunks_must_cover_known_tensors_exactly_once(chunks, why):
    (shard,) = build_shards(chunks, 1 << 16)
    with pytest.raises(WireError, match=why):
        check_coverage(decode_shard(shard, rows(5, 3), None, {"t0": np.zeros(5, np.uint8)}), rows(5, 3))


def test_a_shard_of_few_bytes_that_stands_for_much_is_closed_so_that_the_next_one_arrives_meanwhile(monkeypatch):
    monkeypatch.setattr("headway.weight_sync.shard.RAW_BYTES_MAX", 3000)
    chunks = [
        EncodedChunk(row=0, raw_offset=1000 * i, raw_bytes=1000, encoding=0, width=2, payload=b"") for i in range(8)
    ]
    made = [read_index(data, len(data)) for data in build_shards(chunks, 1 << 20)]
    assert [len(part) for part in made] == [3, 3, 2]
