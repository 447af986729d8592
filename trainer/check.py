"""`headway replay check`: today's decision code over a recorded run, and where it decides otherwise.

The ledger's cursors say under which history each message was judged: sequence s under all records whose cursor
lies before s. So group formation, verdicts, drops, batches and counters are a pure function of (the order of
ROLLOUTS, the ledger, the configuration), and can be taken again without a clock, a server or a model. When
drops are declared, and which batches are set aside, are the run's own inputs: taken from the record.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headway.bus.connection import Bus, StoredMessage
from headway.bus.ledger import LedgerReader
from headway.bus.reader import read_all
from headway.kernels.config import ModelConfig
from headway.schemas.config import Config
from headway.schemas.errors import WireError
from headway.schemas.ledger import Drop, DropReason, Drops, Step
from headway.schemas.messages import Rollout, Task
from headway.schemas.rewards import Scoring
from headway.schemas.version import Version
from headway.trainer.groups import Batch, Decided, Pool, counters_after, settled_groups
from headway.trainer.history import History
from headway.trainer.intake import Judge
from headway.trainer.plan import Plan, TaskSet
from headway.trainer.projections import consumed
from headway.trainer.quarantine import Quarantine, agent_of
from headway.trainer.staleness import Staleness

DIFFERENCES_MAX = 50
OUTSIDE = ("blob_lost", "disagreed", "quarantined")
"""Reasons that depend on more than the log (a store, a model, a failed step): the recorded decision stands."""


@dataclass(slots=True, kw_only=True)
class Checked:
    """`differences` is empty when today's code decides as was recorded."""

    tasks: int = 0
    messages: int = 0
    records: int = 0
    taken_from_record: int = 0
    """Decisions that were not taken again, as they depend on more than the log."""
    differences: list[str] = field(default_factory=list)

    def differ(self, text: str) -> None:
        if len(self.differences) < DIFFERENCES_MAX:
            self.differences.append(text)


async def check(bus: Bus, config: Config, model: ModelConfig, tasks: TaskSet, until: Version | None = None) -> Checked:
    """Decide again, up to the step that makes `until`. Raises PromiseViolated for a ledger that cannot be trusted."""
    found, plan = Checked(), Plan(config=config, tasks=tasks)
    async for stored in read_all(bus, "TASKS"):
        try:
            _check_task(found, plan, await bus.open(Task, stored), stored.seq)
        except WireError:
            continue
    outside: dict[int, Drop] = {}
    async for link in LedgerReader(bus).links():
        if isinstance(body := link.record.body, Step | Drops):
            outside |= {drop.seq: drop for drop in body.drops if drop.reason in OUTSIDE}
    await _Fold(bus, plan, model, found, outside).run(until)
    return found


def _check_task(found: Checked, plan: Plan, task: Task, seq: int) -> None:
    found.tasks += 1
    if task.purpose == "train":
        due = plan.group(task.group, task.eval_blocks_issued)
    else:
        due = plan.eval_block(task.group, task.pinned or Version(0, 0), task.groups_issued)
    mine = next((other for other in due if other.rollout_id == task.rollout_id), None)
    if mine is None:
        found.differ(f"TASKS {seq}: {task.rollout_id} was issued, today's plan has no such task in its unit")
    elif mine != task:
        names = [name for name in Task.model_fields if getattr(mine, name) != getattr(task, name)]
        was, now = getattr(task, names[0]), getattr(mine, names[0])
        found.differ(f"TASKS {seq}: {task.rollout_id} was issued with {names[0]} {was!r}, today it would be {now!r}")


