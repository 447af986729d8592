"""`headway trainer`: consumes ROLLOUTS, takes GRPO steps, commits them to the ledger, publishes weights.

Order of a step: compute, checkpoint and shards and manifest durable, append `step` (the commit), announce,
stamp. Killed anywhere before the append, the step never happened; after it, `open` repeats what is missing.
While a step is made durable the next one is computed; commits stay in order, and a crash discards both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from headway.bus.ledger import LedgerReader, LedgerWriter, Link
from headway.bus.reader import last_valid, read_at
from headway.bus.service import Service
from headway.kernels.config import ModelConfig
from headway.kernels.selftest import refusal
from headway.schemas import signing
from headway.schemas.chat import chat_digest, require_same_chat
from headway.schemas.errors import FencedOut, PromiseViolated, UnavailableError, WireError
from headway.schemas.ledger import Counters, DropReason, Drops, Genesis, Open, Step
from headway.schemas.messages import Rollout, Task
from headway.schemas.rewards import Scoring
from headway.schemas.version import Version
from headway.schemas.wire import pack
from headway.trainer import bundle, environment, lead, projections, recover
from headway.trainer import checkpoint as checkpoints
from headway.trainer.agreement import Disagreement
from headway.trainer.batching import Sample
from headway.trainer.begin import base_folder, begin, load_base
from headway.trainer.groups import Batch, Pool, counters_after
from headway.trainer.history import History, require_same_config
from headway.trainer.intake import Intake, Judge
from headway.trainer.learner import Learner, StepResult
from headway.trainer.mesh import Mesh, mesh_of
from headway.trainer.plan import Plan, TaskSet
from headway.trainer.publishing import WeightLine
from headway.trainer.quarantine import Quarantine, agent_of, require_somebody
from headway.trainer.staleness import Staleness
from headway.trainer.sweeper import Sweeper

WAIT_S = 0.25
STAND_BY_S = 1.0
MAX_UNCOMMITTED = 1
"""Computed steps that may wait for their commit while the next one is computed. In lockstep none does: there the
next batch is sampled after the commit anyway."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """A step that is not in the ledger yet. Nothing here is the learner's own: it goes on."""

    version: Version
    parent: Version
    batch: Batch[Rollout]
    samples: list[Sample]
    result: StepResult
    checkpoint: bytes | None
    """Where one is due."""
    weights: dict[str, torch.Tensor]


