"""Publishing versions: what appears when, and the same objects whatever the threads."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.schemas.manifest import Part
from headway.schemas.version import Version
from headway.schemas.wire import pack, unpack
from headway.weight_sync.publisher import _Tally

from .weights_world import ALIASES, KEYS, World
from .weights_world import world as world


async def test_a_version_appears_only_after_all_its_shards(world):
    stats = await world.publish(2)
    assert world.store.order[-1] == KEYS.manifest(world.versions[1].digest)
    assert 0.2 < stats.changed_fraction < 0.9
    assert 0 < stats.delta_bytes < stats.full_bytes / 3
    assert stats.anchor_bytes == 0


async def test_publishing_again_gives_the_same_objects_whatever_the_threads(world, tmp_path):
    await world.publish(5)
    with ThreadPoolExecutor(3) as pool:
        again = World(ObstoreBlobs.open("memory://"), tmp_path, pool=pool)
        await again.publish(5)
    assert [v.digest for v in again.versions] == [v.digest for v in world.versions]
    before = len(world.store.order)
    await world.publisher.publish(Version(0, 4), world.versions[4].tensors, world.versions[3], ALIASES)
    assert set(world.store.order[before:]) <= set(world.store.order[:before])


async def test_two_ranks_put_their_own_shards_of_one_version(world, tmp_path):
    """A rank sees its own tensors alone; one of them, having heard of all parts, puts the manifest."""
    mine, yours = {"embed.weight", "scale"}, {"experts.w", "frozen", "void"}
    names = sorted(mine | yours | ALIASES.keys())
    heads = [None, None]
    for n in range(3):
        weights, version = world.weights(), Version(0, n)
        shares = [{name: weights[name] for name in share} for share in (mine, yours)]
        ranks = zip(shares, heads, strict=True)
        parts = [await world.publisher.put_part(version, share, head, names) for share, head in ranks]
        parts = [unpack(Part, pack(part)) for part in parts]  # as they travel between ranks
        for wrong in (parts[:1], [*parts, parts[0]]):
            with pytest.raises(ValueError, match="each once"):
                await world.publisher.seal(version, wrong, shares[0], heads[0], names, ALIASES)
        sealed = await world.publisher.seal(version, parts, shares[0], heads[0], names, ALIASES)
        heads = [replace(sealed, tensors=share) for share in shares]
        world.versions.append(replace(sealed, tensors=weights))
        world.step()
    mirror = world.mirror()
    for n in range(3):
        mirror.commit(await world.stage(n, mirror))
        assert world.holds(mirror, n)
    whole = World(ObstoreBlobs.open("memory://"), tmp_path / "whole")
    await whole.publish(3)
    assert [v.manifest.root for v in world.versions] == [v.manifest.root for v in whole.versions]


async def test_threads_run_ahead_of_the_uploads_by_a_bounded_number_of_chunks(world, monkeypatch):
    monkeypatch.setattr("headway.weight_sync.publisher.ENCODES_AHEAD_MAX", 2)
    submitted = []
    with ThreadPoolExecutor(2) as pool:
        submit = pool.submit
        monkeypatch.setattr(pool, "submit", lambda *job: submitted.append(job) or submit(*job))
        world.publisher.pool = pool
        chunks = world.publisher._encode([(0, world.weights()["experts.w"], None)], _Tally())
        offsets = []
        for number, chunk in enumerate(chunks, 1):
            offsets.append(chunk.raw_offset)
            assert len(submitted) <= number + 2
    assert len(offsets) > 3
    assert offsets == sorted(set(offsets))


async def test_anchors_come_with_version_0_and_every_nth(world):
    await world.publish(9)
    kinds = [{shard.kind for shard in v.manifest.shards} for v in world.versions]
    assert kinds[0] == {"anchor"}
    assert [n for n, k in enumerate(kinds) if "anchor" in k] == [0, 4, 8]
    assert all("delta" in k for k in kinds[1:])


async def test_a_changed_layout_is_never_published(world):
    await world.publish(1)
    world.masters["scale"] = np.zeros(2, np.float32)
    before = len(world.store.order)
    with pytest.raises(ValueError, match="differ in name"):
        await world.publish(1)
    assert len(world.store.order) == before
