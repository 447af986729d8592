"""The fleet's simulation against what a small run recorded; docs/SCALING.md has the table."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulator.likeness import beside, load

MEASURED = Path(__file__).parent / "measured"
PACE_OFF_MAX = 0.1


@pytest.mark.parametrize(("run", "max_lag", "lag_off_max"), [("demo", 2, 0.05), ("demo-lag4", 4, 0.15)])
def test_the_fleet_runs_as_fast_as_the_run_that_was_measured_and_its_tokens_are_as_old(
    run: str, max_lag: int, lag_off_max: float
) -> None:
    """`lag_off_max` is a share of all trained tokens, at each lag."""
    rows = beside(load((MEASURED / f"{run}.json").read_text()))
    predicted, measured = rows["seconds_per_step"]
    assert predicted == pytest.approx(measured, rel=PACE_OFF_MAX)
    predicted, measured = rows["trainer_idle_share"]
    assert predicted == pytest.approx(measured, abs=PACE_OFF_MAX)
    lags = [row for name, row in rows.items() if name.startswith("tokens_at_lag")]
    assert len(lags) == max_lag + 1
    for predicted, measured in lags:
        assert predicted == pytest.approx(measured, abs=lag_off_max)