class Trainer:
    """One term of one run's trainer."""

    def __init__(self, service: Service, base: Path, tasks: TaskSet, mesh: Mesh) -> None:
        self._mesh = mesh
        self._service, self._config, self._bus = service, service.config, service.bus
        self._base, self._plan = base, Plan(config=service.config, tasks=tasks)
        self._key = signing.load_key(service.settings.trainer_key())
        self._history, self._failed_before = History(), False
        self._stale, self._quarantine = Staleness.of(self._config), Quarantine()
        self._sweeper = Sweeper(service, self._history, signing.public_key(self._key))
        self._uncommitted: deque[asyncio.Task[None]] = deque()
        self._ahead = 0 if self._config.run.lockstep else MAX_UNCOMMITTED

    async def run(self) -> None:
        """Open a term, then step until the run is done or drained; afterwards wait for the drain."""
        await self._open()
        service, steps = self._service, self._config.run.steps
        feeding = service.tasks.create_task(self._intake.run())
        sweeping = service.tasks.create_task(self._sweeper.run(self._history.term))
        try:
            while self._line.head.n < steps and not service.stop.is_set():
                await self._advance()
            await self._committed(0)
            if not service.stop.is_set():
                service.status.update(phase="all steps committed")
                await self._stand_by()
        finally:
            feeding.cancel()
            sweeping.cancel()

    async def _stand_by(self) -> None:
        """Wait for the drain. Raises FencedOut when another writer appends, as a rollback does: there is work again."""
        while not self._service.stop.is_set():
            await self._require_last_word()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._service.stop.wait(), STAND_BY_S)

    async def _require_last_word(self) -> None:
        """Raises FencedOut when another writer has appended: what it decided is not known here."""
        with contextlib.suppress(UnavailableError):
            newest = await self._bus.last("LEDGER")
            if newest is not None and newest.seq != self._ledger.tail.seq:
                raise FencedOut("another writer has appended to the ledger", hint="start the run again to follow it")

    # -- taking over ---------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._service.status.update(phase="opening")
        model, weights = await asyncio.to_thread(load_base, self._base)
        self._learner = await asyncio.to_thread(self._make_learner, model, weights)
        self._weights = WeightLine(self._service, self._key, self._mesh)
        reader = LedgerReader(self._bus, signing.public_key(self._key))
        links = await reader.read_new()
        self._history.extend(links)
        self._ledger = LedgerWriter(self._bus, self._key, reader.tail)
        if self._history.genesis is None:
            await self._write_genesis()
        genesis = self._history.genesis
        assert genesis is not None
        require_same_config(genesis, self._config)
        require_same_chat(genesis.chat, self._config)
        opened = Open(instance=self._service.settings.instance, environment=environment.describe())
        found = await self._ledger.take_over(opened)
        self._history.extend(found)
        self._line = self._history.lineage  # with what is computed and not yet committed
        await self._restore(genesis, model, [*links, *found])
        self._service.status.update(head=str(self._history.head))
        log.info("term_opened", term=self._history.term, head=str(self._history.head), cursor=self._history.cursor)

    def _make_learner(self, model: ModelConfig, weights: dict[str, torch.Tensor]) -> Learner:
        learner = begin(self._config, model, weights, self._mesh)
        if self._mesh.size > 1:
            self._mesh.require_alike(lead.likeness(self._config, learner))
        return learner

    async def _write_genesis(self) -> None:
        await asyncio.to_thread(self._tell, lead.PUBLISH, Version(0, 0))
        published = await self._weights.publish(Version(0, 0), self._learner.rollout_weights())
        config = self._config
        genesis = Genesis(
            run=config.run.name,
            config=config.shared(),
            config_digest=config.shared_digest(),
            task_set=self._plan.tasks.digest,
            base_manifest=published.digest,
            base_root=published.manifest.root,
            trainer_key=signing.public_key(self._key),
            sandbox_key=self._service.settings.sandbox_public_key(),
            chat=chat_digest(config),
        )
        self._history.add(await self._ledger.append(genesis, Version(0, 0)))

    async def _restore(self, genesis: Genesis, model: ModelConfig, links: list[Link]) -> None:
        history, config, head = self._history, self._config, self._history.head
        await recover.to_head(
            self._service, self._learner, links, model.tensor_shapes(), self._stale, genesis.trainer_key
        )
        weights, manifest, root = self._learner.rollout_weights(), history.manifests[head], history.roots[head]
        await asyncio.to_thread(self._tell, lead.ADOPT, head, manifest, root)
        await self._weights.adopt(head, manifest, weights, root)
        self._pool: Pool[Rollout] = Pool(
            samples=config.grpo.samples_per_group,
            min_graded=config.grpo.min_graded,
            lockstep=config.run.lockstep,
            settled=set(history.settled),
        )
        judge = Judge(
            run=config.run.name, genesis=genesis, model=model, plan=self._plan, scoring=Scoring(config.reward)
        )
        self._intake = Intake(self._bus, judge, self._pool, history)
        await self._intake.restore(history.pool, history.cursor)
        self._weights.retain(list(history.checkpoints.values()))
        await self._weights.announce()
        if history.last_step is not None and history.last_step_lineage is not None:
            await projections.restamp(self._bus, history.last_step, history.last_step_lineage, self._stale)

    # -- one step ------------------------------------------------------------------------------------------

    async def _advance(self) -> None:
        """Wait for a batch and train on it, or declare what can never train."""
        started = time.monotonic()
        batch = await self._wait_for_batch()
        if batch is None:
            return
        waited_s = time.monotonic() - started
        if not batch.groups:
            await self._committed(0)
            await self._declare_drops(batch)
            return
        self._service.status.update(phase="training")
        try:
            step = await asyncio.to_thread(self._compute, batch)
        except Disagreement as found:
            await self._committed(0)
            try:
                await self._take_disagreement(batch, found)
            except PromiseViolated as error:
                await self._set_aside(batch, error)
            return
        except UnavailableError:  # another rank is gone, which is not the batch's fault
            raise
        except Exception as error:  # of any type: whether the batch is to blame, the next one shows
            await self._committed(0)
            await self._set_aside(batch, error)
            return
        self._failed_before = False
        computed_s = time.monotonic() - started - waited_s
        await self._committed(max(self._ahead - 1, 0))
        self._line = self._line.advance()
        self._pool.settle([group for group, _ in batch.groups] + list(batch.void_groups))
        stood_still_s = time.monotonic() - started - waited_s - computed_s
        timings = {"waited_s": waited_s, "computed_s": computed_s, "published_s": stood_still_s}
        commit = self._service.tasks.create_task(self._commit(step, timings))
        commit.add_done_callback(lambda _: self._intake.arrived.set())
        self._uncommitted.append(commit)
        await self._committed(self._ahead)

    async def _committed(self, left_max: int) -> None:
        """Wait until at most `left_max` computed steps are not in the ledger, or for the failure of a commit."""
        while len(self._uncommitted) > left_max:
            if not self._uncommitted[0].done():
                self._service.status.update(phase="publishing")
                await asyncio.wait({self._uncommitted[0]})
            self._uncommitted.popleft().result()

    def _compute(self, batch: Batch[Rollout]) -> Computed:
        """Train on the batch. In a worker thread, which nothing but the learner shares."""
        samples = [self._stale.sample(d.payload, self._line) for d in batch.rollouts() if d.payload]
        version = self._line.advance().head
        result = self._learner.step(samples)
        self._tell(lead.PUBLISH, version)
        due = version.n == self._config.run.steps or version.n % self._config.grpo.checkpoint_every == 0
        return Computed(
            version=version,
            parent=self._line.head,
            batch=batch,
            samples=samples,
            result=result,
            checkpoint=checkpoints.to_bytes(self._learner.state(copied=False)) if due else None,
            weights=self._learner.rollout_weights(),
        )

    def _tell(self, verb: str, version: Version, manifest: str = "", root: str = "") -> None:
        """Have the other ranks do the same with a version."""
        self._mesh.tell(verb, [pack(lead.Named(version=str(version), manifest=manifest, root=root))])

    async def _take_disagreement(self, batch: Batch[Rollout], found: Disagreement) -> None:
        """Set the rollouts aside, so that the batch is planned again. Raises PromiseViolated when it is systemic."""
        model, dtype = self._learner.model, getattr(torch, self._config.model.compute_dtype)
        if broken := await asyncio.to_thread(refusal, model, dtype):
            raise PromiseViolated(found.what, why=f"this trainer no longer computes bit for bit: {broken}") from None
        self._quarantine.add(batch, found, self._history.counters)
        for decided in batch.rollouts():
            if (detail := found.details.get(decided.rollout_id)) is None or decided.payload is None:
                continue
            agent = agent_of(decided.payload)
            log.warning("rollout_disagreed", rollout=decided.rollout_id, agent=agent, seq=decided.seq, detail=detail)
            await self._service.event("rollout_disagreed", rollout=decided.rollout_id, agent=agent, detail=detail)
            if stored := await read_at(self._bus, "ROLLOUTS", decided.seq):
                await self._bus.bury(stored, WireError("disagreed", f"{agent}: {decided.rollout_id} {detail}"))

    def _reason(self, rollout: Rollout) -> DropReason | None:
        history = self._history
        return self._stale.reason(rollout, self._line) or self._quarantine.reason(rollout, history.counters)

    async def _set_aside(self, batch: Batch[Rollout], error: Exception) -> None:
        """Leave a bundle of the failed step, drop its batch and go on; the learner is as it was before.

        Raises `error` when it is a broken promise, or the second in a row: then it is not the batch.
        """
        version, seqs = self._history.lineage.advance().head, [one.seq for one in batch.rollouts()]
        folder, shape = self._service.settings.run_dir, {"config.json": (self._base / "config.json").read_bytes()}
        path = await bundle.write_bundle(folder, self._bus, self._learner, version, seqs, error, shape)
        log.error("step_failed", version=str(version), error=repr(error)[:500], bundle=str(path))
        await self._service.event("step_failed", version=str(version), error=repr(error)[:300], bundle=str(path))
        if isinstance(error, PromiseViolated) or self._failed_before:
            raise error
        self._failed_before = True
        await self._declare_drops(bundle.set_aside(batch))

    async def _wait_for_batch(self) -> Batch[Rollout] | None:
        """A full batch, or one without groups whose drops are due; None when drained."""
        size = self._config.grpo.groups_per_step
        while not self._service.stop.is_set():
            self._intake.arrived.clear()
            batch = self._pool.plan(size, self._reason)
            if len(batch.groups) == size:
                return batch
            committed = all(commit.done() for commit in self._uncommitted)
            if batch.void_groups and committed and (len(batch.void_groups) >= size or await self._nothing_in_flight()):
                drops = self._pool.drops_of(batch, batch.void_groups)
                return Batch(groups=(), drops=drops, void_groups=batch.void_groups)
            missing = size - len(batch.groups)
            self._service.status.update(phase=f"waiting for rollouts of {missing} groups", ready=len(batch.groups))
            try:
                await asyncio.wait_for(self._intake.arrived.wait(), WAIT_S)
            except TimeoutError:
                if committed:  # else its own record may be the one that it does not know of yet
                    await self._require_last_word()
        return None

    async def _nothing_in_flight(self) -> bool:
        """Whether every group issued so far is settled or closed, so that only a declaration can move pacing."""
        task, _ = await last_valid(self._bus, "TASKS", Task)
        if task is None:
            return False
        return task.groups_issued == len(self._pool.settled) + len(self._pool.closed)

    async def _declare_drops(self, batch: Batch[Rollout]) -> None:
        last = self._history.last_step
        void = self._history.counters.void_groups - (last.counters.void_groups if last else 0) + len(batch.void_groups)
        window = (self._config.staleness.max_lag + 1) * self._config.grpo.groups_per_step
        require_somebody(batch.drops, void, window, self._quarantine.counts(self._history.counters))
        async with self._intake.gate:
            counters = self._counters(batch)
            self._pool.settle(batch.void_groups)
            record = Drops(
                drops=list(batch.drops), cursor=self._pool.cursor, pool=self._pool.pending_seqs(), counters=counters
            )
            self._history.add(await self._ledger.append(record, self._history.head))
        self._quarantine.settle(record.drops)
        log.info("drops_declared", groups=len(batch.void_groups), rollouts=len(batch.drops))
        await projections.stamp_drops(self._bus, self._history.head, record.drops)

    async def _commit(self, step: Computed, timings: dict[str, float]) -> None:
        """Make the step durable, append it, tell the world."""
        started, result, digest = time.monotonic(), step.result, None
        if step.checkpoint is not None:
            digest = await self._weights.put_checkpoint(step.checkpoint)
        published = await self._weights.publish(step.version, step.weights)
        async with self._intake.gate:
            record = Step(
                version=step.version,
                parent=step.parent,
                consumed=projections.consumed(step.batch),
                drops=list(step.batch.drops),
                cursor=self._pool.cursor,
                pool=self._pool.pending_seqs(),
                counters=self._counters(step.batch, result.metrics),
                rng=result.seed.to_bytes(16, "little"),
                micro_batches=[list(part) for part in result.micro_batches],
                metrics=result.metrics,
                checkpoint=digest,
                manifest=published.digest,
                root=published.manifest.root,
            )
            self._history.add(await self._ledger.append(record, step.version))
        self._quarantine.settle(record.drops)
        await self._weights.announce()
        if digest is not None:
            await self._weights.prune_checkpoints(digest, self._history.term)
        self._service.status.update(head=str(self._history.head))
        timings["commit_s"] = time.monotonic() - started
        if not self._ahead:
            timings["published_s"] += timings["commit_s"]
        await projections.announce_step(
            self._service, self._history, result, step.samples, timings, self._intake.duplicates
        )

    def _counters(self, batch: Batch[Rollout], metrics: Mapping[str, float] | None = None) -> Counters:
        before = self._history.counters
        return counters_after(before, batch, self._quarantine.recorded(before, batch.drops), metrics)


async def main(service: Service) -> None:
    """Rank 0, or the only one."""
    torch.set_num_threads(1)
    mesh = await asyncio.to_thread(mesh_of, os.environ)
    tasks = TaskSet.load(service.settings.run_dir / "tasks")
    await Trainer(service, base_folder(service.config, service.settings), tasks, mesh).run()
    await asyncio.to_thread(mesh.tell, lead.END)
    mesh.close()
