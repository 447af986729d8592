"""P7 against an agent that lies about what its engine sampled: dropped, refused, or, when systemic, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headway.bus.reader import read_all
from headway.bus.topology import Topology
from headway.deploy import tokens
from headway.deploy.run_folder import RunFolder
from headway.kernels import hf
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.weights import prepare
from headway.schemas.errors import InputError, PromiseViolated
from headway.schemas.messages import Dead, Rollout, Task
from headway.schemas.version import Version
from headway.trainer.audit import audit

Make = Callable[..., Any]


def make(make_run: Make, steps: int, max_lag: int = 2) -> Any:
    """Bitwise, and a learning rate so small that every version has the rollout weights of the base."""
    run = make_run(steps=steps, extra=f"[staleness]\nmax_lag = {max_lag}\nswap_slack = 0\n")
    engine = run.config.engine.model_copy(update={"numerics": "bitwise"})
    grpo = run.config.grpo.model_copy(update={"samples_per_group": 3, "learning_rate": 1e-12})
    run.config = run.config.model_copy(update={"engine": engine, "grpo": grpo})
    return run


class Honest:
    """What an engine with the base's weights records of made-up tokens."""

    def __init__(self, run: Any) -> None:
        model, weights = hf.load(run.folder / "base")
        self.run, self.model = run, model
        self.prepared = prepare({name: w.float() for name, w in weights.items()}, model, torch.float32)

    def __call__(self, task: Task, head: Version, agent: str = "good") -> Rollout:
        rollout = self.run.graded(task, float(task.sample == 1), head)
        assert rollout.trajectory is not None
        ids = torch.from_numpy(rollout.trajectory.token_ids.astype(np.int64))
        with torch.no_grad():
            hidden = forward_full(self.prepared, self.model, ids[None], torch.tensor([len(ids)])).hidden[0]
            found = token_logprob(self.prepared, hidden[1:-1], ids[2:], 1.0)[0].numpy()
        logprobs = np.concatenate([np.zeros(2, np.float32), found])
        trajectory = rollout.trajectory.model_copy(update={"logprobs": logprobs})
        return rollout.model_copy(update={"trajectory": trajectory, "agent": agent})

    def lie(self, task: Task, head: Version, agent: str) -> Rollout:
        """One ulp off at one token."""
        rollout = self(task, head, agent)
        assert rollout.trajectory is not None
        logprobs = rollout.trajectory.logprobs.copy()
        logprobs[3] = np.nextafter(logprobs[3], np.float32(-99))
        return rollout.model_copy(update={"trajectory": rollout.trajectory.model_copy(update={"logprobs": logprobs})})


async def finish(run: Any, answer: Any, steps: int) -> Any:
    async with run.dispatcher(), run.trainer(), run.agent(answer):
        return await run.wait_for_step(steps, 60)


async def steps_of(run: Any) -> list[Any]:
    from headway.bus.ledger import LedgerReader

    bodies = [link.record.body async for link in LedgerReader(run.bus).links()]
    return [
        (str(b.version), b.root, b.checkpoint, b.consumed, b.drops, b.counters, b.metrics)
        for b in bodies
        if b.kind == "step"
    ]


