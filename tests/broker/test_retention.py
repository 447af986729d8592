"""Sweeping a run on a real bus: what is needed stays, what isn't goes, and the account stays whole."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.bus.ledger import LedgerReader, LedgerWriter
from headway.bus.reader import first_seq, read_all
from headway.deploy.weight_versions import Versions
from headway.schemas import signing
from headway.schemas.errors import FencedOut, WireError
from headway.schemas.leases import Lease
from headway.schemas.ledger import Open
from headway.schemas.subjects import STREAM_SUFFIXES
from headway.schemas.version import Version
from headway.schemas.wire import H_CLAIM, Claim, digest_of, pack, unpack
from headway.trainer.audit import audit
from headway.trainer.retention import kept, unneeded
from headway.trainer.rollback import rollback
from headway.trainer.sweeper import Sweeper
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.publisher import Publisher
from headway.weight_sync.tensors import RawTensor
from headway.weight_sync.transfer import Retrier, TransferLimits

Make = Callable[..., Any]
SWEPT = "[retention]\nversions = 4\ngrace_s = 0.001\nevery_s = 3600.0\n"
PURGED = SWEPT + "purge = true\n"
FOLDERS = ("weights", "ckpt", "blobs")


def key_of(run: Any) -> bytes:
    return signing.load_key(run.folder / "keys" / "trainer.key")


def answer_of(run: Any) -> Any:
    return lambda task, head: run.graded(task, float(task.sampling_seed % 2), head)


async def train(run: Any, steps: int) -> Any:
    async with run.dispatcher(), run.agent(answer_of(run)), run.trainer():
        return await run.wait_for_step(steps)


async def objects(run: Any, folder: str) -> set[str]:
    return {key async for key, _ in run.bus.store.list(f"test/{folder}/")}


async def sweeper_of(run: Any) -> tuple[Sweeper, int]:
    """A sweeper as the present term's trainer has one, and the term."""
    history = await run.history()
    async with run.service("trainer", lambda service: asyncio.sleep(0)) as service:
        return Sweeper(service, history, signing.public_key(key_of(run))), history.term


async def none(due: list[str]) -> None:
    assert due == []


async def sweep(run: Any) -> int:
    sweeper, term = await sweeper_of(run)
    assert await sweeper.sweep(term) == 0  # the first only marks
    await asyncio.sleep(0.01)
    return await sweeper.sweep(term)


def fetcher_of(run: Any) -> Fetcher:
    return Fetcher(
        store=run.bus.store.once(),
        keys=run.bus.keys,
        public_key=signing.public_key(key_of(run)),
        retrier=Retrier(limits=TransferLimits(attempts_max=1), rng=random.Random(0)),
    )


async def test_a_swept_run_serves_resumes_rolls_back_and_audits(make_run: Make, tmp_path: Path) -> None:
    run = make_run(steps=24, extra=SWEPT)
    history = await train(run, 20)
    key, fetcher = signing.public_key(key_of(run)), fetcher_of(run)
    behind = HostMirror(tmp_path / "behind", key, fsync=False)
    behind.commit(await fetcher.stage(Version(0, 18), history.manifests[Version(0, 18)], behind))
    history = await run.history()
    before = await objects(run, "weights")
    assert await sweep(run) > 15
    assert before > await objects(run, "weights")
    head = history.head
    gone = run.bus.keys.manifest(history.manifests[Version(0, 3)])
    assert gone in before
    assert not await run.bus.store.exists(gone)
    caught_up = await fetcher.stage(head, history.manifests[head], behind)
    assert not caught_up.stats.from_anchor
    cold = HostMirror(tmp_path / "cold", key, fsync=False)
    cold.commit(await fetcher.stage(head, history.manifests[head], cold))
    assert cold.root == history.roots[head]
    fork = await rollback(run.bus, key_of(run), Version(0, head.n - 2))
    async with run.dispatcher(), run.agent(answer_of(run)), run.trainer():
        await run.wait_for_step(24)
    cold.commit(await fetcher.stage(fork.version, fork.manifest, cold))
    assert (await audit(run.bus)).violations == []
    assert await sweep(run) > 0
    assert await sweep(run) == 0


