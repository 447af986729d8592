"""One delta is staged as the places and values it holds: small, exact, and harmless to write twice."""

import random

import numpy as np
import pytest
import torch

from headway.bus.blobs import ObstoreBlobs
from headway.schemas import signing
from headway.schemas.errors import PromiseViolated, WireError
from headway.schemas.manifest import DTYPE_BYTES
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.weight_sync import torch_apply
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror, _layout
from headway.weight_sync.patch import Part, Patch, checksum_after
from headway.weight_sync.publisher import Publisher, PublishSettings
from headway.weight_sync.tensors import RawTensor, checksum
from headway.weight_sync.transfer import Retrier, TransferLimits

KEY, KEYS = bytes(range(32)), Keys("demo")
SETTINGS = PublishSettings(chunk_bytes=8192, shard_bytes=8192, anchor_every=8)
"""Tensors go on from one shard to the next."""
SHAPES = {
    "a": ("BF16", (300, 200)),
    "b": ("F32", (64, 65)),
    "c": ("I64", (500,)),
    "d": ("U8", (9999,)),
    "e": ("BF16", (5,)),
}


def weights(n):
    """Version n; each step moves 1% of the elements, and all of "e"."""
    found = {}
    for name, (dtype, shape) in SHAPES.items():
        width = {"BF16": 2, "F32": 4, "I64": 8, "U8": 1}[dtype]
        lanes = np.random.default_rng(len(name)).integers(0, 1 << 8 * width - 1, np.prod(shape), f"u{width}")
        for step in range(1, n + 1):
            rng = np.random.default_rng(step)
            lanes[rng.random(len(lanes)) < (1 if name == "e" else 0.01)] += np.uint8(rng.integers(1, 4))
        found[name] = RawTensor(dtype=dtype, shape=shape, data=lanes.view(np.uint8))
    return found


class Line:
    def __init__(self, folder):
        self.folder, self.store, self.versions = folder, ObstoreBlobs.open("memory://"), []
        self.publisher = Publisher(store=self.store, keys=KEYS, private_key=KEY, settings=SETTINGS)
        retrier = Retrier(limits=TransferLimits(attempts_max=1), rng=random.Random(0))
        public = signing.public_key(KEY)
        self.fetcher = Fetcher(store=self.store.once(), keys=KEYS, public_key=public, retrier=retrier)

    async def publish(self, count):
        for n in range(len(self.versions), len(self.versions) + count):
            parent = self.versions[-1] if self.versions else None
            self.versions.append((await self.publisher.publish(Version(0, n), weights(n), parent))[0])

    def mirror(self, name="mirror"):
        return HostMirror(self.folder / name, signing.public_key(KEY), fsync=False)

    async def stage(self, n, mirror):
        return await self.fetcher.stage(Version(0, n), self.versions[n].digest, mirror)

    async def at(self, n):
        mirror = self.mirror()
        mirror.commit(await self.stage(n, mirror))
        return mirror


@pytest.fixture
def line(tmp_path):
    return Line(tmp_path)


def of(n):
    return {name: raw.data.tobytes() for name, raw in weights(n).items()}


def held(tensors):
    return {name: bytes(data) for name, data in tensors.items()}


async def test_one_delta_takes_the_memory_of_its_changes_and_gives_the_bytes_of_the_version(line):
    await line.publish(3)
    mirror = await line.at(0)
    for n in (1, 2):
        staged = await line.stage(n, mirror)
        assert sum(patch.nbytes for patch in staged.patches.values()) < 0.06 * sum(map(len, of(0).values()))
        assert held(mirror.fresh(staged)) == held(mirror.after(staged)) == of(n)
        assert held(mirror.tensors) == of(n - 1)
        mirror.commit(staged)
        assert held(mirror.tensors) == held(line.mirror().tensors) == of(n)


