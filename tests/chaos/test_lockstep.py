"""P6: in lockstep mode a run that was killed anywhere ends bit for bit as the undisturbed one."""

from __future__ import annotations

from typing import Any

import pytest

STEPS = 8


@pytest.fixture(scope="module")
def undisturbed(launch: Any, lockstep: dict[str, Any]) -> Any:
    ended = launch(STEPS, lockstep).end()
    ended.assert_promises(STEPS)
    assert len({step.root for step in ended.steps}) == STEPS, "the weights stood still: nothing would be compared"
    return ended


@pytest.mark.parametrize(("victim", "checkpoint_every"), [("trainer", 1), ("west-agent-0", 1), ("trainer", 3)])
def test_a_killed_lockstep_run_ends_like_the_undisturbed_one(
    launch: Any, lockstep: dict[str, Any], undisturbed: Any, victim: str, checkpoint_every: int
) -> None:
    """With checkpoints at every third step the steps between are executed again from what was recorded."""
    run = launch(STEPS, lockstep | {"grpo.checkpoint_every": checkpoint_every})
    run.until_step(4)
    run.kill(victim)
    ended = run.end()
    ended.assert_promises(STEPS)
    assert ended.trace() == undisturbed.trace()
