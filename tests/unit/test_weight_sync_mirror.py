"""The host mirror, and what goes from it into an engine."""

import json

import pytest
import safetensors.torch
import torch

from headway.bus.blobs import ObstoreBlobs
from headway.schemas.errors import PromiseViolated, UnavailableError, WireError
from headway.schemas.version import Version
from headway.weight_sync import torch_apply
from headway.weight_sync.mirror import HostMirror

from .weights_world import ALIASES, KEYS, World
from .weights_world import world as world


async def test_a_mirror_survives_a_restart_without_fetching(world):
    await world.publish(2)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    mirror.commit(await world.stage(1, mirror))
    world.store.gets.clear()
    again = world.mirror()
    assert world.holds(again, 1)
    assert again.reset_reason is None
    assert not world.store.gets


@pytest.mark.parametrize("point", ["_mark", "_write", "half", "_record", "_unmark"])
async def test_a_crash_anywhere_in_a_commit_reloads_from_an_anchor(world, monkeypatch, point):
    await world.publish(2)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    staged = await world.stage(1, mirror)

    def die(self, *_):
        raise KeyboardInterrupt

    def half(self, staged):
        self._map[: len(self._map) // 3] = 0x77
        raise KeyboardInterrupt

    name = "_write" if point == "half" else point
    monkeypatch.setattr(HostMirror, name, half if point == "half" else die)
    with pytest.raises(KeyboardInterrupt):
        mirror.commit(staged)
    monkeypatch.undo()
    assert mirror.head is None  # nor does the process that lived on trust it
    restarted = world.mirror()
    if point == "_mark":
        assert world.holds(restarted, 0)
    else:
        assert (restarted.head, restarted.reset_reason) == (None, "a write was interrupted")
    restarted.commit(await world.stage(1, restarted))
    assert world.holds(restarted, 1)
    assert world.holds(world.mirror(), 1)


@pytest.mark.parametrize("name", ["weights.bin", "head.manifest"])
@pytest.mark.parametrize("change", ["flip", "cut", "gone"])
async def test_a_mirror_that_rotted_on_disk_is_emptied_not_trusted(world, name, change):
    await world.publish(1)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    path = world.folder / "mirror" / name
    data = path.read_bytes()
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:] if change == "flip" else data[:-70])
    again = world.mirror()
    assert again.head is None
    assert again.reset_reason is not None or (name, change) == ("head.manifest", "gone")
    again.commit(await world.stage(0, again))
    assert world.holds(again, 0)


async def test_a_mirror_whose_bytes_differ_is_found_out_and_can_start_again(world):
    await world.publish(3)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    mirror._map[64] ^= 1
    with pytest.raises(WireError) as error:
        await world.stage(1, mirror)
    assert error.value.reason == "wrong_state"
    mirror.reset("wrong_state")
    mirror.commit(await world.stage(2, mirror))
    assert world.holds(mirror, 2)


async def test_the_base_advances_only_from_what_it_was_staged_against(world):
    await world.publish(3)
    mirror = world.mirror()
    first = await world.stage(0, mirror)
    mirror.commit(first)
    second = await world.stage(1, mirror)
    mirror.commit(await world.stage(2, mirror))
    for stale in (first, second):
        with pytest.raises(PromiseViolated, match="staged against"):
            mirror.commit(stale)
    assert world.holds(mirror, 2)


async def test_a_mirror_hands_out_views_that_nobody_can_write(world):
    await world.publish(1)
    mirror = world.mirror()
    mirror.commit(await world.stage(0, mirror))
    with pytest.raises(ValueError, match="read-only"):
        mirror.tensors["embed.weight"][0] = 1


# Into an engine


def live_model(world):
    return {name: torch.zeros(raw.shape, dtype=torch.bfloat16) for name, raw in world.weights().items()} | {
        "lm_head.weight": torch.zeros(64, 96, dtype=torch.bfloat16)
    }


async def test_live_tensors_end_with_the_root_of_the_version(world):
    await world.publish(3)
    mirror, live = world.mirror(), live_model(world)
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    for n in range(3):
        staged = await world.stage(n, mirror)
        torch_apply.apply(live, staged)
        assert torch_apply.root(live) == world.versions[n].manifest.root
        mirror.commit(staged)
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses
    assert torch_apply.checksums(live) == {e.name: e.xxh3 for e in world.versions[2].manifest.tensors}
    live["embed.weight"].view(torch.uint8)[3, 5] ^= 1
    assert torch_apply.root(live) != world.versions[2].manifest.root


def test_only_a_gpu_needs_page_locked_memory():
    staged = object()
    assert torch_apply.pinned(staged, torch.device("cpu")) is staged


async def test_a_model_of_another_layout_is_refused_before_the_first_write(world):
    await world.publish(1)
    staged = await world.stage(0, world.mirror())
    for change in ("extra", "missing", "shape", "dtype"):
        live = live_model(world)
        if change == "extra":
            live["zzz"] = torch.zeros(1)
        elif change == "missing":
            del live["void"]
        else:
            live["void"] = torch.zeros((3, 0) if change == "shape" else (0, 3), dtype=torch.float16)
        with pytest.raises(WireError) as error:
            torch_apply.apply(live, staged)
        assert error.value.reason == "layout_changed"
        assert not live["embed.weight"].any()


async def test_checkpoint_folders_hold_what_changed_or_everything(world):
    await world.publish(2)
    mirror, config = world.mirror(), json.dumps({"model_type": "x"}).encode()

    def read(folder):
        assert (folder / "config.json").read_bytes() == config
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        return {name: raw.data.tobytes() for name, raw in torch_apply.raw_tensors(tensors).items()}

    def of(n, *names):
        return {name: world.versions[n].tensors[name].data.tobytes() for name in names}

    everything = world.masters.keys()
    cold = await world.stage(0, mirror)
    assert read(mirror.stage_partial_checkpoint(world.folder / "0", config, cold)) == of(0, *everything)
    mirror.commit(cold)
    staged = await world.stage(1, mirror)
    partial = read(mirror.stage_partial_checkpoint(world.folder / "1", config, staged))
    assert partial == of(1, *staged.patches)
    assert set(partial) < set(everything)
    full = mirror.stage_partial_checkpoint(world.folder / "2", config, staged, full=True)
    assert read(full) == of(1, *everything)
    head = mirror.stage_partial_checkpoint(world.folder / "3", config, None, full=True)
    assert read(head) == of(0, *everything)


async def test_a_folder_store_serves_the_same_versions(tmp_path):
    world = World(ObstoreBlobs.open(str(tmp_path / "store")), tmp_path)
    await world.publish(6)
    mirror = world.mirror()
    mirror.commit(await world.stage(1, mirror))
    mirror.commit(await world.stage(5, mirror))
    assert world.holds(mirror, 5)


async def test_an_upload_that_was_torn_is_replaced_when_the_version_is_published_again(tmp_path):
    world = World(ObstoreBlobs.open(str(tmp_path / "store")), tmp_path)
    await world.publish(1)
    for torn in (world.a_shard(0, "anchor"), KEYS.manifest(world.versions[0].digest)):
        file = tmp_path / "store" / torn
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises((UnavailableError, WireError)):
            await world.stage(0, world.mirror())
        await world.publisher.publish(Version(0, 0), world.weights(), None, ALIASES)
        mirror = world.mirror(torn[-20:])
        mirror.commit(await world.stage(0, mirror))
        assert world.holds(mirror, 0)