async def test_saved_sessions_of_settled_rollouts_go_and_all_others_stay(make_run: Make) -> None:
    run = make_run(steps=2, extra=SWEPT)
    history = await train(run, 2)
    assert 0 in history.settled
    settled, open_, other = (run.bus.keys.session(one, "x") for one in ("g0000000s001", "g0009999s000", "e0-0"))
    for key in (settled, open_, other):
        await run.bus.store.put(key, b"a session")
    await sweep(run)
    assert await objects(run, "sessions") == {open_, other}


async def test_an_agent_that_is_heard_and_a_lease_keep_what_they_need(make_run: Make) -> None:
    run = make_run(steps=20, extra=SWEPT)
    history = await train(run, 20)
    lease = run.bus.keys.lease("recording-x")
    await run.bus.store.put(lease, pack(Lease(holder="x", versions=(Version(0, 1),))))
    sweeper, term = await sweeper_of(run)

    async def there() -> list[int]:
        for _ in range(2):
            await sweeper.sweep(term)
            await asyncio.sleep(0.01)
        manifests = {n: run.bus.keys.manifest(history.manifests[Version(0, n)]) for n in range(21)}
        return [n for n, key in manifests.items() if await run.bus.store.exists(key)]

    sweeper._serving.memory_s = 60.0
    sweeper._serving.take("beat.a", b'{"served": "0.14"}')
    assert await there() == list(range(21))  # anchors are at 0 and 16: whoever needs 14 needs what leads to it
    sweeper._serving.memory_s = 0.0
    assert await there() == [0, 1, *range(16, 21)]
    await run.bus.store.delete(lease)
    assert await there() == list(range(16, 21))
    await run.bus.store.put(lease, b"garbage")
    with pytest.raises(WireError, match="recording-x cannot be read"):
        await sweeper.sweep(term)


async def test_a_fenced_trainer_deletes_nothing(make_run: Make) -> None:
    run = make_run(steps=20, extra=PURGED)
    history = await train(run, 20)
    sweeper, term = await sweeper_of(run)
    await sweeper._marks.sweep(await unneeded(run.bus, history, sweeper._chain, kept(history, run.config)), 60.0, none)
    await asyncio.sleep(0.01)
    reader = LedgerReader(run.bus)
    await reader.read_new()
    writer = LedgerWriter(run.bus, key_of(run), reader.tail)
    await writer.append(Open(instance="other", environment={}), history.head, term=term + 1)
    before = (
        [await objects(run, folder) for folder in FOLDERS],
        await first_seq(run.bus, "ROLLOUTS"),
        await first_seq(run.bus, "TASKS"),
    )
    with pytest.raises(FencedOut, match=f"term {term} is over"):
        await sweeper.sweep(term)
    after = (
        [await objects(run, folder) for folder in FOLDERS],
        await first_seq(run.bus, "ROLLOUTS"),
        await first_seq(run.bus, "TASKS"),
    )
    assert after == before


async def test_a_trainer_that_sweeps_while_it_trains_loses_nothing(make_run: Make) -> None:
    """Sweeps with hardly any grace between commits, purges, a restart in the middle: the audit proves every end."""
    run = make_run(steps=30, extra=PURGED.replace("3600.0", "0.02").replace("0.001", "0.2"))
    async with run.dispatcher(), run.agent(answer_of(run)):
        async with run.trainer():
            await run.wait_for_step(12)
        await asyncio.sleep(0.3)  # the agents answer what was issued ahead
        report = await audit(run.bus)
        assert (report.violations, report.purged > 20, report.pending > 0) == ([], True, True)
        async with run.trainer():
            history = await run.wait_for_step(30)
            async with asyncio.timeout(10):
                while await first_seq(run.bus, "ROLLOUTS") < kept(history, run.config).rollouts_from_seq:
                    await asyncio.sleep(0.05)
    assert await first_seq(run.bus, "ROLLOUTS") <= history.first_seqs[Version(0, 28)]  # 28 to 30 can be executed again
    assert await first_seq(run.bus, "TASKS") > 4 * 26
    report = await audit(run.bus)
    assert report.violations == []
    assert (report.issued, report.trained, report.pending, report.lost) == (120, 120, 0, 0)
    assert report.purged > 100
    mirror = HostMirror(run.folder / "mirror", signing.public_key(key_of(run)), fsync=False)
    mirror.commit(await fetcher_of(run).stage(history.head, history.manifests[history.head], mirror))
    assert mirror.root == history.roots[history.head]
    await require_swept_and_whole(run, history)


