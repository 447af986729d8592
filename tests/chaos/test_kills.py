"""P6, P1-P4: kill -9 of anything, one at a time and several at once; the run ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

STEPS = 8
VICTIMS = ["trainer", "dispatcher", "east-agent-0", "east-engine-0", "east-sandbox-0", "east-relay", "nats"]
SEED = int(os.environ.get("CHAOS_SEED", "1"))


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_killed_process_is_started_again_and_nothing_is_lost_or_trained_twice(launch: Any, victim: str) -> None:
    run = launch(STEPS)
    run.until_step(3)
    run.kill(victim)
    ended = run.end()
    ended.assert_promises(STEPS)
    assert f"{victim} was killed by SIGKILL; starting it again" in ended.output
    assert ended.report.terms == 1 + (victim == "trainer")
    assert "infra_failed" not in ended.report.dropped, "a restart used a task's attempts up"


@pytest.mark.slow
def test_several_killed_at_once_at_random_moments(launch: Any) -> None:
    rng, steps = random.Random(SEED), 12
    run = launch(steps)
    told = []
    for n in (2, 5, 8):
        run.until_step(n)
        time.sleep(rng.random())
        names = rng.sample(sorted(run.pids()), rng.randint(2, 4))
        told.append((n, names))
        run.kill(*names)
    ended = run.end()
    print(f"CHAOS_SEED={SEED}: killed {told}")
    ended.assert_promises(steps)
