"""`headway audit`: proves from a run's streams alone what became of every task, rollout, attempt and version.

Every issued training rollout is in exactly one state: trained, dropped with a reason, or pending (in the
ledger's pool, published and not yet read, or still being rolled out). Every attempt is the deciding one of its
rollout, a duplicate, given back, or of a rollout that was never issued. Every version lies on the line that leads
to the head or was abandoned by a fork, and whatever was announced, applied or stamped agrees with the ledger.
Needs no torch and no trust in any counter: the counters in the ledger are themselves checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Container, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from headway.bus.connection import Bus, StoredMessage
from headway.bus.ledger import LedgerReader, Link
from headway.bus.reader import read_all
from headway.bus.recorder import require_whole
from headway.schemas.errors import PromiseViolated, WireError
from headway.schemas.ids import train_rollout_id
from headway.schemas.ledger import Consumed, Drop, Drops, Step
from headway.schemas.messages import H_OUTCOME, H_ROLLOUT, Applied, Rollout, Task, TrainerStamp, WeightsAnnounced
from headway.schemas.rewards import Facts, Scoring
from headway.schemas.sections import RewardConfig
from headway.schemas.version import Version
from headway.schemas.wire import Message
from headway.trainer.groups import parse_train_id
from headway.trainer.history import History

VIOLATIONS_MAX = 50
End = Consumed | Drop
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A message of ROLLOUTS, as far as the audit cares."""

    seq: int
    rollout_id: str
    terminal: bool
    outcome: str
    task_id: str = ""
    reward: float | None = None
    """As the sandbox host signed it."""


@dataclass(slots=True, kw_only=True)
class Report:
    """`violations` is empty when every promise holds. Counts are of training rollouts unless named eval."""

    issued: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    lost: int = 0
    purged: int = 0
    """Settled, by the ledger alone: their tasks were purged."""
    trained_twice: int = 0
    duplicates: int = 0
    retries: int = 0
    eval_issued: int = 0
    eval_done: int = 0
    attempts: dict[str, int] = field(default_factory=dict)
    """By state: messages of ROLLOUTS, and those that were purged since, as the ledger has them."""
    versions: int = 0
    abandoned_versions: int = 0
    terms: int = 0
    broken_link: dict[str, int | str] | None = None
    """The first record of the ledger that does not continue the chain, and why."""
    violations: list[str] = field(default_factory=list)

    def violate(self, text: str) -> None:
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(text)

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


async def audit(bus: Bus, trainer_key: bytes | None = None) -> Report:
    """Read the streams of the bus's run and judge. Raises UnavailableError, InputError for a partial recording.

    The run may go on meanwhile: what derives from the ledger is read before it, what it refers to after it.
    """
    require_whole(bus)
    said = await _projections(bus)
    history, settled, broken = History(), list[End](), None
    reader = LedgerReader(bus, trainer_key)
    seq = 0
    try:
        async for stored in read_all(bus, "LEDGER"):
            seq = stored.seq
            link = await reader.verify(stored)
            history.add(link)
            settled += _ends_of(link)
    except PromiseViolated as error:
        broken = {"seq": seq, "why": str(error)}
    rewards = history.genesis.config.get("reward", {}) if history.genesis is not None else {}
    scoring = Scoring(RewardConfig.model_validate(rewards))
    attempts = [await _attempt(bus, history, scoring, stored) async for stored in read_all(bus, "ROLLOUTS")]
    tasks = [task async for stored in read_all(bus, "TASKS") if (task := await _task(bus, stored)) is not None]
    report = judge(history, settled, tasks, attempts)
    if broken is not None:
        report.broken_link = broken
        report.violations.insert(0, str(broken["why"]))
    else:
        _check_projections(report, said, history, settled)
    return report


@dataclass(slots=True)
class _Said:
    """What the trainer and the agents said of versions and rollouts, with the sequences at which they did."""

    announced: list[tuple[int, Version, str, str]]
    applied: list[tuple[int, Version, str]]
    stamped: list[tuple[int, str, str]]


async def _projections(bus: Bus) -> _Said:
    announced = [
        (stored.seq, one.version, one.manifest, one.root)
        async for stored, one in _valid(bus, "WEIGHTS", WeightsAnnounced, ">")
    ]
    applied = [
        (stored.seq, one.version, one.root)
        async for stored, one in _valid(bus, "EVENTS", Applied, f"rl.{bus.run}.applied.>")
    ]
    stamps = _valid(bus, "STAMPS", TrainerStamp, bus.subjects.trainer_stamp)
    return _Said(announced, applied, [(stored.seq, one.rollout_id, one.outcome) async for stored, one in stamps])


