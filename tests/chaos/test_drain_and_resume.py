"""P10, P1: a run that is stopped, or killed as a whole, goes on where it was."""

from __future__ import annotations

import signal
from typing import Any

STEPS = 8


def test_a_drained_run_goes_on_and_samples_nothing_again(launch: Any) -> None:
    run = launch(STEPS, {"agent.tool_latency_ms": 400})  # so that sessions are open when the signal comes
    run.until_step(2)
    assert run.signal(signal.SIGTERM) == 0
    assert "stopped; the same command goes on" in run.output
    drained = run.read()
    assert drained.report.violations == []
    assert 0 < len(drained.steps) < STEPS
    assert all(attempt.outcome == "ok" for attempt in drained.attempts), "an open session was not finished"
    run.start()
    ended = run.end()
    ended.assert_promises(STEPS)
    assert "going on after step" in ended.output
    assert set(ended.ok_attempts().values()) == {1}


def test_a_run_killed_as_a_whole_goes_on(launch: Any) -> None:
    run = launch(STEPS)
    run.until_step(3)
    assert run.signal(signal.SIGKILL) == -signal.SIGKILL
    run.start()
    ended = run.end()
    ended.assert_promises(STEPS)
    assert ended.report.terms == 2
