"""Penalties and auxiliary rewards are pure functions of a recorded rollout, recorded beside the verdict."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.rollout_agent.outcomes import Outcomes
from headway.rollout_agent.session import SessionResult
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError, WireError
from headway.schemas.messages import Command, Rollout, Signed, Verdict
from headway.schemas.plugs import load
from headway.schemas.rewards import Facts, Scoring, concave, effort
from headway.schemas.sections import AgentConfig, RewardConfig
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import pack, unpack
from headway.trainer.intake import Judge

CONCAVE = "headway.schemas.rewards:concave"


def trajectory(sampled: int = 3, observed: int = 4, turns: int = 1) -> Trajectory:
    mask = np.array([0] * observed + [1] * sampled, np.uint8)
    return Trajectory(
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        spans=[Span(start=observed, end=observed + sampled, version=Version(0, 0))],
        routes=np.zeros((0, 1, 2), np.uint8),
        route_spans=[],
        layer_map=[0],
        temperature=1.0,
        turns=turns,
        stop_reason="submitted",
    )


def facts(calls: int = 2, reward: float = 1.0, **sizes: int) -> Facts:
    commands = [Command(tool="t", ms=1.0, ok=True)] * calls
    return Facts(trajectory=trajectory(**sizes), commands=commands, reward=reward, parts={"right": reward})


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes `module:attribute` out of a function."""

    def make(function: Any) -> str:
        module = types.ModuleType("plugged_rewards")
        module.part = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "plugged_rewards", module)
        return "plugged_rewards:part"

    return make


def test_effort_weighs_tokens_of_each_kind_calls_and_turns() -> None:
    weights = RewardConfig(sampled_token_weight=1.0, observation_token_weight=0.5, call_weight=10.0, turn_weight=100.0)
    assert effort(facts(calls=2, sampled=3, observed=4, turns=5), weights) == 3 + 2 + 20 + 500


@pytest.mark.parametrize("curvature", [0.0, 0.5, 1.0])
def test_the_length_penalty_grows_ever_more_slowly(curvature: float) -> None:
    config = RewardConfig(length_unit=10.0, length_curvature=curvature, length_scale=2.0)
    at = [concave(facts(sampled=n, observed=1), config) for n in (1, 101, 201, 301)]
    grown = np.diff(at)
    assert (grown > 0).all()
    assert np.allclose(np.diff(grown), 0) if curvature == 0 else (np.diff(grown) < 0).all()
    if curvature == 0:
        assert at[0] == pytest.approx(2.0 * 1 / 10)


def test_the_total_is_the_sum_of_the_recorded_parts(plug: Callable[..., str]) -> None:
    spec = plug(lambda facts, config: 0.25 * facts.parts["right"])
    scoring = Scoring(RewardConfig(auxiliary=[spec], length_penalty=CONCAVE, length_unit=1.0))
    scored = scoring.score(facts())
    assert scored.parts == {
        "verdict": 1.0,
        spec: 0.25,
        "length_penalty": -concave(facts(), RewardConfig(length_unit=1.0)),
    }
    assert scored.total == pytest.approx(sum(scored.parts.values()))
    assert scored == Scoring(RewardConfig(auxiliary=[spec], length_penalty=CONCAVE, length_unit=1.0)).score(facts())


