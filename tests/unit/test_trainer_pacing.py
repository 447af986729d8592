"""How far ahead tasks may be issued, and that it can always go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.schemas.config import Config, parse_config
from headway.schemas.ledger import Consumed, Counters, Drop, DropReason, Step
from headway.schemas.version import Version
from headway.trainer.pacing import Pacing, stale_share


def pacing(**values: float) -> Pacing:
    base = {
        "groups_per_step": 8,
        "samples_per_group": 4,
        "max_lag": 2,
        "swap_slack": 1,
        "stale_share_max": 1.0,
        "steps": 10,
    }
    return Pacing(**{**base, "max_in_flight": 100, **values})


def test_the_window_is_the_lag_bound_and_the_run_never_issues_more_than_it_trains() -> None:
    paced = pacing()
    assert paced.groups_allowed(n=0, void_groups=0) == 16
    assert paced.groups_allowed(n=3, void_groups=5) == 45
    assert paced.groups_allowed(n=10, void_groups=5) == 85
    assert paced.may_issue(groups_issued=15, n=0, void_groups=0, in_flight=99)
    assert not paced.may_issue(groups_issued=15, n=0, void_groups=0, in_flight=100)
    assert not paced.may_issue(groups_issued=16, n=0, void_groups=0, in_flight=0)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 9), st.lists(st.floats(0, 1), min_size=10, max_size=10))
def test_a_batch_can_always_be_issued_so_that_pacing_cannot_deadlock(
    max_lag: int, slack: int, size: int, shares: list[float]
) -> None:
    paced = pacing(max_lag=max_lag, swap_slack=min(slack, max_lag), groups_per_step=size)
    before = 0
    for n, share in enumerate(shares):
        allowed = paced.groups_allowed(n, 0)
        assert allowed >= (n + 1) * size
        assert allowed >= before, "who has not read the newest step yet may issue no more than who has"
        before, paced = allowed, paced.after(share)


def test_steps_that_find_too_much_too_old_leave_fewer_groups_open_until_they_no_longer_do() -> None:
    paced = pacing(max_lag=4, stale_share_max=0.05)
    assert paced.open_groups_max == 32
    assert paced.after(0.06).open_groups_max == 32
    for _ in range(4):
        paced = paced.after(0.55)
    assert paced.open_groups_max == 24
    for _ in range(200):
        paced = paced.after(1.0)
    assert paced.open_groups_max == 8
    for _ in range(40):
        paced = paced.after(0.0)
    assert paced.open_groups_max == 16
    for _ in range(200):
        paced = paced.after(0.0)
    assert paced.open_groups_max == 32


def test_where_any_share_may_be_too_old_or_none_can_wait_the_limit_stays() -> None:
    assert pacing(stale_share_max=1.0).after(1.0).open_groups_max == 16
    assert pacing(max_lag=0, swap_slack=0, stale_share_max=0.05).after(1.0).open_groups_max == 8


def step(reasons: list[DropReason], **metrics: float) -> Step:
    digest = "0" * 64
    drops = [Drop(rollout_id=f"g0000001s{n:03d}", seq=9 + n, reason=reason) for n, reason in enumerate(reasons)]
    consumed = [Consumed(rollout_id=f"g0000000s{n:03d}", seq=1 + n, reward=0.0) for n in range(6)]
    return Step(
        version=Version(0, 1), parent=Version(0, 0), consumed=consumed, drops=drops, cursor=20, pool=[],
        counters=Counters(), rng=b"", metrics=metrics, checkpoint=digest, manifest=digest, root=digest,
    )  # fmt: skip


def test_masked_tokens_and_stale_rollouts_are_what_is_too_old() -> None:
    assert stale_share(step([], trained_tokens=75.0, masked_tokens=25.0)) == 0.25
    assert stale_share(step(["stale", "stale", "infra_failed", "group_incomplete"], trained_tokens=50.0)) == 0.25
    assert stale_share(step(["stale", "stale"], trained_tokens=50.0, masked_tokens=50.0)) == pytest.approx(0.625)
    assert stale_share(step([])) == 0.0


def test_the_configured_pacing_is_the_one_used() -> None:
    config = parse_config("[staleness]\nmax_lag = 3\n[grpo]\ngroups_per_step = 2", "x")
    assert Pacing.of(config).groups_allowed(0, 0) == 6
    assert Pacing.of(Config()).steps == Config().run.steps
    assert Pacing.of(parse_config("[staleness]\nstale_share_max = 0.2", "x")).stale_share_max == 0.2
