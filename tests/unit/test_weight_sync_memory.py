"""Promise: publishing takes at most 256 MiB beyond the weights and the last-published snapshot."""

import asyncio
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.weight_sync.codec import CHUNK_BYTES_MAX
from headway.weight_sync.publisher import ENCODES_AHEAD_MAX, Publisher, PublishSettings
from headway.weight_sync.tensors import RawTensor

THREADS = 2
KEY = bytes(range(32))


class SlowStore:
    """Takes its time, so that as many shards are under way as may be."""

    async def put(self, key, data):
        await asyncio.sleep(0.02)


def bound_bytes(settings):
    """A shard being built and joined, those being put, chunks encoded ahead, and what a thread works with."""
    shards = settings.shard_bytes * (settings.parallel_puts + 2)
    return shards + settings.chunk_bytes * (ENCODES_AHEAD_MAX + 1) + 32 * settings.chunk_bytes * THREADS


def test_the_default_settings_stay_below_256_mib():
    assert PublishSettings().chunk_bytes <= CHUNK_BYTES_MAX
    assert bound_bytes(PublishSettings()) <= 256 << 20


def test_publishing_an_anchor_of_noise_stays_within_the_bound_of_its_settings():
    settings = PublishSettings(chunk_bytes=1 << 14, shard_bytes=1 << 18)
    raw = np.random.default_rng(0).integers(0, 256, 16 << 20, dtype=np.uint8)
    tensors = {"w": RawTensor(dtype="BF16", shape=(4096, 2048), data=raw)}

    async def publish(pool):
        publisher = Publisher(store=SlowStore(), keys=Keys("r"), private_key=KEY, settings=settings, pool=pool)
        await publisher.publish(Version(epoch=0, n=0), tensors, None)

    with ThreadPoolExecutor(THREADS) as pool:
        tracemalloc.start()
        try:
            asyncio.run(publish(pool))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < bound_bytes(settings) + (2 << 20) < len(raw)