def test_without_functions_the_verdict_is_all_there_is() -> None:
    scored = Scoring(RewardConfig()).score(facts(reward=-0.25))
    assert (scored.total, scored.parts) == (-0.25, {})


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nothing", "names nothing"),
        ("no.such.module:part", "cannot be loaded"),
        ("headway.schemas.rewards:no_such", "cannot be loaded"),
        ("headway.schemas.rewards:VERDICT", "no function"),
        ("headway.schemas.rewards:", "names nothing"),
    ],
)
def test_a_part_that_cannot_be_had_is_refused_at_start_up(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(spec, "reward.auxiliary")
    with pytest.raises(ConfigError, match=r"reward\.auxiliary"):
        Scoring(RewardConfig(auxiliary=[spec]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "x", None, ZeroDivisionError])
def test_a_function_that_fails_stops_the_service_and_is_named(value: object, plug: Callable[..., str]) -> None:
    def part(facts: Facts, config: RewardConfig) -> Any:
        if value is ZeroDivisionError:
            raise ZeroDivisionError
        return value

    with pytest.raises(ConfigError, match="plugged_rewards:part"):
        Scoring(RewardConfig(auxiliary=[plug(part)])).score(facts())


def test_a_penalty_below_zero_is_refused(plug: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="never below 0"):
        Scoring(RewardConfig(length_penalty=plug(lambda facts, config: -1.0))).score(facts())


KEY = bytes(range(32))


def rollout(reward: float, parts: dict[str, float], signed: float = 1.0) -> Rollout:
    verdict = Verdict(
        run="r", rollout_id="g0000000s000", attempt="a", task_id="t", host="h", workspace_digest="0" * 64,
        reward=signed, parts={"right": 1.0},
    )  # fmt: skip
    return Rollout(
        rollout_id="g0000000s000", attempt="a", purpose="train", outcome="ok", terminal=True, group=0, sample=0,
        task_id="t", task_seq=1, delivery=1, region="east", agent="a1", reward=reward, reward_parts=parts,
        trajectory=trajectory(), verdict=Signed.seal(KEY, pack(verdict)),
        commands=[Command(tool="t", ms=1.0, ok=True)] * 2,
    )  # fmt: skip


def judge(config: RewardConfig) -> Judge:
    from headway.schemas.signing import public_key

    made = types.SimpleNamespace
    plan = made(config=made(agent=AgentConfig(max_session_tokens=99), reward=config))
    model = made(vocab_size=99, sparse_layers=[0], num_experts=4, num_experts_per_tok=2)
    genesis = made(sandbox_key=public_key(KEY))
    return Judge(run="r", genesis=genesis, model=model, plan=plan, scoring=Scoring(config))  # type: ignore[arg-type]


def test_the_trainer_computes_the_total_again_from_what_was_recorded_and_refuses_any_other() -> None:
    config = RewardConfig(length_penalty=CONCAVE, length_unit=1.0)
    history: Any = types.SimpleNamespace(manifests={Version(0, 0): ""})
    due = Scoring(config).score(facts())
    travelled = unpack(Rollout, pack(rollout(due.total, due.parts)))
    assert travelled.reward_parts["verdict"] == 1.0, "what was signed stays beside the total"
    judge(config).check(travelled, history)
    for reward, parts in ((1.0, {}), (1.0, due.parts), (due.total, {}), (due.total, {**due.parts, "more": 0.0})):
        with pytest.raises(WireError, match="follows from its verdict"):
            judge(config).check(rollout(reward, parts), history)
    with pytest.raises(WireError, match="follows from its verdict"):
        judge(RewardConfig()).check(travelled, history)
    judge(RewardConfig()).check(rollout(1.0, {}), history)


def test_a_plug_may_be_a_file_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def bonus(facts, config):\n    return 0.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Scoring(RewardConfig(auxiliary=["my_rewards:bonus"])).score(facts()).total == 1.5


async def test_a_total_that_no_rollout_can_carry_is_named_before_one_is_made(plug: Callable[..., str]) -> None:
    verdict = Verdict(
        run="r", rollout_id="g", attempt="a", task_id="t", host="h", workspace_digest="0" * 64, reward=1.0, parts={}
    )
    result = SessionResult(
        trajectory=trajectory(),
        verdict=Signed.seal(bytes(range(32)), pack(verdict)),
        reward=1.0,
        commands=[],
        timings_ms={},
    )
    scoring = Scoring(RewardConfig(auxiliary=[plug(lambda facts, config: -2e6)]))
    outcomes = Outcomes(Any, Config(), Any, scoring, region="east", agent="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the reward functions gave -2e"):
        await outcomes.finished(SimpleNamespace(task=None), "n", result, None)  # type: ignore[arg-type]
