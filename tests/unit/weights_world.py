"""A run of weight versions against in-memory and folder stores that misbehave on request."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.schemas import signing
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.publisher import Published, Publisher, PublishSettings
from headway.weight_sync.tensors import RawTensor
from headway.weight_sync.transfer import Retrier, TransferLimits

KEY = bytes(range(32))
KEYS = Keys("demo")
ALIASES = {"lm_head.weight": "embed.weight"}
SETTINGS = PublishSettings(chunk_bytes=8192, shard_bytes=1 << 15, anchor_every=4)


class Unruly:
    """A store that counts what is asked of it, and damages what a test tells it to."""

    def __init__(self, inner):
        self.inner, self.gets, self.order = inner, Counter(), []
        self.damage = {}  # key -> (times, function of the bytes)

    async def put(self, key, data):
        self.order.append(key)
        await self.inner.put(key, data)

    def _damaged(self, key, data):
        self.gets[key] += 1
        times, change = self.damage.get(key, (0, None))
        if times:
            self.damage[key] = (times - 1, change)
            return change(data)
        return data

    async def get(self, key):
        return self._damaged(key, await self.inner.get(key))

    async def get_range(self, key, start, end):
        return self._damaged(key, await self.inner.get_range(key, start, end))


def bf16(values):
    return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


class World:
    """A run whose versions are published one after another."""

    def __init__(self, store, folder: Path, settings=SETTINGS, pool=None):
        self.store, self.folder = Unruly(store), folder
        self.publisher = Publisher(store=self.store, keys=KEYS, private_key=KEY, settings=settings, pool=pool)
        self.rng = np.random.default_rng(0)
        self.masters = {
            "embed.weight": self.rng.normal(0, 0.05, (64, 96)).astype(np.float32),
            "experts.w": self.rng.normal(0, 0.05, (4, 96, 33)).astype(np.float32),
            "frozen": np.ones((7,), np.float32),
            "scale": np.float32(1.0).reshape(()),
            "void": np.zeros((0, 3), np.float32),
        }
        self.versions: list[Published] = []

    def weights(self):
        return {
            name: RawTensor(dtype="BF16", shape=m.shape, data=bf16(m.reshape(-1))) for name, m in self.masters.items()
        }

    def step(self):
        for name in ("embed.weight", "experts.w", "scale"):
            noise = self.rng.normal(0, 1e-4, self.masters[name].shape)
            self.masters[name] = (self.masters[name] + noise).astype(np.float32)

    async def publish(self, count=1, epoch=0):
        for _ in range(count):
            parent = self.versions[-1] if self.versions else None
            if parent:
                self.step()
            version = Version(epoch, len(self.versions))
            published, stats = await self.publisher.publish(version, self.weights(), parent, ALIASES)
            self.versions.append(published)
        return stats

    def mirror(self, name="mirror"):
        return HostMirror(self.folder / name, signing.public_key(KEY), fsync=False)

    def fetcher(self, **limits):
        async def no_sleep(_):
            return None

        retrier = Retrier(limits=TransferLimits(**{"attempts_max": 3, **limits}), rng=random.Random(0), sleep=no_sleep)
        return Fetcher(store=self.store, keys=KEYS, public_key=signing.public_key(KEY), retrier=retrier)

    async def stage(self, n, mirror, **limits):
        target = self.versions[n]
        return await self.fetcher(**limits).stage(target.version, target.digest, mirror)

    def holds(self, mirror, n):
        tensors = {name: raw.tobytes() for name, raw in mirror.tensors.items()}
        return mirror.digest == self.versions[n].digest and tensors == {
            name: raw.data.tobytes() for name, raw in self.versions[n].tensors.items()
        }

    def a_shard(self, n, kind="delta"):
        return KEYS.shard(self.versions[n].manifest.shard_refs(kind)[0].sha256)


@pytest.fixture
def world(tmp_path):
    return World(ObstoreBlobs.open("memory://"), tmp_path)
