"""Tasks are pure functions of the configuration and the task set."""

from __future__ import annotations

from headway.schemas.config import parse_config
from headway.schemas.version import Version
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
