"""What is kept, as a function of the ledger; marks and their grace; what a chain of manifests needs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from obstore.store import MemoryStore

from headway.bus.blobs import MissingBlob, ObstoreBlobs
from headway.schemas.config import Config, parse_config
from headway.schemas.leases import Lease
from headway.schemas.manifest import Manifest, ShardRef, root_of, seal_manifest
from headway.schemas.signing import public_key
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.schemas.wire import pack
from headway.trainer.groups import Lineage
from headway.trainer.history import History
from headway.trainer.publishing import WeightLine
from headway.trainer.retention import kept, leases_of
from headway.trainer.sweeper import Marks, Serving
from headway.weight_sync.chain import Chain

KEY = bytes(range(32))
KEYS = Keys("demo")


def config(versions: int) -> Config:
    return parse_config(f"[retention]\nversions = {versions}\n[grpo]\nretain_steps = 3", "x")


def history(steps: int = 10, fork_at: int | None = None, more: int = 0) -> History:
    """`steps` steps of four rollouts each, then maybe a fork and `more` steps. Sequences count rollouts."""
    found = History(cursor=4 * (steps + more))
    line = [Version(0, n) for n in range(steps + 1)]
    if fork_at is not None:
        found.lineage = Lineage(Version(1, fork_at + more), ((0, fork_at),))
        line += [Version(1, n) for n in range(fork_at, fork_at + more + 1)]
    else:
        found.lineage = Lineage(line[-1])
    seq = 1
    for version in line:
        found.manifests[version] = f"m{version}"
        if version.n and version != Version(1, fork_at or 0):
            found.checkpoints[version], found.first_seqs[version] = f"c{version}", seq
            seq += 4
        elif version.n:
            found.checkpoints[version] = f"c{Version(0, version.n)}"
    return found


def ns(versions: Any) -> list[str]:
    return [str(version) for version in sorted(versions)]


def test_without_a_limit_every_version_stays_and_checkpoints_of_the_last_steps() -> None:
    keep = kept(history(), config(0))
    assert len(keep.versions) == 11
    assert keep.checkpoints == {"c0.8", "c0.9", "c0.10"}
    assert keep.rollouts_from_seq == 4 * 7 + 1  # those of steps 8 to 10


def test_steps_between_checkpoints_can_be_executed_again() -> None:
    sparse = history()
    sparse.checkpoints = {Version(0, n): f"c0.{n}" for n in (3, 6, 9)}
    sparse.first_seqs[Version(0, 7)] = 2  # a group that closed late
    assert kept(sparse, config(0)).rollouts_from_seq == 2
    sparse.checkpoints = {}
    assert kept(sparse, config(0)).rollouts_from_seq == 1


def test_a_limit_keeps_so_many_behind_the_head_and_never_fewer_than_checkpoints_need() -> None:
    assert ns(kept(history(), config(5)).versions) == [f"0.{n}" for n in range(5, 11)]
    assert ns(kept(history(), config(1)).versions) == ["0.7", "0.8", "0.9", "0.10"]


def test_a_served_version_keeps_itself_and_the_deltas_from_it_to_the_head() -> None:
    assert ns(kept(history(), config(3), [Version(0, 2)]).versions) == [f"0.{n}" for n in range(2, 11)]
    assert kept(history(), config(3), [Version(0, 99)]).versions == kept(history(), config(3)).versions


def test_after_a_fork_shared_ancestors_stay_and_the_abandoned_line_only_where_it_is_served() -> None:
    forked = history(10, fork_at=6, more=2)
    assert ns(kept(forked, config(4)).versions) == ["0.4", "0.5", "0.6", "1.6", "1.7", "1.8"]
    assert Version(0, 9) in kept(forked, config(4), [Version(0, 9)]).versions
    assert kept(forked, config(4)).checkpoints == {"c0.6", "c1.7", "c1.8"}  # the last three commits


def test_a_pool_that_waits_and_a_lease_keep_messages_versions_and_checkpoints() -> None:
    waiting = history()
    waiting.pool = [5]
    assert kept(waiting, config(3)).rollouts_from_seq == 5
    lease = Lease(
        holder="a",
        versions=(Version(0, 1), Version(7, 7)),
        checkpoints=("0" * 64,),
        rollouts_from_seq=2,
        tasks_from_seq=3,
    )
    keep = kept(waiting, config(3), (), [lease, Lease(holder="b", rollouts_from_seq=9)])
    assert ns(keep.versions) == ["0.1", "0.7", "0.8", "0.9", "0.10"]
    assert "0" * 64 in keep.checkpoints
    assert (keep.rollouts_from_seq, keep.tasks_from_seq) == (2, 3)


def test_before_the_first_step_nothing_is_given_up() -> None:
    assert kept(history(0), config(1)).versions == {Version(0, 0)}


# Marks


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def sweep(marks: Marks, keys: list[str], grace_s: float = 10) -> list[str]:
    dropped: list[str] = []

    async def drop(due: list[str]) -> None:
        dropped.extend(due)
        for key in due:
            await marks.delete(key)

    assert await marks.sweep(keys, grace_s, drop) == len(dropped)
    return dropped


@pytest.fixture
def marks(clock: Clock) -> Marks:
    return Marks(ObstoreBlobs.open("memory://"), clock)


async def test_an_object_is_deleted_only_after_a_whole_grace_period_of_need_by_nobody(
    marks: Marks, clock: Clock
) -> None:
    await marks.put("a", b"1")
    assert await sweep(marks, ["a"]) == []
    clock.now_s = 9
    assert await sweep(marks, []) == []  # needed again for a moment
    clock.now_s = 15
    assert await sweep(marks, ["a"]) == []
    clock.now_s = 25
    assert await sweep(marks, ["a"]) == ["a"]
    assert not await marks.exists("a")


async def test_putting_what_exists_begins_its_grace_anew(marks: Marks, clock: Clock) -> None:
    await marks.put("a", b"1")
    await sweep(marks, ["a"])
    clock.now_s = 9
    await marks.put("a", b"1")
    clock.now_s = 11
    assert await sweep(marks, ["a"]) == []
    clock.now_s = 21
    assert await sweep(marks, ["a"]) == ["a"]


async def test_an_object_that_is_put_while_it_is_deleted_is_there_afterwards(marks: Marks, clock: Clock) -> None:
    await marks.put("a", b"1")
    await sweep(marks, ["a"])
    clock.now_s = 20
    putting: list[asyncio.Task[None]] = []

    async def slow(due: list[str]) -> None:
        putting.append(asyncio.create_task(marks.put("a", b"1")))
        await asyncio.sleep(0.02)  # the put would be done by now, and be a no-op
        await marks.delete("a")

    await marks.sweep(["a"], 10, slow)
    await putting[0]
    assert await marks.get("a") == b"1"


async def test_a_sweep_that_fails_halfway_goes_on_where_it_was(marks: Marks, clock: Clock) -> None:
    for key in "ab":
        await marks.put(key, b"1")
    await sweep(marks, ["a", "b"])
    clock.now_s = 20

    async def die(due: list[str]) -> None:
        await marks.delete(due[0])
        raise MissingBlob("x")

    with pytest.raises(MissingBlob):
        await marks.sweep(["a", "b"], 10, die)
    assert await sweep(marks, ["b"]) == ["b"]


def test_what_agents_serve_is_what_they_said_lately_and_garbage_says_nothing(clock: Clock) -> None:
    serving = Serving(clock=clock, memory_s=10)
    serving.take("beat.a", b'{"served": "0.3"}')
    for garbage in (b"", b"[", b"[]", b"{}", b'{"served": "x"}', b'{"served": ""}', b"[" * 5000, b" " * 20000):
        serving.take("beat.z", garbage)
    clock.now_s = 6
    serving.take("beat.b", b'{"served": "0.4"}')
    assert serving.versions() == {Version(0, 3), Version(0, 4)}
    clock.now_s = 12
    assert serving.versions() == {Version(0, 4)}


# Chains


async def publish(store: ObstoreBlobs, anchors: set[int], count: int) -> list[str]:
    """Empty manifests with a shard of each kind that they have; their digests."""
    digests: list[str] = []
    for n in range(count):
        kinds = ["delta"] * (n > 0) + ["anchor"] * (n in anchors)
        manifest = Manifest(
            version=Version(0, n),
            root=root_of(()),
            parent=Version(0, n - 1) if n else None,
            parent_root=root_of(()) if n else None,
            parent_manifest=digests[-1] if n else None,
            tensors=(),
            shards=tuple(
                ShardRef(sha256=f"{n:x}{kind[0]}".ljust(64, "0").replace("t", "d"), size_bytes=1, kind=kind)  # type: ignore[arg-type]
                for kind in kinds
            ),
        )
        digest, sealed = seal_manifest(manifest, KEY)
        await store.put(KEYS.manifest(digest), sealed)
        digests.append(digest)
    return digests


async def test_a_version_needs_what_lies_between_it_and_an_anchor(tmp_path: Path) -> None:
    store = ObstoreBlobs.open(str(tmp_path))
    digests = await publish(store, {0, 4}, 8)
    chain = Chain(store, KEYS, public_key(KEY))

    async def manifests(*wanted: int) -> list[int]:
        keys = await chain.needed(digests[n] for n in wanted)
        shards = {key for key in keys if key.endswith(".shard")}
        assert len(shards) == sum(2 if n == 4 else 1 for n in range(8) if KEYS.manifest(digests[n]) in keys)
        return [n for n in range(8) if KEYS.manifest(digests[n]) in keys]

    assert await manifests(7) == [4, 5, 6, 7]
    assert await manifests(4) == [4]
    assert await manifests(2) == [0, 1, 2]
    assert await manifests(6, 7, 2) == [0, 1, 2, 4, 5, 6, 7]
    await store.delete(KEYS.manifest(digests[5]))
    assert await manifests(7) == [4, 5, 6, 7]  # read once: manifests never change
    with pytest.raises(MissingBlob):
        await Chain(store, KEYS, public_key(KEY)).needed([digests[7]])


async def test_a_lease_that_is_given_back_between_two_looks_holds_nothing() -> None:
    class Store(ObstoreBlobs):
        async def get(self, key: str) -> bytes:
            if key.endswith("/given"):
                await self.delete(key)
            return await super().get(key)

    store = Store(MemoryStore())
    for name in ("given", "held"):
        await store.put(f"r/leases/{name}", pack(Lease(holder=name)))
    bus = SimpleNamespace(run="r", store=store)
    assert [lease.holder for lease in await leases_of(bus)] == ["held"]  # type: ignore[arg-type]


async def test_while_a_lease_cannot_be_read_checkpoints_stay_and_commits_go_on() -> None:
    store, digests = ObstoreBlobs(MemoryStore()), [f"{n:064x}" for n in range(6)]
    await store.put(KEYS.lease("torn"), b"garbage")
    service = SimpleNamespace(store=store, config=config(0), bus=SimpleNamespace(run=KEYS.run, store=store, keys=KEYS))
    line = WeightLine(service, KEY)  # type: ignore[arg-type]
    for digest in digests:
        await store.put(KEYS.checkpoint(digest), b"a checkpoint")
        await line.prune_checkpoints(digest, term=1)
    assert [await store.exists(KEYS.checkpoint(digest)) for digest in digests] == [True] * 6
