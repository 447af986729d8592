"""Group formation is a function of the stream's order, and nothing trains twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.schemas.errors import PromiseViolated
from headway.schemas.ids import train_rollout_id
from headway.schemas.ledger import DropReason
from headway.schemas.version import Version
from headway.trainer.groups import Decided, Lineage, Pool, parse_train_id


def fresh(_: int) -> DropReason | None:
    return None


def ok(seq: int, group: int, sample: int) -> Decided[int]:
    return Decided(seq=seq, rollout_id=train_rollout_id(group, sample), payload=seq)


def failed(seq: int, group: int, sample: int) -> Decided[int]:
    return Decided(seq=seq, rollout_id=train_rollout_id(group, sample), payload=None, reason="infra_failed")


def test_a_group_closes_only_when_every_sample_is_decided() -> None:
    pool: Pool[int] = Pool(samples=3, min_graded=2)
    pool.observe(ok(1, 0, 0))
    pool.observe(ok(2, 0, 2))
    assert pool.plan(1, fresh).groups == ()
    pool.observe(ok(3, 0, 1))
    [(group, members)] = pool.plan(1, fresh).groups
    assert (group, [m.seq for m in members]) == (0, [1, 3, 2])


def test_the_first_terminal_attempt_in_stream_order_decides() -> None:
    pool: Pool[int] = Pool(samples=2, min_graded=2)
    assert pool.observe(ok(1, 0, 0))
    assert not pool.observe(ok(2, 0, 0))
    pool.observe(ok(3, 0, 1))
    assert [m.seq for m in pool.plan(1, fresh).rollouts()] == [1, 3]


def test_infrastructure_failures_leave_the_mean_and_too_many_void_the_group() -> None:
    pool: Pool[int] = Pool(samples=3, min_graded=2)
    for decided in (ok(1, 0, 0), failed(2, 0, 1), ok(3, 0, 2), failed(4, 1, 0), failed(5, 1, 1), ok(6, 1, 2)):
        pool.observe(decided)
    batch = pool.plan(2, fresh)
    assert [m.seq for m in batch.rollouts()] == [1, 3]
    assert batch.void_groups == (1,)
    assert {(d.seq, d.reason) for d in batch.drops} == {
        (2, "infra_failed"),
        (4, "infra_failed"),
        (5, "infra_failed"),
        (6, "group_incomplete"),
    }


def test_a_settled_group_is_never_decided_or_settled_again() -> None:
    pool: Pool[int] = Pool(samples=2, min_graded=2)
    pool.observe(ok(1, 0, 0))
    pool.observe(ok(2, 0, 1))
    pool.settle([0])
    assert not pool.observe(ok(3, 0, 0))
    assert pool.pending_seqs() == []
    with pytest.raises(PromiseViolated):
        pool.settle([0])


def test_the_cursor_never_goes_back() -> None:
    pool: Pool[int] = Pool(samples=2, min_graded=2)
    pool.observe(ok(5, 0, 0))
    with pytest.raises(PromiseViolated):
        pool.observe(ok(5, 0, 1))
    with pytest.raises(PromiseViolated):
        pool.skip(4)


def test_lockstep_takes_groups_by_number_and_the_default_as_they_close() -> None:
    for lockstep, expected in ((True, [0, 1]), (False, [1, 0])):
        pool: Pool[int] = Pool(samples=2, min_graded=2, lockstep=lockstep)
        for seq, (group, sample) in enumerate([(0, 0), (1, 0), (1, 1), (0, 1)], start=1):
            pool.observe(ok(seq, group, sample))
        assert [group for group, _ in pool.plan(2, fresh).groups] == expected


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_rollout_ends_in_exactly_one_state_wherever_the_trainer_restarts(data: st.DataObject) -> None:
    """Settle in random-sized steps with restarts from (cursor, pool) in between: the fates equal one run's."""
    groups, samples = 6, 3
    events = [(g, s) for g in range(groups) for s in range(samples) for _ in range(data.draw(st.integers(1, 2)))]
    events = data.draw(st.permutations(events))
    bad = data.draw(st.sets(st.sampled_from(events), max_size=4))
    stream = [(failed if e in bad else ok)(seq, *e) for seq, e in enumerate(events, start=1)]
    by_seq = {d.seq: d for d in stream}
    fates: dict[str, str] = {}
    pool: Pool[int] = Pool(samples=samples, min_graded=2)
    at = 0
    while at < len(stream):
        for decided in stream[at : at + data.draw(st.integers(1, 5))]:
            pool.observe(decided)
            at += 1
        batch = pool.plan(data.draw(st.integers(1, 3)), fresh)
        for member in batch.rollouts():
            assert fates.setdefault(member.rollout_id, "trained") == "trained"
        for drop in batch.drops:
            assert drop.rollout_id not in fates
            fates[drop.rollout_id] = drop.reason
        pool.settle([g for g, _ in batch.groups] + list(batch.void_groups))
        if data.draw(st.booleans()):
            kept, cursor, settled = pool.pending_seqs(), pool.cursor, set(pool.settled)
            pool = Pool(samples=samples, min_graded=2, settled=settled)
            for seq in kept:
                assert pool.observe(by_seq[seq])
            pool.cursor = cursor
    rest = pool.plan(groups, fresh)
    ends = {m.rollout_id for m in rest.rollouts()} | {d.rollout_id for d in rest.drops}
    assert not ends & fates.keys()
    assert len(ends | fates.keys()) == groups * samples


@given(st.integers(0, 10**9), st.integers(0, 4095))
def test_a_training_id_reads_back_and_nothing_else_passes_for_one(group: int, sample: int) -> None:
    assert parse_train_id(train_rollout_id(group, sample)) == (group, sample)
    assert parse_train_id("e" + train_rollout_id(group, sample)[1:]) is None
    assert parse_train_id("g01s1") is None


def test_versions_of_an_abandoned_line_are_no_ancestors() -> None:
    line = Lineage(Version(0, 9)).fork(Version(1, 5), Version(0, 5)).advance()
    assert line.head == Version(1, 6)
    assert line.is_ancestor(Version(0, 5))
    assert line.is_ancestor(Version(1, 6))
    assert not line.is_ancestor(Version(0, 6))
    assert not line.is_ancestor(Version(1, 7))
    assert not line.is_ancestor(Version(2, 1))
    again = line.fork(Version(2, 3), Version(0, 3))
    assert not again.is_ancestor(Version(1, 5))
    assert not again.is_ancestor(Version(0, 4))
    assert again.is_ancestor(Version(0, 3))
