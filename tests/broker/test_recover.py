"""A trainer whose checkpoints are damaged or gone executes recorded steps again, or says why it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.bus.blobs import MissingBlob, ObstoreBlobs
from headway.bus.reader import read_all
from headway.schemas.errors import PromiseViolated, UnavailableError
from headway.schemas.messages import Command, Event
from headway.schemas.version import Version
from headway.trainer import environment
from headway.trainer.audit import audit
from headway.trainer.learner import Learner
from headway.trainer.replay import Replayable, replay_step

Make = Callable[..., Any]
STEPS = 5


@pytest.fixture
async def run(make_run: Make) -> Any:
    """A finished run whose advantages differ, so that every step moves the weights."""
    run = make_run(steps=STEPS)

    def answer(task: Any, head: Any) -> Any:
        return run.graded(task, float(task.sample), head)

    async with run.dispatcher(), run.trainer(), run.agent(answer):
        run.recorded = await run.wait_for_step(STEPS)
    return run


async def files(run: Any) -> dict[int, Path]:
    """n -> checkpoint file of the steps whose checkpoints are kept."""
    folder = run.folder / "store" / "test" / "ckpt"
    line = [link.record.body async for link in ledger(run)]
    steps = {body.version.n: folder / body.checkpoint for body in line if body.kind == "step" and body.checkpoint}
    return {n: path for n, path in steps.items() if path.exists()}


async def ledger(run: Any) -> Any:
    from headway.bus.ledger import LedgerReader

    async for link in LedgerReader(run.bus).links():
        yield link


async def resumed(run: Any) -> list[Event]:
    """Open another term, and return the events about checkpoints."""
    async with run.trainer() as service:
        async with asyncio.timeout(30):
            while service.status.get("phase") != "all steps committed":
                await asyncio.sleep(0.05)
    events = [await run.bus.open(Event, s) async for s in read_all(run.bus, "EVENTS", filter_subject="rl.test.event.>")]
    return [event for event in events if event.name == "checkpoints_remade"]


async def test_a_flipped_bit_in_the_newest_checkpoint_is_found_and_the_step_executed_again(run: Any) -> None:
    [*_, (n, newest)] = sorted((await files(run)).items())
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    [event] = await resumed(run)
    assert (n, event.fields) == (STEPS, {"good": "0.4", "head": "0.5", "steps": 1})
    assert newest.read_bytes() == whole
    assert (await audit(run.bus)).violations == []


async def test_cut_off_and_missing_checkpoints_are_remade_from_the_last_whole_one(run: Any) -> None:
    kept = await files(run)
    assert set(kept) == {3, 4, 5}
    whole = {n: path.read_bytes() for n, path in kept.items()}
    kept[5].write_bytes(whole[5][:1000])
    kept[4].unlink()
    [event] = await resumed(run)
    assert event.fields == {"good": "0.3", "head": "0.5", "steps": 2}
    assert {n: path.read_bytes() for n, path in kept.items()} == whole


async def test_without_any_checkpoint_the_run_is_executed_again_from_the_base(run: Any) -> None:
    kept = await files(run)
    whole = {n: path.read_bytes() for n, path in kept.items()}
    for path in kept.values():
        path.unlink()
    [event] = await resumed(run)
    assert event.fields == {"good": "0.0", "head": "0.5", "steps": STEPS}
    assert {n: path.read_bytes() for n, path in kept.items()} == whole


async def test_between_checkpoints_the_recorded_steps_are_executed_again_to_the_same_bits(make_run: Make) -> None:
    run = make_run(steps=STEPS, extra="[staleness]\nmax_lag = 80\nswap_slack = 0\n")
    grpo = {**run.config.grpo.model_dump(), "checkpoint_every": 3}
    run.config = type(run.config).model_validate({**run.config.model_dump(), "grpo": grpo})

    def answer(task: Any, head: Any) -> Any:
        return run.graded(task, float(task.sample), Version(0, 0))

    async with run.dispatcher(), run.agent(answer):
        for n in (1, 2, 4, STEPS):
            async with run.trainer():  # cut off at once behind step n
                await run.wait_for_step(n)
    made = [link.record.body async for link in ledger(run) if link.record.body.kind == "step"]
    assert [body.version.n for body in made if body.checkpoint is not None] == [3, STEPS]
    assert set(await files(run)) == {3, STEPS}
    again = Replayable.of(run.bus, run.config, run.model)
    found = await replay_step(await again, Version(0, STEPS))
    assert (found.start, found.differences) == (Version(0, 3), [])
    assert (await audit(run.bus)).violations == []


async def test_whole_checkpoints_execute_nothing_again(run: Any) -> None:
    assert await resumed(run) == []


async def test_a_lost_rollout_is_a_refusal_that_names_it(run: Any) -> None:
    kept = await files(run)
    kept[5].unlink()
    seq = run.recorded.last_step.consumed[0].seq
    await run.bus.js.delete_msg("HW-test-ROLLOUTS", seq)
    with pytest.raises(BaseExceptionGroup) as caught:
        await resumed(run)
    assert caught.group_contains(PromiseViolated, match=f"0.5 cannot be executed again: ROLLOUTS sequence {seq}")
    assert PromiseViolated.exit_code == 70


async def test_another_environment_is_named_when_the_result_differs(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = await files(run)
    kept[5].unlink()
    step = Learner.step

    def other(self: Any, samples: Any) -> Any:
        return step(self, samples[::-1])

    described = environment.describe()
    monkeypatch.setattr(Learner, "step", other)
    monkeypatch.setattr(environment, "describe", lambda: {**described, "torch": "0.1"})
    with pytest.raises(BaseExceptionGroup) as caught:
        await resumed(run)
    assert caught.group_contains(PromiseViolated, match=r"the environment changed: torch .* -> 0\.1")
    assert not kept[5].exists()


async def test_a_store_that_is_away_halts_intake_and_drops_nothing(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing body is a drop only in a store that is the run's; an unmounted folder is none."""
    run = make_run(steps=STEPS)

    def answer(task: Any, head: Any) -> Any:
        long = {"commands": [Command(tool="x" * 64, ms=1.0, ok=True)] * 1024}
        return run.graded(task, float(task.sample), head).model_copy(update=long)

    async def nothing(*_: Any) -> Any:
        raise MissingBlob("nothing is there")

    async def absent(*_: Any) -> bool:
        return False

    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.dispatcher(), run.trainer(), run.agent(answer):
            await run.wait_for_step(1)
            monkeypatch.setattr(ObstoreBlobs, "get_range", nothing)
            monkeypatch.setattr(ObstoreBlobs, "exists", absent)
            await run.wait_for_step(STEPS)
    assert caught.group_contains(UnavailableError, match="holds nothing of this run")
    monkeypatch.undo()
    async with run.dispatcher(), run.trainer(), run.agent(answer):
        await run.wait_for_step(STEPS)
    report = await audit(run.bus)
    assert (report.violations, report.dropped) == ([], {})