def _check_projections(report: Report, said: _Said, history: History, settled: list[End]) -> None:
    """What was announced, applied and stamped says nothing else than the ledger."""
    for seq, version, manifest, root in said.announced:
        if (history.manifests.get(version), history.roots.get(version)) != (manifest, root):
            report.violate(f"WEIGHTS {seq} announces {version} otherwise than the ledger binds it")
    for seq, version, root in said.applied:
        if history.roots.get(version) != root:
            report.violate(f"EVENTS {seq} says that {version} is served with another root than the ledger's")
    ends = {end.rollout_id: f"dropped:{end.reason}" if isinstance(end, Drop) else "trained" for end in settled}
    for seq, rollout_id, outcome in said.stamped:
        if ends.get(rollout_id) != outcome:
            report.violate(f"STAMPS {seq} calls {rollout_id} {outcome}, the ledger {ends.get(rollout_id)}")


async def _valid(bus: Bus, suffix: str, cls: type[M], subject: str) -> AsyncIterator[tuple[StoredMessage, M]]:
    """The messages that decode; what does not is believed by nobody."""
    async for stored in read_all(bus, suffix, filter_subject=subject):
        try:
            yield stored, await bus.open(cls, stored)
        except WireError:
            continue


async def _task(bus: Bus, stored: StoredMessage) -> Task | None:
    try:
        return await bus.open(Task, stored)
    except WireError:
        return None  # agents bury what is no task, and it issues nothing


def _ends_of(link: Link) -> list[End]:
    body = link.record.body
    if isinstance(body, Step):
        return [*body.consumed, *body.drops]
    return list(body.drops) if isinstance(body, Drops) else []


async def _attempt(bus: Bus, history: History, scoring: Scoring, stored: StoredMessage) -> Attempt:
    rollout_id, outcome = stored.headers.get(H_ROLLOUT, ""), stored.headers.get(H_OUTCOME, "")
    try:
        rollout = await bus.open(Rollout, stored)
        reward = None
        if rollout.verdict is not None and rollout.trajectory is not None and history.genesis is not None:
            verdict = rollout.verdict.open_verdict(history.genesis.sandbox_key)
            reward = scoring.score(Facts.of(rollout.trajectory, rollout.commands, verdict)).total
        return Attempt(stored.seq, rollout.rollout_id, rollout.terminal, rollout.outcome, rollout.task_id, reward)
    except WireError:
        # Refused by the trainer too: it ends its rollout as a drop, under the id that its header claims.
        return Attempt(stored.seq, rollout_id, parse_train_id(rollout_id) is not None, f"refused:{outcome}")


def judge(history: History, settled: list[End], tasks: list[Task], attempts: list[Attempt]) -> Report:
    """What became of every task, given what the ledger settled and the attempts in stream order.

    A trainer may have purged TASKS and ROLLOUTS from their start (`retention.purge`). Then the ledger has to hold
    an end of every rollout that was issued before the first task left, and must need no attempt from before the
    first one left.
    """
    report = Report()
    issued = Counter(task.rollout_id for task in tasks if task.purpose == "train")
    evals = {task.rollout_id for task in tasks if task.purpose == "eval"}
    for rollout_id, times in issued.items():
        if times > 1:
            report.violate(f"{rollout_id} was issued {times} times")
    task_ids = {task.rollout_id: task.task_id for task in tasks}
    before, gone = _purged(report, history, settled, tasks, attempts)
    issued.update(before)
    attempts = [*(_as_settled(end, task_ids) for end in gone), *attempts]
    deciding = _deciding(report, issued.keys() | evals, attempts)
    ends = _ends(report, settled, issued, deciding)
    _check_trained(report, settled, task_ids, deciding)
    report.issued, report.eval_issued = len(issued), len(evals)
    report.eval_done = len(evals & deciding.keys())
    pool = set(history.pool)
    for rollout_id in issued.keys() - ends:
        attempt = deciding.get(rollout_id)
        if attempt is not None and attempt.seq <= history.cursor and attempt.seq not in pool:
            report.lost += 1
            report.violate(f"{rollout_id} is lost: attempt {attempt.seq} lies before the cursor {history.cursor}")
        else:
            report.pending += 1
    report.versions, report.terms = len(history.manifests), history.term
    report.abandoned_versions = sum(not history.lineage.is_ancestor(version) for version in history.manifests)
    _check_counters(report, history)
    return report


