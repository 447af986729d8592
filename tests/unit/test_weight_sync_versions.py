"""Fetching versions from stores that lose, damage and delay objects."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.schemas.errors import UnavailableError, WireError
from headway.schemas.manifest import Manifest, root_of, seal_manifest
from headway.schemas.version import Version
from headway.weight_sync.layouts import Layout
from headway.weight_sync.publisher import Published, PublishSettings
from headway.weight_sync.tensors import RawTensor, table_of

from .weights_world import ALIASES, KEY, KEYS, SETTINGS, World
from .weights_world import world as world


async def test_deltas_step_by_step_a_chain_and_an_anchor_give_identical_bytes(world):
    await world.publish(8)
    stepwise, chain, anchor = world.mirror("a"), world.mirror("b"), world.mirror("c")
    for n in range(8):
        stepwise.commit(await world.stage(n, stepwise))
        assert world.holds(stepwise, n)
    for n in (0, 3, 7):
        staged = await world.stage(n, chain)
        chain.commit(staged)
    assert staged.stats.hops == 4
    assert not staged.stats.from_anchor
    cold = await world.stage(7, anchor)
    assert (cold.stats.from_anchor, cold.stats.hops) == (True, 4)  # the anchor at 4, deltas 5 to 7
    anchor.commit(cold)
    assert world.holds(chain, 7)
    assert world.holds(anchor, 7)


async def test_the_cheaper_of_deltas_and_anchor_is_taken(tmp_path):
    settings = PublishSettings(chunk_bytes=8192, shard_bytes=1 << 15, anchor_every=16)
    world = World(ObstoreBlobs.open("memory://"), tmp_path, settings)
    await world.publish(17)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    staged = await world.stage(16, mirror)
    assert staged.stats.from_anchor  # sixteen dense deltas cost more than one anchor
    assert "frozen" not in staged.patches  # what is the same already is not staged
    mirror.commit(staged)
    assert world.holds(mirror, 16)
    assert (await world.stage(16, mirror)).patches == {}


@pytest.mark.parametrize(("size", "from_anchor", "hops"), [("few", False, 100), ("many", True, 9)])
async def test_an_agent_a_hundred_versions_behind_catches_up_by_whatever_is_less(tmp_path, size, from_anchor, hops):
    world = World(ObstoreBlobs.open("memory://"), tmp_path, replace(SETTINGS, anchor_every=16))
    if size == "few":
        world.step = lambda: world.masters["scale"].__iadd__(0.25)
        world.masters["scale"] = np.ones((), np.float32)
    await world.publish(4)
    mirror = world.mirror()
    mirror.commit(await world.stage(3, mirror))
    await world.publish(100)
    world.store.gets.clear()
    staged = await world.stage(103, mirror)
    assert (staged.stats.from_anchor, staged.stats.hops) == (from_anchor, hops - 1 if from_anchor else hops)
    anchor = world.versions[96].manifest.size_bytes("anchor")
    deltas = sum(version.manifest.size_bytes("delta") for version in world.versions[4:])
    after = sum(version.manifest.size_bytes("delta") for version in world.versions[97:])
    assert staged.stats.fetched_bytes == min(deltas, anchor + after)
    mirror.commit(staged)
    assert world.holds(mirror, 103)


async def test_where_older_versions_were_swept_an_agent_comes_by_the_anchor_that_is_left(world):
    await world.publish(10)
    behind, near = world.mirror("behind"), world.mirror("near")
    behind.commit(await world.stage(2, behind))
    near.commit(await world.stage(8, near))
    for n in range(8):
        await world.store.inner.delete(KEYS.manifest(world.versions[n].digest))
        for shard in world.versions[n].manifest.shards:
            await world.store.inner.delete(KEYS.shard(shard.sha256))
    staged = await world.stage(9, behind)
    assert (staged.stats.from_anchor, staged.stats.hops) == (True, 2)
    behind.commit(staged)
    near.commit(await world.stage(9, near))
    assert world.holds(behind, 9)
    assert world.holds(near, 9)


async def test_after_a_rollback_an_agent_of_the_abandoned_line_comes_back_through_an_anchor(world):
    await world.publish(7)
    mirror = world.mirror()
    mirror.commit(await world.stage(6, mirror))
    world.versions = world.versions[:6]
    await world.publish(1, epoch=1)
    staged = await world.stage(6, mirror)
    assert staged.stats.from_anchor
    mirror.commit(staged)
    assert world.holds(mirror, 6)
    assert mirror.head.version == Version(1, 6)


def flip(data):
    return data[:-1] + bytes([data[-1] ^ 4])


@pytest.mark.parametrize("change", [flip, lambda data: data[: len(data) // 2], lambda data: b""])
async def test_a_damaged_shard_is_refused_fetched_again_and_then_applied(world, change):
    await world.publish(2)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    world.store.damage[world.a_shard(1)] = (2, change)
    staged = await world.stage(1, mirror)
    assert staged.stats.refetches == 2
    mirror.commit(staged)
    assert world.holds(mirror, 1)


async def test_a_shard_that_stays_damaged_is_a_typed_error_naming_it_and_changes_nothing(world):
    await world.publish(2)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    key = world.a_shard(1)
    world.store.damage[key] = (99, flip)
    with pytest.raises(WireError, match=key) as error:
        await world.stage(1, mirror)
    assert error.value.reason == "bad_shard"
    assert world.store.gets[key] == 3
    assert world.holds(mirror, 0)


async def test_a_missing_shard_is_named(world):
    await world.publish(2)
    key = world.a_shard(1)
    await world.store.inner.delete(key)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    with pytest.raises(UnavailableError, match=key):
        await world.stage(1, mirror)
    assert world.holds(mirror, 0)


async def test_a_hung_store_ends_in_a_named_time_out(world, monkeypatch):
    await world.publish(1)

    async def hang(key, start, end):
        await asyncio.sleep(60)

    monkeypatch.setattr(world.store, "get_range", hang)
    with pytest.raises(UnavailableError, match="took longer than"):
        await world.stage(0, world.mirror(), timeout_s=0.02)


async def test_a_damaged_manifest_is_fetched_again_and_a_wrong_one_refused(world):
    await world.publish(1)
    key = KEYS.manifest(world.versions[0].digest)
    world.store.damage[key] = (1, flip)
    await world.stage(0, world.mirror())
    world.store.damage[key] = (99, flip)
    with pytest.raises(WireError) as error:
        await world.stage(0, world.mirror())
    assert error.value.reason == "digest_mismatch"


async def plant(world, n, key=KEY, **changes):
    """Replace version n by a validly sealed manifest that lies."""
    old = world.versions[n].manifest
    manifest = Manifest(**{**{name: getattr(old, name) for name in Manifest.model_fields}, **changes})
    digest, sealed = seal_manifest(manifest, key)
    await world.store.put(KEYS.manifest(digest), sealed)
    world.versions[n] = Published(
        version=world.versions[n].version, digest=digest, manifest=manifest, tensors=world.versions[n].tensors
    )


async def refused(world, n, mirror):
    """The reason why version n is refused; no shard may have been asked for."""
    world.store.gets.clear()
    with pytest.raises(WireError) as error:
        await world.stage(n, mirror)
    assert not [key for key in world.store.gets if key.endswith(".shard")]
    return error.value.reason


async def test_a_manifest_that_lies_is_refused_before_any_shard_is_fetched(world):
    await world.publish(4)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    await plant(world, 1, key=bytes(32))
    assert await refused(world, 1, mirror) == "bad_signature"
    await plant(world, 2, parent_root="0" * 64)
    assert await refused(world, 2, mirror) == "wrong_parent"
    await plant(world, 3, version=Version(0, 9))
    assert await refused(world, 3, mirror) == "wrong_version"


async def test_unknown_names_and_changed_shapes_are_refused_before_any_shard_is_fetched(world):
    await world.publish(3)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    weights = dict(world.versions[1].tensors)
    weights["scale"] = RawTensor(dtype="BF16", shape=(1,), data=weights["scale"].data)
    table = table_of(weights, ALIASES)
    await plant(world, 1, tensors=table, root=root_of(table))
    assert await refused(world, 1, mirror) == "layout_changed"
    table = table_of({**world.versions[2].tensors, "zzz": weights["scale"]}, ALIASES)
    parent = world.versions[0]
    await plant(
        world,
        2,
        tensors=table,
        root=root_of(table),
        parent=parent.version,
        parent_root=parent.manifest.root,
        parent_manifest=parent.digest,
    )
    assert await refused(world, 2, mirror) == "layout_changed"


async def test_a_version_of_another_model_is_refused_on_a_cold_start_before_any_shard_is_fetched(world, monkeypatch):
    published, _ = await world.publisher.publish(Version(0, 0), world.weights(), None)
    world.versions.append(published)
    shapes = {entry.name: entry.shape for entry in published.manifest.tensors}
    fetcher = world.fetcher()
    monkeypatch.setattr(world, "fetcher", lambda: fetcher)
    fetcher.layout = Layout(sources=shapes, tied=False, _recipes={})
    await world.stage(0, world.mirror())
    for lie in ({"scale": (2,)}, {"another": (1,)}):
        fetcher.layout = Layout(sources={**shapes, **lie}, tied=False, _recipes={})
        assert await refused(world, 0, world.mirror()) == "layout_changed"


async def test_shards_that_decode_to_other_bytes_or_leave_tensors_out_are_refused(world):
    await world.publish(2)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    right = world.versions[1].manifest
    await plant(world, 1, shards=right.shards[:-1])
    with pytest.raises(WireError, match=r"not whole|leave out"):
        await world.stage(1, mirror)
    weights = dict(world.versions[1].tensors)
    weights["scale"] = RawTensor(dtype="BF16", shape=(), data=np.array([9, 9], np.uint8))
    table = table_of(weights, ALIASES)
    await plant(world, 1, shards=right.shards, tensors=table, root=root_of(table))
    with pytest.raises(WireError, match="scale") as error:
        await world.stage(1, mirror)
    assert error.value.reason in ("wrong_state", "bad_shard")
    assert world.holds(mirror, 0)


async def test_without_an_anchor_in_reach_the_error_says_so(world, monkeypatch):
    await world.publish(4)
    monkeypatch.setattr("headway.weight_sync.fetcher.CHAIN_VERSIONS_MAX", 2)
    with pytest.raises(UnavailableError, match=r"no way from nothing to 0\.3"):
        await world.stage(3, world.mirror())
