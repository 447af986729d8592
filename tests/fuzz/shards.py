"""Coverage-guided hostile shards: reading one ends in bytes of the right size or in a WireError.

    python -P tests/fuzz/shards.py -max_total_time=60 [-rss_limit_mb=512] [a folder to keep findings in]

Needs the extra `fuzz`. An input is a shard that claims to change one tensor. Where numba is installed the
compiled reader must agree with the numpy one, and what is staged as places and values with both.
Anything but a WireError stops the run.
"""

from __future__ import annotations

import functools
import sys

import atheris

with atheris.instrument_imports(include=["headway.weight_sync"]):
    from headway.weight_sync import codec, patch, shard
    from headway.weight_sync.tensors import checksum

import numpy as np

from headway.schemas.errors import WireError
from headway.schemas.manifest import TensorEntry

N = 5000
ROWS = [TensorEntry(name="w", dtype="BF16", shape=(N,), xxh3="0" * 32)]
OLD = (np.random.default_rng(0).normal(0, 0.02, N).astype(np.float32).view(np.uint32) >> 16).astype("<u2")


@functools.cache
def seeds() -> list[bytes]:
    """Whole shards of several encodings, to start from."""
    rng, found = np.random.default_rng(1), []
    for rate in (0.01, 0.2, 0.6):
        new = OLD + (rng.random(N) < rate * 2.0 ** (120.0 - (OLD >> 7 & 255))) * rng.choice([-1, 1, 5], N).astype("<u2")
        for base in (OLD.view(np.uint8), None):
            encoding, payload = codec.encode_chunk(new.view(np.uint8), base, 2)
            chunk = shard.EncodedChunk(
                row=0, raw_offset=0, raw_bytes=2 * N, encoding=int(encoding), width=2, payload=payload
            )
            found += shard.build_shards([chunk], 1 << 20)
    return found


def read(data: bytes, fast_from: int) -> bytes | None:
    codec.FAST_FROM_BYTES = fast_from
    out = {"w": np.zeros(2 * N, np.uint8)}
    try:
        shard.check_coverage(shard.decode_shard(data, ROWS, {"w": OLD.view(np.uint8)}, out), ROWS)
    except WireError:
        return None
    return out["w"].tobytes()


def staged(data: bytes) -> bytes | None:
    old = OLD.view(np.uint8)
    try:
        chunks, parts, sums = shard.patch_shard(data, ROWS, {"w": old}, {"w"})
        shard.check_coverage(chunks, ROWS)
    except WireError:
        return None
    fresh = patch.join([(0, part) for part in parts], {0: "w"})["w"].dense(old)
    if sums and sums[0] != checksum(fresh):
        raise RuntimeError("another state was hashed than is staged")
    return fresh.tobytes()


def one_input(data: bytes) -> None:
    found = [read(data, 1 << 40), read(data, 0), staged(data)]
    if found.count(found[0]) != len(found):
        raise RuntimeError("the readers disagree")


def main() -> None:
    for whole in seeds():
        assert read(whole, 0) is not None
    atheris.Setup([*sys.argv, f"-max_len={max(map(len, seeds())) + 64}"], one_input, custom_mutator=mutate)
    atheris.Fuzz()


def mutate(data: bytes, size_max: int, seed: int) -> bytes:
    """Mostly small changes of a whole shard: random bytes alone would rarely pass the head."""
    base = seeds()[seed % len(seeds())] if seed % 5 == 0 or len(data) < 48 else data
    return bytes(atheris.Mutate(base, size_max))


if __name__ == "__main__":
    main()
