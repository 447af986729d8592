"""A step that fails sets its batch aside, leaves a bundle that fails elsewhere too, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.bus.reader import read_all
from headway.deploy.cli.main import main
from headway.schemas.errors import HeadwayError, PromiseViolated
from headway.schemas.ledger import Drops
from headway.schemas.messages import Event, Task
from headway.schemas.version import Version
from headway.trainer import learner
from headway.trainer.audit import audit
from headway.trainer.check import check
from headway.trainer.plan import TaskSet

Make = Callable[..., Any]
MARK = -7.25
STEPS = 4


def answer_of(run: Any, bad: Callable[[Task], bool]) -> Callable[[Task, Version], Any]:
    """Rollouts with a mark in the log-probabilities of those that shall fail."""

    def answer(task: Task, head: Version) -> Any:
        rollout = run.graded(task, float(task.sample), head)
        if not bad(task):
            return rollout
        marked = np.where(rollout.trajectory.loss_mask == 1, MARK, 0).astype(np.float32)
        return rollout.model_copy(update={"trajectory": rollout.trajectory.model_copy(update={"logprobs": marked})})

    return answer


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Any batch with a mark gives a gradient of NaN."""
    loss = learner.grpo_loss

    def poisonous(current: Any, entropy: Any, behaviour: Any, *rest: Any) -> Any:
        parts = loss(current, entropy, behaviour, *rest)
        return replace(parts, loss=parts.loss * float("nan")) if (behaviour == MARK).any() else parts

    monkeypatch.setattr(learner, "grpo_loss", poisonous)
    return monkeypatch


async def events(run: Any) -> list[Event]:
    found = [await run.bus.open(Event, s) async for s in read_all(run.bus, "EVENTS", filter_subject="rl.test.event.>")]
    return [event for event in found if event.name == "step_failed"]


async def test_a_batch_of_nan_is_set_aside_and_its_bundle_fails_elsewhere(
    make_run: Make, poisoned: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(steps=STEPS)
    async with run.dispatcher(), run.trainer(), run.agent(answer_of(run, lambda task: task.group == 2)):
        history = await run.wait_for_step(STEPS)
    assert history.counters.void_groups == 2
    report = await audit(run.bus)
    assert report.violations == []
    assert report.dropped == {"quarantined": 4}
    assert report.trained == STEPS * 4
    tasks = TaskSet.load(run.folder / "tasks")
    decided = await check(run.bus, run.config, run.model, tasks)
    assert (decided.differences, decided.taken_from_record) == ([], 4)
    [event] = await events(run)
    path = Path(str(event.fields["bundle"]))
    assert path.parent == run.folder / "quarantine"
    assert "the gradient norm is nan" in str(event.fields["error"])

    def replayed() -> int:
        return main(["replay", "bundle", str(path)])

    import asyncio

    assert await asyncio.to_thread(replayed) == 0
    said = capsys.readouterr().out
    assert "on 4 rollouts failed with HeadwayError: step 2 was not taken" in said
    assert "reproduced   the same error" in said
    poisoned.undo()
    assert await asyncio.to_thread(replayed) == 70
    assert "does not fail here" in capsys.readouterr().err


async def test_two_failures_in_a_row_halt_the_run(make_run: Make, poisoned: pytest.MonkeyPatch) -> None:
    run = make_run(steps=STEPS)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.dispatcher(), run.trainer(), run.agent(answer_of(run, lambda task: task.group >= 2)):
            await run.wait_for_step(STEPS)
    assert caught.group_contains(HeadwayError, match="was not taken")
    assert len(await events(run)) == 2
    assert (await audit(run.bus)).violations == []


async def test_a_broken_promise_leaves_a_bundle_and_halts_at_once(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, ids: Any) -> None:
        raise PromiseViolated("P7: scripted")

    monkeypatch.setattr(learner.Agreement, "check", broken)
    run = make_run(steps=STEPS)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.dispatcher(), run.trainer(), run.agent(answer_of(run, lambda task: False)):
            await run.wait_for_step(STEPS)
    assert caught.group_contains(PromiseViolated, match="P7: scripted")
    [event] = await events(run)
    assert Path(str(event.fields["bundle"])).is_file()  # noqa: ASYNC240
    links = [link.record.body async for link in _links(run)]
    assert not any(isinstance(body, Drops) for body in links), "a broken promise is not the batch's fault"


async def _links(run: Any) -> Any:
    from headway.bus.ledger import LedgerReader

    async for link in LedgerReader(run.bus).links():
        yield link
