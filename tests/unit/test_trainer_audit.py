"""The audit finds each kind of broken account."""

from __future__ import annotations

from headway.schemas.config import parse_config
from headway.schemas.ledger import Consumed, Counters, Drop, Genesis
from headway.schemas.messages import Task
from headway.schemas.version import Version
from headway.trainer.audit import Attempt, End, Report, judge
from headway.trainer.history import History
from headway.trainer.plan import Plan, TaskSet

TASKS = TaskSet(digest="a" * 64, train=("t0",), heldout=("h0",))
PLAN = Plan(
    config=parse_config("[grpo]\nsamples_per_group = 3\nmin_graded = 2\n[eval]\nprograms = 1", "x"), tasks=TASKS
)
IDS = [task.rollout_id for task in PLAN.group(0, 0)]


def run(settled: list[End], *, pool: tuple[int, ...] = (), cursor: int = 3, counters: tuple[int, int] = (2, 1),
        tasks: list[Task] | None = None, attempts: list[Attempt] | None = None) -> Report:  # fmt: skip
    history = History(cursor=cursor, pool=list(pool))
    history.counters = Counters(trained_rollouts=counters[0], dropped_rollouts=counters[1])
    if attempts is None:
        attempts = [Attempt(seq, rollout_id, True, "ok", "t0", 0.0) for seq, rollout_id in enumerate(IDS, start=1)]
    return judge(history, settled, PLAN.group(0, 0) if tasks is None else tasks, attempts)


def trained(index: int, seq: int | None = None) -> Consumed:
    return Consumed(rollout_id=IDS[index], seq=index + 1 if seq is None else seq, reward=0.0)


def dropped(index: int) -> Drop:
    return Drop(rollout_id=IDS[index], seq=index + 1, reason="stale")


def test_a_clean_account_has_no_violation() -> None:
    report = run([trained(0), trained(1), dropped(2)])
    assert report.violations == []
    assert (report.issued, report.trained, report.dropped, report.pending, report.lost) == (3, 2, {"stale": 1}, 0, 0)


def test_a_rollout_before_the_cursor_that_nobody_settled_is_lost() -> None:
    report = run([trained(0), dropped(2)], counters=(1, 1))
    assert (report.lost, report.pending) == (1, 0)
    assert IDS[1] in report.violations[0]


def test_a_rollout_in_the_pool_or_after_the_cursor_or_unfinished_is_pending() -> None:
    assert run([trained(0)], pool=(2, 3), counters=(1, 0)).pending == 2
    assert run([trained(0)], cursor=1, counters=(1, 0)).violations == []
    assert run([], attempts=[Attempt(1, IDS[0], False, "infra_failed")], counters=(0, 0)).pending == 3


def test_training_twice_is_found() -> None:
    report = run([trained(0), trained(0), trained(1), dropped(2)])
    assert report.trained_twice == 1
    assert any("2 times" in violation for violation in report.violations)


def test_two_states_are_found() -> None:
    assert any("two states" in v for v in run([trained(0), trained(1), dropped(2), dropped(1)]).violations)


def test_training_on_a_later_attempt_than_the_deciding_one_is_found() -> None:
    attempts = [Attempt(seq, IDS[(seq - 1) % 3], True, "ok", "t0", 0.0) for seq in range(1, 7)]
    report = run([trained(0, seq=4), trained(1), dropped(2)], attempts=attempts, cursor=6)
    assert "attempt 4" in report.violations[0]
    assert report.duplicates == 3


def test_training_on_an_infrastructure_failure_is_found() -> None:
    attempts = [Attempt(seq, rollout_id, True, "infra_failed") for seq, rollout_id in enumerate(IDS, start=1)]
    assert any("infra_failed" in v for v in run([trained(0), trained(1), dropped(2)], attempts=attempts).violations)


def test_what_was_never_issued_or_issued_twice_is_found() -> None:
    assert any("never issued" in v for v in run([trained(0)], tasks=[], counters=(1, 0)).violations)
    twice = PLAN.group(0, 0) + PLAN.group(0, 0)[:1]
    assert any("issued 2 times" in v for v in run([trained(0), trained(1), dropped(2)], tasks=twice).violations)


def test_counters_that_lie_are_found() -> None:
    assert any("counts 9" in v for v in run([trained(0), trained(1), dropped(2)], counters=(9, 1)).violations)


def test_evaluations_are_counted_apart() -> None:
    block = PLAN.eval_block(0, Version(0, 0), 0)
    attempts = [Attempt(1, block[0].rollout_id, True, "ok")]
    report = run([], tasks=block, attempts=attempts, counters=(0, 0))
    assert (report.eval_issued, report.eval_done, report.issued, report.violations) == (5, 1, 0, [])


def test_training_on_another_task_or_reward_than_issued_and_signed_is_found() -> None:
    def report(task_id: str, reward: float) -> Report:
        attempts = [Attempt(n, rollout_id, True, "ok", task_id, reward) for n, rollout_id in enumerate(IDS, start=1)]
        return run([trained(0), trained(1), dropped(2)], attempts=attempts)

    assert report("t0", 0.0).violations == []
    assert "another was issued" in report("h0", 0.0).violations[0]
    assert "1.0 is due" in report("t0", 1.0).violations[0]


def purged(
    settled: list[End], *, first_group: int, oldest_seq: int, pool: tuple[int, ...] = (), cursor: int = 9
) -> Report:
    """Three groups of three were issued; tasks from `first_group` and attempts from `oldest_seq` on are left."""
    tasks = [task for group in range(3) for task in PLAN.group(group, 0)]
    ids = [task.rollout_id for task in tasks]
    attempts = [Attempt(seq, ids[seq - 1], True, "ok", "t0", 0.0) for seq in range(oldest_seq, 10)]
    history = History(cursor=cursor, pool=list(pool))
    history.genesis = Genesis.model_construct(config={"grpo": {"samples_per_group": 3}})
    history.settled = {int(end.rollout_id[1:8]) for end in settled}
    history.counters = Counters(trained_rollouts=len(settled))
    return judge(history, settled, tasks[3 * first_group :], attempts)


def ends(*seqs: int) -> list[End]:
    return [Consumed(rollout_id=f"g{(seq - 1) // 3:07d}s{(seq - 1) % 3:03d}", seq=seq, reward=0.0) for seq in seqs]


def test_what_was_settled_may_be_purged_and_counts_as_the_ledger_has_it() -> None:
    report = purged(ends(*range(1, 10)), first_group=2, oldest_seq=5)
    assert report.violations == []
    assert (report.issued, report.trained, report.purged, report.pending) == (9, 9, 6, 0)
    waiting = purged(ends(*range(1, 7)), first_group=2, oldest_seq=7, pool=(7, 8, 9))
    assert (waiting.violations, waiting.pending) == ([], 3)


def test_a_purge_of_what_was_still_needed_is_found() -> None:
    some = purged(ends(*range(1, 6), 7, 8, 9), first_group=2, oldest_seq=1)
    assert "g0000001s002 was purged from TASKS and has no end" in some.violations[0]
    tasks = purged(ends(1, 2, 3), first_group=2, oldest_seq=1)
    assert "TASKS begins at group 2, the ledger settled 1" in tasks.violations[0]
    pool = purged(ends(*range(1, 7)), first_group=0, oldest_seq=8, pool=(7, 8, 9))
    assert "ROLLOUTS begins at 8, the ledger needs it from 7 on" in pool.violations[0]
    unread = purged(ends(*range(1, 7)), first_group=0, oldest_seq=9, cursor=6)
    assert "needs it from 7 on" in unread.violations[0]