async def test_a_longer_way_ends_with_the_same_bytes(line):
    await line.publish(3)
    mirror = await line.at(0)
    staged = await line.stage(2, mirror)
    assert staged.stats.hops == 2
    assert all(patch.is_whole for patch in staged.patches.values())
    mirror.commit(staged)
    assert held(mirror.tensors) == of(2)


async def test_a_write_that_was_cut_off_anywhere_is_finished_by_writing_again(line):
    await line.publish(2)
    mirror = await line.at(0)
    staged = await line.stage(1, mirror)
    for name, patch in staged.patches.items():
        for cut in range(len(patch.parts)):
            torn = np.frombuffer(of(0)[name], np.uint8).copy()
            Patch(patch.parts[:cut]).write(torn)
            part = patch.parts[cut]
            if part.positions is not None:
                some = len(part.positions) // 2
                Part(part.start, part.nbytes, part.positions[:some], part.values[:some]).write(
                    torn[part.start :][: part.nbytes]
                )
            patch.write(torn)
            assert torn.tobytes() == of(1)[name]


async def test_the_checksum_of_what_will_be_needs_no_copy_of_the_tensor(line):
    await line.publish(2)
    mirror = await line.at(0)
    staged = await line.stage(1, mirror)
    for name, patch in staged.patches.items():
        assert checksum_after(patch, mirror.tensors[name]) == checksum(weights(1)[name].data)


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
async def test_one_wrong_byte_of_the_base_is_found_before_anything_is_written(line, name):
    """Also one that lies behind the last change of its chunk, or in an element that is written over."""
    await line.publish(2)
    mirror = await line.at(0)
    for at in (0, len(of(0)[name]) - 1):
        start = next(start for entry, start in _layout(mirror.head) if entry.name == name)
        mirror._map[start + at] ^= 1
        before = held(mirror.tensors)
        with pytest.raises(WireError) as caught:
            await line.stage(1, mirror)
        assert caught.value.reason in ("wrong_state", "bad_chunk")
        assert held(mirror.tensors) == before
        mirror._map[start + at] ^= 1


async def test_what_was_staged_against_another_base_is_never_put_on_this_one(line):
    await line.publish(3)
    mirror = await line.at(0)
    staged = await line.stage(1, mirror)
    mirror.commit(await line.stage(2, mirror))
    for use in (mirror.fresh, mirror.after, mirror.commit):
        with pytest.raises(PromiseViolated):
            use(staged)
    with pytest.raises(PromiseViolated):
        mirror.stage_partial_checkpoint(line.folder / "out", b"{}", staged)
    assert held(mirror.tensors) == of(2)


async def test_live_tensors_take_places_in_place(line):
    await line.publish(2)
    mirror = await line.at(0)
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}
    live = {
        name: torch.from_numpy(raw.data.copy()).view(dtypes[raw.dtype]).reshape(raw.shape)
        for name, raw in weights(0).items()
    }
    staged = await line.stage(1, mirror)
    for _ in range(2):
        torch_apply.apply(live, staged)
        assert torch_apply.root(live) == staged.manifest.root
    for name, patch in staged.patches.items():  # the way of a GPU, as far as a CPU can go it
        flat = torch.from_numpy(weights(0)[name].data.copy())
        torch_apply._write(flat, patch)
        assert flat.numpy().tobytes() == of(1)[name]


async def test_the_publisher_counts_what_changed_without_looking_twice(line):
    await line.publish(1)
    _, stats = await line.publisher.publish(Version(0, 1), weights(1), line.versions[0])
    elements = {name: raw.data.view(f"u{DTYPE_BYTES[raw.dtype]}") for name, raw in weights(1).items()}
    before = {name: raw.data.view(f"u{DTYPE_BYTES[raw.dtype]}") for name, raw in weights(0).items()}
    changed = sum(np.count_nonzero(elements[name] != before[name]) for name in elements)
    assert stats.changed_fraction == pytest.approx(changed / sum(map(len, elements.values())))
