"""Machines that come and go, for an hour of virtual time; `python -m simulator.borrowed` does ten."""

from __future__ import annotations

from pathlib import Path

from simulator.borrowed import LENGTHS, simulate

HOURS = 1.0
LOST_MORE_MAX = 0.08
"""How much more of the longest sessions may be dropped than of the shortest."""
STARVED = 0.4
IN_VAIN_MAX = 0.09
"""Of the turns: cut off at the moment of leaving, of machines that vanished, and open at the end of the hour."""


def test_long_sessions_are_not_lost_to_machines_that_leave_and_no_region_starves(shared: Path) -> None:
    found = simulate(HOURS, 1, shared)
    assert found["left"]["drained"] >= 2
    assert found["left"]["vanished"] >= 1
    assert found["ended_after_more_than_one_agent"] > 10
    lost, ended = found["not_trained_by_turns"], found["ended_by_turns"]
    assert ended[str(LENGTHS[-1])] > 30
    assert lost[str(LENGTHS[-1])] <= lost[str(LENGTHS[0])] + LOST_MORE_MAX
    assert found["turns_in_rollouts"] > (1 - IN_VAIN_MAX) * found["turns_sampled"]
    rates = found["trained_per_hour_present"].values()
    assert min(rates) > STARVED * max(rates)
