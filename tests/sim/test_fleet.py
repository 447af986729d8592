"""What docs/SCALING.md says of the simulated fleet, on a small one for some hours."""

from __future__ import annotations

from typing import Any

import pytest
from simulator.fleet import Fleet, Setting
from simulator.tally import LENGTHS, summary

SHORT, LONG = str(LENGTHS[0]), str(LENGTHS[-1])


def fleet(**changes: Any) -> dict[str, Any]:
    setting = Setting(agents=500, groups_per_step=16, hours=4.0, **changes)
    return summary(setting, Fleet(setting).run())


def in_vain(found: dict[str, Any], turns: str) -> float:
    return float(sum(found["tokens_in_vain_by_turns"][turns].values()))


def test_where_lengths_are_independent_short_sessions_grow_old_and_long_ones_lose_their_groups() -> None:
    found = fleet(max_lag=4)
    dropped = found["not_trained_by_turns"]
    assert dropped[SHORT]["stale"] > 10 * dropped[SHORT].get("group_incomplete", 0)
    assert dropped[LONG].get("stale", 0) == 0
    assert dropped[LONG]["group_incomplete"] > 0
    assert in_vain(found, LONG) < in_vain(found, SHORT)


def test_where_lengths_are_alike_within_a_group_long_sessions_are_overtaken_unless_pacing_heeds_it() -> None:
    heedless, heeding = (fleet(max_lag=8, alike=1.0, stale_share_max=share) for share in (1.0, 0.05))
    assert heedless["tokens_in_vain_by_turns"][LONG]["masked"] > 0.4
    assert in_vain(heedless, SHORT) < 0.02
    assert in_vain(heeding, LONG) < in_vain(heedless, LONG) / 2
    assert heeding["trained_tokens_per_s"] > heedless["trained_tokens_per_s"]


@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_how_alike_lengths_are_leaves_their_distribution_as_it_is(alike: float) -> None:
    setting = Setting(alike=alike)
    made = Fleet(setting)
    turns = sorted(made._length(f"g{n:07d}s000").turns for n in range(4000))
    assert turns[2000] == pytest.approx(setting.turns_median, abs=1)
    assert turns[400] == pytest.approx(4, abs=1)
