"""Penalties on a real bus: the trainer trains on the total, and whoever reads the run computes it again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.bus.ledger import LedgerReader
from headway.schemas import rewards
from headway.schemas.ledger import Drops, Step
from headway.schemas.messages import Rollout, Task
from headway.schemas.rewards import Facts, Scoring
from headway.schemas.sections import RewardConfig
from headway.schemas.version import Version
from headway.trainer.audit import audit
from headway.trainer.check import check
from headway.trainer.plan import TaskSet

from .conftest import LocalRun

REWARD = """
[reward]
length_penalty = "headway.schemas.rewards:concave"
length_unit = 3.0
observation_token_weight = 0.5
"""


def answers(run: LocalRun, lie: str) -> Callable[[Task, Version], Rollout]:
    """Sessions of different lengths; the agent forgets the penalty of rollout `lie`."""
    scoring = Scoring(run.config.reward)

    def answer(task: Task, version: Version) -> Rollout:
        made = run.graded(task, float(task.sample % 2), version, tokens=6 + task.sample)
        assert made.trajectory is not None
        assert made.verdict is not None
        scored = scoring.score(Facts.of(made.trajectory, made.commands, made.verdict.peek_verdict()))
        if task.rollout_id == lie:
            return made
        return made.model_copy(update={"reward": scored.total, "reward_parts": scored.parts})

    return answer


async def test_the_total_is_trained_audited_and_decided_again(
    make_run: Callable[..., LocalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(steps=2, extra=REWARD)
    async with run.agent(answers(run, "g0000000s000")), run.dispatcher(), run.trainer():
        await run.wait_for_step(2)
    bodies = [link.record.body for link in await LedgerReader(run.bus).read_new()]
    drops = {drop.rollout_id: drop.reason for body in bodies if isinstance(body, Step | Drops) for drop in body.drops}
    assert drops["g0000000s000"] == "bad_verdict", "an agent that forgets the penalty is refused"
    trained = {one.rollout_id: one.reward for body in bodies if isinstance(body, Step) for one in body.consumed}
    due = {0: -0.1 * 2 * ((1 + (4 + 0.5 * 2) / 3) ** 0.5 - 1), 1: 1 - 0.1 * 2 * ((1 + (5 + 0.5 * 2) / 3) ** 0.5 - 1)}
    assert trained
    assert all(reward == pytest.approx(due[int(rollout_id[-3:])]) for rollout_id, reward in trained.items())
    tasks = TaskSet.load(run.folder / "tasks")
    assert (await audit(run.bus)).violations == []
    assert (await check(run.bus, run.config, run.model, tasks)).differences == []

    def dearer(facts: Facts, config: RewardConfig) -> float:
        return 2.0

    monkeypatch.setattr(rewards, "concave", dearer)
    assert "is due" in (await audit(run.bus)).violations[0]
    assert (await check(run.bus, run.config, run.model, tasks)).differences != []
