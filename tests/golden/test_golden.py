"""Today's code over recordings that earlier code made: it decides alike, trains alike, scores alike.

Each is a whole small run (local engine, two layers of four experts, five steps, tokens up to two versions old), made
by `headway up` with the settings in its genesis and `headway record --checkpoints none`: `expr.hwr` on an AMD
EPYC, `expr-intel.hwr` on an Intel Xeon. A change that is meant to decide or train otherwise brings a new recording.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.bus.reader import read_all
from headway.deploy.cli.main import main
from headway.deploy.reexecution import model_of
from headway.deploy.sources import Source, read_recording
from headway.schemas.messages import Rollout
from headway.schemas.version import Version
from headway.trainer.replay import Replayable, replay_rollout, replay_step
from headway.trainer.rescore import rescore

RECORDINGS = sorted(Path(__file__).parent.glob("*.hwr"))
ROLLOUTS = 12
CLOSE = 1e-3
"""On another environment than the recorded one: relative, of metrics; in nats, of log-probabilities."""


def on(path: Path, work: Any) -> Any:
    async def read(source: Source) -> Any:
        return await work(await Replayable.of(source.bus, source.config, model_of(source)))

    return asyncio.run(read_recording(path, read))


def test_there_are_recordings() -> None:
    assert RECORDINGS
    assert sum(path.stat().st_size for path in RECORDINGS) < 600_000


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_it_is_audited_and_decided_as_it_was(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--from", str(path)]) == 0
    assert main(["replay", "check", str(path)]) == 0
    assert "0 differ" in capsys.readouterr().out


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_its_steps_train_as_they_did(path: Path) -> None:
    async def last(run: Replayable) -> Any:
        return await replay_step(run, run.history.head)

    found = on(path, last)
    if not found.environment:
        assert found.differences == []
        return
    recorded, now = found.recorded.step.metrics, found.last.result.metrics
    for name in ("loss", "reward_mean", "grad_norm", "trained_tokens"):
        assert now[name] == pytest.approx(recorded[name], rel=CLOSE, abs=CLOSE)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_its_rollouts_were_sampled_by_the_versions_that_they_name(path: Path) -> None:
    async def rescored(run: Replayable) -> Any:
        rollouts = [await run.bus.open(Rollout, stored) async for stored in read_all(run.bus, "ROLLOUTS")]
        several = sorted(rollouts, key=lambda one: -len({s.version for s in one.trajectory.spans}))[:ROLLOUTS]
        scores = [score for one in several for score in (await replay_rollout(run, one.rollout_id))[1]]
        return scores, await replay_step(run, Version(0, 1))

    scores, first = on(path, rescored)
    assert len({score.span.version for score in scores}) > 2
    if not first.environment:
        assert all(score.exact for score in scores)
    else:
        assert max(score.diff_max for score in scores) < CLOSE


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_one_ulp_and_another_version_are_both_noticed(path: Path) -> None:
    async def wrong(run: Replayable) -> Any:
        rollouts = [await run.bus.open(Rollout, stored) async for stored in read_all(run.bus, "ROLLOUTS")]
        trajectory = rollouts[-1].trajectory
        span = trajectory.spans[0]
        weights, other = await run.weights(span.version), await run.weights(Version(0, 0))
        assert span.version.n > 0
        token = span.start + 1
        bumped = trajectory.logprobs.copy()
        bumped[token] = np.nextafter(bumped[token], np.float32(-9))
        changed = trajectory.model_copy(update={"logprobs": bumped})
        scores = [rescore(w, run.model, run.config, t, span) for w, t in ((weights, changed), (other, trajectory))]
        return token, scores, await replay_step(run, Version(0, 1))

    token, (nudged, foreign), first = on(path, wrong)
    assert not nudged.exact
    assert not foreign.exact
    if not first.environment:
        assert (nudged.first_unequal, nudged.equal_tokens) == (token, nudged.tokens - 1)