def _purged(
    report: Report, history: History, settled: list[End], tasks: list[Task], attempts: list[Attempt]
) -> tuple[set[str], list[End]]:
    """The rollouts issued before the first task left, and the ends decided before the first attempt left."""
    oldest_seq, needed_seq = attempts[0].seq if attempts else 1, min([history.cursor + 1, *history.pool])
    if oldest_seq > needed_seq:
        report.violate(f"ROLLOUTS begins at {oldest_seq}, the ledger needs it from {needed_seq} on")
    first = next((task for task in tasks if task.purpose == "train"), None)
    group = first.group if first is not None else tasks[-1].groups_issued if tasks else 0
    if group > len(history.settled):
        report.violate(f"TASKS begins at group {group}, the ledger settled {len(history.settled)}")
        group = 0
    samples = int(history.genesis.config["grpo"]["samples_per_group"]) if history.genesis is not None else 0
    before = {train_rollout_id(g, s) for g in range(group) for s in range(samples)}
    before |= {train_rollout_id(group, s) for s in range(first.sample if first is not None else 0)}
    for rollout_id in sorted(before - {end.rollout_id for end in settled}):
        report.violate(f"{rollout_id} was purged from TASKS and has no end in the ledger")
    report.purged = len(before)
    return before, [end for end in settled if end.seq < oldest_seq]


def _as_settled(end: End, task_ids: Mapping[str, str]) -> Attempt:
    """The attempt that decided, as the ledger has it."""
    outcome, reward = ("dropped", None) if isinstance(end, Drop) else ("ok", end.reward)
    return Attempt(end.seq, end.rollout_id, True, outcome, task_ids.get(end.rollout_id, ""), reward)


def _deciding(report: Report, issued: Container[str], attempts: list[Attempt]) -> Mapping[str, Attempt]:
    """The first terminal attempt of every rollout, in stream order."""
    found: dict[str, Attempt] = {}
    states: Counter[str] = Counter()
    for attempt in attempts:
        if not attempt.terminal:
            states["given back"] += 1
        elif found.setdefault(attempt.rollout_id, attempt) is not attempt:
            states["duplicate"] += 1
        else:
            states["deciding" if attempt.rollout_id in issued else "never issued"] += 1
    report.attempts = dict(states)
    report.retries, report.duplicates = states["given back"], states["duplicate"]
    return found


def _ends(
    report: Report,
    settled: list[End],
    issued: Counter[str],
    deciding: Mapping[str, Attempt],
) -> set[str]:
    trained: Counter[str] = Counter()
    dropped: dict[str, str] = {}
    for end in settled:
        rollout_id, seq = end.rollout_id, end.seq
        if rollout_id not in issued:
            report.violate(f"{rollout_id} was settled and never issued")
        attempt = deciding.get(rollout_id)
        if attempt is None or attempt.seq != seq:
            where = attempt.seq if attempt else "nowhere"
            report.violate(f"{rollout_id} was settled by attempt {seq}, its first terminal attempt is {where}")
        if isinstance(end, Drop):
            if rollout_id in dropped or rollout_id in trained:
                report.violate(f"{rollout_id} is in two states")
            dropped[rollout_id] = end.reason
        else:
            if rollout_id in dropped:
                report.violate(f"{rollout_id} is in two states")
            if attempt is not None and attempt.outcome != "ok":
                report.violate(f"{rollout_id} was trained on an attempt that is {attempt.outcome}")
            trained[rollout_id] += 1
    report.trained, report.dropped = len(trained), dict(Counter(dropped.values()))
    report.trained_twice = sum(1 for times in trained.values() if times > 1)
    for rollout_id, times in trained.items():
        if times > 1:
            report.violate(f"{rollout_id} was trained {times} times")
    return trained.keys() | dropped.keys()


def _check_trained(
    report: Report, settled: list[End], task_ids: Mapping[str, str], deciding: Mapping[str, Attempt]
) -> None:
    """What was trained on is the task that was issued, with the reward that follows from what was signed."""
    for end in settled:
        attempt = deciding.get(end.rollout_id)
        if isinstance(end, Drop) or attempt is None or attempt.outcome != "ok":
            continue
        if attempt.task_id != task_ids.get(end.rollout_id, attempt.task_id):
            report.violate(f"{end.rollout_id} was trained on task {attempt.task_id}, another was issued")
        if attempt.reward != end.reward:
            report.violate(f"{end.rollout_id} was trained with reward {end.reward}, {attempt.reward} is due")


def _check_counters(report: Report, history: History) -> None:
    counters = history.counters
    dropped = sum(report.dropped.values())
    if (counters.trained_rollouts, counters.dropped_rollouts) != (report.trained, dropped):
        report.violate(
            f"the ledger counts {counters.trained_rollouts} trained and {counters.dropped_rollouts} dropped, "
            f"its records hold {report.trained} and {dropped}"
        )