async def require_swept_and_whole(run: Any, history: Any) -> None:
    """What `headway weights verify` finds is whole, most versions are gone, and of them nothing is left."""
    versions = await Versions.of(run.bus, run.config)
    found = await versions.verify()
    assert found["gone"] + found["versions"] == len(history.manifests)
    assert found["gone"] > 10
    weights = await objects(run, "weights")
    assert {key for key in weights if key.endswith(".manifest")} <= {
        run.bus.keys.manifest(history.manifests[Version(0, n)]) for n in range(history.head.n - 20, history.head.n + 1)
    }
    assert len(weights) < 60


async def test_clocks_that_jump_by_hours_delete_and_corrupt_nothing(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look at the time of day differs by up to half a day: worse than services whose clocks differ by hours."""
    rng, now = random.Random(0), time.time

    def wrong() -> float:
        return now() + rng.uniform(-12, 12) * 3600

    monkeypatch.setattr(time, "time", wrong)
    monkeypatch.setattr(time, "time_ns", lambda: int(wrong() * 1e9))
    run = make_run(steps=24, extra=PURGED.replace("3600.0", "0.02").replace("0.001", "600.0"))
    lease = run.bus.keys.lease("recording-x")
    await run.bus.store.put(lease, pack(Lease(holder="x", versions=(Version(0, 1),))))
    history = await train(run, 24)
    manifests = {run.bus.keys.manifest(digest) for digest in history.manifests.values()}
    assert manifests <= await objects(run, "weights")  # a grace period of ten minutes is not over
    run.config = run.config.model_copy(
        update={"retention": run.config.retention.model_copy(update={"grace_s": 0.001, "every_s": 3600.0})}
    )
    assert await sweep(run) > 0
    left = await objects(run, "weights")
    assert run.bus.keys.manifest(history.manifests[Version(0, 1)]) in left
    assert run.bus.keys.manifest(history.manifests[Version(0, 5)]) not in left
    assert (await audit(run.bus)).violations == []
    assert (await (await Versions.of(run.bus, run.config)).verify())["gone"] > 5


async def test_large_bodies_that_no_message_claims_are_swept_and_others_stay(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.bus.connection.INLINE_BYTES_MAX", 500)
    run = make_run(steps=8, extra=PURGED)
    await run.bus.store.put(run.bus.keys.blob("f" * 64), b"an orphan")
    await train(run, 8)
    before = await objects(run, "blobs")
    await sweep(run)
    claimed = set()
    for suffix in STREAM_SUFFIXES:
        claimed |= {unpack(Claim, s.body).key async for s in read_all(run.bus, suffix) if H_CLAIM in s.headers}
    after = await objects(run, "blobs")
    assert before > after > set()
    assert after == claimed & before
    assert (await audit(run.bus)).violations == []


async def test_what_a_zombie_publishes_binds_nothing_and_is_swept(make_run: Make) -> None:
    """Fenced out before it noticed, it uploads a version, a checkpoint and an announcement, and cannot commit."""
    run = make_run(steps=3, extra=SWEPT)
    history = await train(run, 3)
    before = [await objects(run, folder) for folder in FOLDERS]
    reader, key = LedgerReader(run.bus), key_of(run)
    await reader.read_new()
    zombie = LedgerWriter(run.bus, key, reader.tail)
    await LedgerWriter(run.bus, key, reader.tail).append(Open(instance="new", environment={}), history.head, term=2)
    data = np.arange(4096, dtype=np.uint8)
    publisher = Publisher(store=run.bus.store, keys=run.bus.keys, private_key=key)
    published, _ = await publisher.publish(
        Version(0, 4), {"w": RawTensor(dtype="U8", shape=data.shape, data=data)}, None
    )
    checkpoint = digest_of(b"checkpoint")
    await run.bus.store.put(run.bus.keys.checkpoint(checkpoint), b"checkpoint")
    step = history.last_step.model_copy(
        update={
            "version": Version(0, 4),
            "parent": Version(0, 3),
            "manifest": published.digest,
            "root": published.manifest.root,
            "checkpoint": checkpoint,
        }
    )
    with pytest.raises(FencedOut):
        await zombie.append(step, Version(0, 4))
    assert (await run.history()).head == Version(0, 3)
    assert [await objects(run, folder) for folder in FOLDERS] != before
    assert await sweep(run) == 3  # manifest, shard, checkpoint
    assert [await objects(run, folder) for folder in FOLDERS] == before
