"""Tasks are pure functions of the configuration and the task set; how many go out, of the ledger."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from headway.bus.ledger import Link
from headway.schemas.config import parse_config
from headway.schemas.ids import train_rollout_id
from headway.schemas.ledger import Consumed, Counters, Record, Step
from headway.schemas.version import Version
from headway.trainer.dispatcher import Dispatcher
from headway.trainer.plan import Plan, TaskSet

TASKS = TaskSet(digest="a" * 64, train=tuple(f"t{i}" for i in range(5)), heldout=tuple(f"h{i}" for i in range(9)))
CONFIG = parse_config("[grpo]\nsamples_per_group = 4\nmin_graded = 2\n[eval]\nprograms = 3\nsamples = 2", "x")
PLAN = Plan(config=CONFIG, tasks=TASKS)


def test_a_group_is_the_same_whenever_it_is_computed() -> None:
    assert PLAN.group(7, 1) == PLAN.group(7, 1)
    assert len({task.task_id for task in PLAN.group(7, 1)}) == 1
    assert [task.last_of_unit for task in PLAN.group(7, 1)] == [False, False, False, True]
    assert len({task.sampling_seed for task in PLAN.group(7, 1)}) == 4


def test_an_epoch_visits_every_training_task_once_and_no_held_out_one() -> None:
    first = [PLAN.group(g, 0)[0].task_id for g in range(5)]
    second = [PLAN.group(g, 0)[0].task_id for g in range(5, 10)]
    assert sorted(first) == sorted(second) == sorted(TASKS.train)
    assert first != second


def test_an_evaluation_block_samples_held_out_programs_under_one_pinned_version() -> None:
    block = PLAN.eval_block(1, Version(0, 9), 40)
    assert {task.pinned for task in block} == {Version(0, 9)}
    assert {task.task_id for task in block} == {"h0", "h1", "h2"}
    assert sum(task.temperature == 0 for task in block) == 3
    assert sum(task.temperature == 1 for task in block) == 6
    assert len({task.rollout_id for task in block}) == 9
    assert [task.last_of_unit for task in block].index(True) == 8
    assert {(task.groups_issued, task.eval_blocks_issued) for task in block} == {(40, 2)}


PACED = parse_config("[grpo]\ngroups_per_step = 4\n[staleness]\nmax_lag = 4\n[eval]\nat = []", "x")


def link(n: int, masked_share: float) -> Link:
    """The n-th step, of four groups."""
    ids = [train_rollout_id(group, 0) for group in range(4 * n - 4, 4 * n)]
    consumed = [Consumed(rollout_id=rollout_id, seq=1, reward=0.0) for rollout_id in ids]
    digest, counters = "0" * 64, Counters(trained_rollouts=4 * n, trained_groups=4 * n)
    body = Step(
        version=Version(0, n), parent=Version(0, n - 1), consumed=consumed, drops=[],
        cursor=9 * n, pool=[], counters=counters, rng=b"",
        metrics={"masked_tokens": 100 * masked_share, "trained_tokens": 100 * (1 - masked_share)},
        checkpoint=digest, manifest=digest, root=digest,
    )  # fmt: skip
    record = Record(prev=digest, term=1, index=n, body=body)
    return Link(seq=n, record=record, version=body.version, digest=digest)


async def groups_issued(parts: list[list[Link]]) -> int:
    """How many groups are out once the ledger came in these parts and nothing more may go."""
    service: Any = SimpleNamespace(bus=mock.Mock(), config=PACED, status={})
    dispatcher = Dispatcher(service, Plan(config=PACED, tasks=TASKS))
    dispatcher._reader = mock.Mock(read_new=mock.AsyncMock(side_effect=parts))  # type: ignore[assignment]
    with mock.patch.object(dispatcher, "_in_flight", mock.AsyncMock(return_value=0)):
        for _ in parts:
            await dispatcher._follow()
            while await dispatcher._next_unit() is not None:
                dispatcher._groups += 1
    return dispatcher._groups


async def test_steps_of_tokens_too_old_hold_tasks_back_and_a_restarted_dispatcher_knows_it() -> None:
    young, old = ([link(n, share) for n in range(1, 7)] for share in (0.0, 0.8))
    assert await groups_issued([young]) == 24 + 16
    assert await groups_issued([old]) == 24 + 7
    assert await groups_issued([[one] for one in old]) == 24 + 7