async def test_one_lie_costs_one_rollout_and_the_decision_is_made_again_alike(make_run: Make, bus: Any) -> None:
    run = make(make_run, steps=3, max_lag=80)
    honest = Honest(run)

    def answer(task: Task, head: Version) -> Any:
        at_zero = Version(0, 0)  # a function of the task: the stream is judged twice
        return (honest.lie if (task.group, task.sample) == (1, 2) else honest)(task, at_zero, f"a{task.sample}")

    history = await finish(run, answer, 3)
    report = await audit(run.bus)
    assert report.violations == []
    assert report.dropped == {"disagreed": 1}
    assert history.counters.disagreed == {"east/a2": 1}
    first = await steps_of(run)
    assert first[0][6]["lag0_equal_fraction"] == 1.0
    assert [c.rollout_id for c in first[0][3]] == [f"g000000{g}s00{s}" for g in range(2) for s in range(3 - g)]
    dead = [await run.bus.open(Dead, s) async for s in read_all(run.bus, "EVENTS", filter_subject="rl.test.dead.>")]
    assert [d.reason for d in dead] == ["disagreed"]
    assert "east/a2: g0000001s002 token 3: recorded" in dead[0].detail
    # `headway inspect rollout ID RUN --tokens`
    folder = RunFolder(run.folder)
    whole, _, *rows = await tokens.lines(run.bus, folder, run.config, "g0000000s000")
    assert "g0000000s000 under 0.0: " in whole
    assert "diff_max 0 " in whole
    assert "equal_fraction 1 " in whole
    assert len(rows) == 4
    whole, _, *rows = await tokens.lines(run.bus, folder, run.config, "g0000001s002")
    assert "equal_fraction 0.75 " in whole
    assert rows[0].split()[0] == "3", "the worst comes first"
    assert [float(row.split()[-4]) != 0.0 for row in rows] == [True, False, False, False]
    assert (await tokens.lines(run.bus, folder, run.config, "g0000001s002", Version(0, 2)))[0].startswith(
        "g0000001s002 under 0.2: "
    )
    with pytest.raises(InputError, match="no ended rollout"):
        await tokens.lines(run.bus, folder, run.config, "g0000099s000")
    # Without its ledger the trainer finds the lie again and decides alike; without checkpoints it executes the record.
    await bus.js.delete_stream(bus.subjects.stream("LEDGER"))
    await Topology(run="test").apply(bus.js)
    async with run.trainer() as trainer:
        await run.wait_for_step(3)
        assert trainer.gauges.keys() >= {"lag0_k3", "stale_ess", "route_bytes_per_token"}, "for /metrics"
    assert await steps_of(run) == first
    for _, _, checkpoint, *_ in first:
        await bus.store.delete(bus.keys.checkpoint(checkpoint))
    async with run.trainer():
        async with asyncio.timeout(20):
            while (await run.history()).term < 2:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
    assert await steps_of(run) == first


async def test_an_agent_that_goes_on_lying_is_refused_and_the_run_goes_on_without_it(make_run: Make) -> None:
    run = make(make_run, steps=6, max_lag=0)
    honest = Honest(run)

    def answer(task: Task, head: Version) -> Any:
        if task.sample:
            return honest(task, head)
        return honest(task, head, "liar") if task.group >= 8 else honest.lie(task, head, "liar")

    history = await finish(run, answer, 6)
    assert history.counters.refuses("east/liar")
    assert not history.counters.refuses("east/good")
    report = await audit(run.bus)
    assert report.violations == []
    assert report.dropped == {"disagreed": 4, "refused_agent": 8}, "at last also what it did right"


@pytest.mark.parametrize("case", ["every agent lies", "the only agent lies", "the trainer miscomputes"])
async def test_what_is_systemic_ends_the_trainer(make_run: Make, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(make_run, steps=4)
    honest = Honest(run)
    if case == "the trainer miscomputes":
        monkeypatch.setattr("headway.trainer.service.refusal", lambda *_: "attention gives other bits")

    def answer(task: Task, head: Version) -> Any:
        if case == "the trainer miscomputes":
            return (honest if task.sample else honest.lie)(task, Version(0, 0), f"a{task.sample}")
        return honest.lie(task, Version(0, 0), "one" if case == "the only agent lies" else f"a{task.sample}")

    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.dispatcher(), run.agent(answer), run.trainer() as trainer, asyncio.timeout(60):
            await trainer.stop.wait()
    why = {
        "every agent lies": "3 agents disagree with the trainer and 0 agree",
        "the only agent lies": "more than 3 rollouts of the only agent",
        "the trainer miscomputes": "no longer computes bit for bit: attention",
    }
    assert caught.group_contains(PromiseViolated, match=why[case])
    assert (await run.history()).head == Version(0, 0), "nothing was trained"
