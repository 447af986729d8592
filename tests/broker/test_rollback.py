"""A rollback on a real bus with scripted agents: the line forks, training goes on, the account stays whole."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.bus.ledger import LedgerReader
from headway.bus.reader import read_all
from headway.schemas import signing
from headway.schemas.errors import FencedOut, InputError, PromiseViolated, UnavailableError
from headway.schemas.ledger import Fork
from headway.schemas.messages import Task, TrainerStamp
from headway.schemas.version import Version
from headway.trainer import service as trainer_service
from headway.trainer.audit import audit
from headway.trainer.history import History
from headway.trainer.rollback import rollback
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.transfer import Retrier, TransferLimits

Make = Callable[..., Any]


def answer_of(run: Any) -> Any:
    return lambda task, head: run.graded(task, float(task.sampling_seed % 2), head)


def key_of(run: Any) -> bytes:
    return signing.load_key(run.folder / "keys" / "trainer.key")


async def test_training_goes_on_from_an_earlier_version_and_the_abandoned_line_is_dropped(make_run: Make) -> None:
    """Trained to 4, rolled back to 2, trained to 10: ids once, versions up by one, abandoned tokens never trained."""
    run, left, strays = make_run(steps=10), list[Version](), list[str]()

    def answer(task: Task, head: Version) -> Any:
        if left and head.n >= left[0].n and len(strays) < 3:  # sampled by an engine that still serves the old line
            strays.append(task.rollout_id)
            return run.graded(task, 1.0, left[0])
        return run.graded(task, float(task.sampling_seed % 2), head)

    async with run.dispatcher(), run.agent(answer):
        async with run.trainer():
            await run.wait_for_step(4)
        head = (await run.history()).head
        fork = await rollback(run.bus, key_of(run), Version(0, head.n - 2))
        assert (fork.version, fork.base) == (Version(1, head.n - 2), Version(0, head.n - 2))
        left.append(head)
        async with run.trainer():
            history = await run.wait_for_step(10)
    assert history.head == Version(1, 10)
    assert history.roots[fork.version] == history.roots[fork.base]
    report = await audit(run.bus)
    assert report.violations == []
    assert (report.pending, report.lost, report.trained_twice) == (0, 0, 0)
    assert report.trained == (10 + 2) * 4
    stamps = [await run.bus.open(TrainerStamp, s) async for s in read_all(run.bus, "STAMPS")]
    assert {s.outcome for s in stamps if s.rollout_id in strays} == {"dropped:abandoned"}
    lags = [s.lag_max for s in stamps if s.outcome == "trained"]
    assert 0 <= min(lags) <= max(lags) <= run.config.staleness.max_lag


async def test_a_finished_run_goes_on_after_a_rollback_and_finishes_again(make_run: Make) -> None:
    """The dispatcher stays up; the last evaluation is held again on the new line."""
    run = make_run(steps=3, extra="")
    run.config = run.config.model_copy(
        update={"eval": run.config.eval.model_copy(update={"at": ["end"], "programs": 1, "samples": 1})}
    )

    async def finished(times: int) -> None:
        subject = run.bus.subjects.event("dispatcher", "run_finished")
        async with asyncio.timeout(60):
            while len([s async for s in read_all(run.bus, "EVENTS", filter_subject=subject)]) < times:
                await asyncio.sleep(0.1)

    async with run.dispatcher(), run.agent(answer_of(run)):
        async with run.trainer():
            await finished(1)
        await rollback(run.bus, key_of(run), Version(0, 1))
        async with run.trainer():
            await finished(2)
    assert (await run.history()).head == Version(1, 3)
    tasks = [await run.bus.open(Task, s) async for s in read_all(run.bus, "TASKS")]
    assert {t.pinned for t in tasks if t.purpose == "eval"} == {Version(0, 3), Version(1, 3)}
    assert (await audit(run.bus)).violations == []


async def test_an_agents_mirror_moves_from_the_abandoned_line_to_the_fork(make_run: Make, tmp_path: Path) -> None:
    run = make_run(steps=4)
    async with run.dispatcher(), run.agent(answer_of(run)), run.trainer():
        history = await run.wait_for_step(4)
    key = key_of(run)
    fetcher = Fetcher(
        store=run.bus.store.once(),
        keys=run.bus.keys,
        public_key=signing.public_key(key),
        retrier=Retrier(limits=TransferLimits(), rng=random.Random(0)),
    )
    mirror = HostMirror(tmp_path / "mirror", signing.public_key(key), fsync=False)
    mirror.commit(await fetcher.stage(history.head, history.manifests[history.head], mirror))
    fork = await rollback(run.bus, key, Version(0, 2))
    mirror.commit(await fetcher.stage(fork.version, fork.manifest, mirror))
    assert mirror.root == history.roots[Version(0, 2)]
    assert mirror.head is not None
    assert mirror.head.version == Version(1, 2)


async def test_a_rollback_fences_out_the_trainer_that_still_runs(make_run: Make) -> None:
    run, ended = make_run(steps=50), asyncio.Event()

    async def main(service: Any) -> None:
        try:
            await trainer_service.main(service)
        finally:
            ended.set()

    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.dispatcher(), run.agent(answer_of(run)), run.service("trainer", main):
            history = await run.wait_for_step(3)
            while True:  # the trainer may append in between: then the rollback is the one refused
                history = await run.history()
                try:
                    await rollback(run.bus, key_of(run), Version(0, history.head.n - 1))
                    break
                except FencedOut:
                    continue
            async with asyncio.timeout(60):
                await ended.wait()
            await asyncio.sleep(0.2)
    assert caught.group_contains(FencedOut)
    assert (await run.history()).head.epoch == 1


async def test_a_trainer_without_rollouts_notices_a_rollback_too(make_run: Make) -> None:
    """It appends nothing, so nothing fences it: it would wait for ever, since all others are on the new line."""
    run = make_run(steps=50)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.dispatcher(), run.trainer() as trainer:
            async with run.agent(answer_of(run)):
                await run.wait_for_step(3)
            head = Version(0, 0)
            while head != (head := (await run.history()).head):  # what is under way is committed first
                await asyncio.sleep(1.0)
            await rollback(run.bus, key_of(run), Version(0, head.n - 1))
            async with asyncio.timeout(30):
                await trainer.stop.wait()
    assert caught.group_contains(FencedOut)


async def test_what_cannot_be_rolled_back_to_is_refused_and_changes_nothing(make_run: Make) -> None:
    run = make_run(steps=6)
    async with run.dispatcher(), run.agent(answer_of(run)), run.trainer():
        await run.wait_for_step(6)
    tail = await run.bus.last("LEDGER")
    for version, error, why in (
        (Version(0, 6), InputError, "no earlier version"),
        (Version(1, 2), InputError, "no earlier version"),
        (Version(0, 0), InputError, "no checkpoint"),
        (Version(0, 1), UnavailableError, "checkpoint of 0.1 is gone"),
    ):
        with pytest.raises(error, match=why):
            await rollback(run.bus, key_of(run), version)
    assert (await run.bus.last("LEDGER")).seq == tail.seq


async def test_a_fork_that_contradicts_the_ledger_is_refused(make_run: Make) -> None:
    run = make_run(steps=3)
    async with run.dispatcher(), run.agent(answer_of(run)), run.trainer():
        await run.wait_for_step(3)
    fork = await rollback(run.bus, key_of(run), Version(0, 2))
    links = await LedgerReader(run.bus).read_new()
    assert isinstance(links[-1].record.body, Fork)
    for wrong in ({"root": "0" * 64}, {"version": Version(1, 3)}, {"base": Version(0, 3)}, {"checkpoint": "0" * 64}):
        record = links[-1].record.model_copy(update={"body": fork.model_copy(update=wrong)})
        history = History()
        history.extend(links[:-1])
        with pytest.raises(PromiseViolated):
            history.add(type(links[-1])(links[-1].seq, record, fork.version, links[-1].digest))
