"""Promise: ranks publish their shares of a version in processes of their own; it appears whole or not at all."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.schemas import signing
from headway.schemas.errors import PromiseViolated, UnavailableError
from headway.schemas.manifest import open_manifest
from headway.schemas.version import Version
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.publisher import Publisher
from headway.weight_sync.ranks import RankedPublisher
from headway.weight_sync.transfer import Retrier, TransferLimits

from .faults.rank_publishes import KEY, KEYS, NAMES, SETTINGS, weights

PROGRAM = Path(__file__).parent / "faults" / "rank_publishes.py"
WAIT_S = 60


def start(folder, rank, world_size, attempt="a", points=""):
    env = {**os.environ, "HEADWAY_FAILPOINTS": points}
    command = [sys.executable, "-P", PROGRAM, folder, str(rank), str(world_size), attempt]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(process):
    """The digests of the versions that a rank came to know, by number."""
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err[-2000:]
    return dict(line.split() for line in out.splitlines())


def manifests(folder):
    """Version number -> digests of manifests of it in the store."""
    found = {}
    for path in folder.rglob("*.manifest"):
        manifest = open_manifest(path.read_bytes(), path.stem, signing.public_key(KEY))
        found.setdefault(manifest.version.n, []).append(path.stem)
    return found


async def check(folder, digests, mirror_folder):
    """All versions, one after the other, give exactly their bytes."""
    mirror = HostMirror(mirror_folder, signing.public_key(KEY))
    fetcher = Fetcher(
        store=ObstoreBlobs.open(str(folder)).once(),
        keys=KEYS,
        public_key=signing.public_key(KEY),
        retrier=Retrier(limits=TransferLimits(attempts_max=1), rng=random.Random(0)),
    )
    for n in range(3):
        mirror.commit(await fetcher.stage(Version(0, n), digests[str(n)], mirror))
        assert {name: held.tobytes() for name, held in mirror.tensors.items()} == {
            name: raw.data.tobytes() for name, raw in weights(n).items()
        }


@pytest.mark.parametrize("world_size", [2, 4])
async def test_ranks_in_processes_of_their_own_agree_on_versions_that_hold_all_their_shares(tmp_path, world_size):
    ranks = [start(tmp_path / "store", rank, world_size) for rank in range(world_size)]
    digests = [told(rank) for rank in ranks]
    assert len(digests[0]) == 3
    assert all(other == digests[0] for other in digests)
    await check(tmp_path / "store", digests[0], tmp_path / "mirror")


@pytest.mark.parametrize(
    ("rank", "point", "sealed"),
    [
        (1, "put.shard.before:3:kill", 1),
        (1, "put.part.before:2:kill", 1),
        (1, "put.part.after:2:kill", 2),
        (0, "put.shard.after:4:kill", 1),
        (0, "put.manifest.before:2:kill", 1),
        (0, "put.manifest.after:2:kill", 2),
        (0, "put.part.before:4:kill", 2),
    ],
)
async def test_a_killed_rank_leaves_no_version_half_published_and_goes_on_where_it_was(tmp_path, rank, point, sealed):
    """`sealed`: how many versions there may be while the rank lies dead."""
    folder = tmp_path / "store"
    ranks = [start(folder, r, 2, points=point if r == rank else "") for r in range(2)]
    ranks[rank].communicate(timeout=WAIT_S)
    assert ranks[rank].returncode == -signal.SIGKILL
    seen = manifests(folder)
    assert len(seen) <= sealed
    ranks[rank] = start(folder, rank, 2)
    digests = [told(process) for process in ranks]
    assert digests[0] == digests[1]
    found = manifests(folder)
    assert {n: [digests[0][str(n)]] for n in range(3)} == found
    assert seen.items() <= found.items()
    await check(folder, digests[0], tmp_path / "mirror")


def ranked(store, rank, **kwargs):
    publisher = Publisher(store=store, keys=KEYS, private_key=KEY, settings=SETTINGS)
    return RankedPublisher(publisher=publisher, rank=rank, world_size=2, **{"attempt": "a", "poll_s": 0.01} | kwargs)


def share(n, rank):
    return {name: raw for i, (name, raw) in enumerate(weights(n).items()) if i % 2 == rank}


async def test_parts_of_another_attempt_are_never_taken(tmp_path):
    store = ObstoreBlobs.open(str(tmp_path))
    with pytest.raises(UnavailableError, match="did not appear"):
        await ranked(store, 1, attempt="before", patience_s=0.1).publish(Version(0, 0), share(1, 1), None, NAMES)
    with pytest.raises(UnavailableError, match="did not appear"):
        await ranked(store, 0, patience_s=0.2).publish(Version(0, 0), share(0, 0), None, NAMES)
    assert manifests(tmp_path) == {}


async def test_a_rank_that_computes_other_weights_in_the_same_attempt_is_stopped(tmp_path):
    store = ObstoreBlobs.open(str(tmp_path))
    for n, error in ((1, UnavailableError), (0, PromiseViolated)):
        with pytest.raises(error):
            await ranked(store, 1, patience_s=0.05).publish(Version(0, 0), share(n, 1), None, NAMES)


def test_a_rank_is_one_of_the_world():
    with pytest.raises(ValueError, match="rank 2 of 2"):
        ranked(None, 2)