class _Fold:
    """The trainer's state of decisions, moved on by the recorded ledger."""

    def __init__(self, bus: Bus, plan: Plan, model: ModelConfig, found: Checked, outside: dict[int, Drop]) -> None:
        self._bus, self._config, self._plan, self._model = bus, plan.config, plan, model
        self._found, self._outside, config = found, outside, plan.config
        self._scoring = Scoring(config.reward)
        self._history, self._stale, self._quarantine = History(), Staleness.of(config), Quarantine()
        self._pool: Pool[Rollout] = Pool(
            samples=config.grpo.samples_per_group, min_graded=config.grpo.min_graded, lockstep=config.run.lockstep
        )

    async def run(self, until: Version | None) -> None:
        messages = read_all(self._bus, "ROLLOUTS")
        async for link in LedgerReader(self._bus).links():
            body = link.record.body
            if isinstance(body, Step | Drops):
                self._found.records += 1
                await self._judge_up_to(body.cursor, messages)
                where = f"step {body.version}" if isinstance(body, Step) else f"drops at LEDGER {link.seq}"
                self._compare(body, where)
                self._pool.settle(sorted(settled_groups(_ids(body)) - self._pool.settled))
                if self._pool.pending_seqs() != body.pool:
                    odd = sorted(set(self._pool.pending_seqs()) ^ set(body.pool))
                    self._found.differ(f"{where}: the pool differs first at ROLLOUTS {odd[0]}")
            self._history.add(link)
            if isinstance(body, Step) and body.version == until:
                return

    async def _judge_up_to(self, cursor: int, messages: AsyncIterator[StoredMessage]) -> None:
        while self._pool.cursor < cursor:
            stored = await anext(messages, None)
            if stored is None:
                self._found.differ(f"ROLLOUTS ends at {self._pool.cursor}, the ledger has read up to {cursor}")
                self._pool.cursor = cursor
                return
            self._found.messages += 1
            decided = await self._decide(stored)
            if decided is None:
                self._pool.skip(stored.seq)
            else:
                self._pool.observe(decided)

    async def _decide(self, stored: StoredMessage) -> Decided[Rollout] | None:
        drop = self._outside.get(stored.seq)
        if drop is not None and drop.reason == "blob_lost":
            self._found.taken_from_record += 1
            return Decided(seq=stored.seq, rollout_id=drop.rollout_id, payload=None, reason=drop.reason)
        assert self._history.genesis is not None
        judge = Judge(
            run=self._bus.run,
            genesis=self._history.genesis,
            model=self._model,
            plan=self._plan,
            scoring=self._scoring,
        )
        opened: Rollout | WireError
        try:
            opened = await self._bus.open(Rollout, stored)
        except WireError as error:
            opened = error
        return judge.judge(stored, opened, self._history)[0]

    def _reason(self, rollout: Rollout) -> DropReason | None:
        history = self._history
        return self._stale.reason(rollout, history.lineage) or self._quarantine.reason(rollout, history.counters)

    def _note_disagreements(self, body: Step | Drops) -> None:
        members = {m.rollout_id: m.payload for group in self._pool.open.values() for m in group.values()}
        for drop in body.drops:
            payload = members.get(drop.rollout_id)
            if drop.reason == "disagreed" and payload is not None:
                self._quarantine.note(drop.rollout_id, agent_of(payload))
                self._found.taken_from_record += 1

    def _compare(self, body: Step | Drops, where: str) -> None:
        self._note_disagreements(body)
        if isinstance(body, Drops):
            groups = settled_groups(_ids(body))
            batch = Batch(groups=(), drops=self._drops_of(groups, body), void_groups=tuple(sorted(groups)))
        else:
            size = self._config.grpo.groups_per_step
            batch = self._pool.plan(size, self._reason)
            self._compare_lists(where, "trains", body.consumed, consumed(batch))
        self._compare_lists(where, "drops", body.drops, list(batch.drops))
        metrics = body.metrics if isinstance(body, Step) else None
        before = self._history.counters
        counters = counters_after(before, batch, self._quarantine.recorded(before, batch.drops), metrics)
        self._quarantine.settle(batch.drops)
        for name in type(counters).model_fields:
            if (was := getattr(body.counters, name)) != (now := getattr(counters, name)):
                self._found.differ(f"{where}: counter {name} was {was}, today it would be {now}")

    def _drops_of(self, groups: set[int], body: Drops) -> tuple[Drop, ...]:
        """What today's code says of the groups that were declared."""
        if any(drop.reason == "quarantined" for drop in body.drops):
            self._found.taken_from_record += len(body.drops)
            return tuple(body.drops)
        everything = self._pool.plan(len(self._pool.closed) + 1, self._reason)
        return self._pool.drops_of(everything, groups)

    def _compare_lists(self, where: str, verb: str, was: list, now: list) -> None:  # type: ignore[type-arg]
        if was == now:
            return
        for place in range(max(len(was), len(now))):
            before, after = (part[place] if place < len(part) else None for part in (was, now))
            if before != after:
                self._found.differ(f"{where} {verb} at place {place}: recorded {_shown(before)}, today {_shown(after)}")
                return


def _ids(body: Step | Drops) -> list[str]:
    trained = [one.rollout_id for one in body.consumed] if isinstance(body, Step) else []
    return trained + [one.rollout_id for one in body.drops]


def _shown(end: object) -> str:
    if end is None:
        return "nothing"
    fields = end.model_dump()  # type: ignore[attr-defined]
    return " ".join(f"{name} {value}" for name, value in fields.items())
