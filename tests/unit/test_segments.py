"""A rollout of several segments is several sequences of one rollout; settings of sessions fit together."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from headway.rollout_agent.environments.base import environment_of
from headway.schemas.config import parse_config
from headway.schemas.errors import ConfigError, WireError
from headway.schemas.ids import segment_seed
from headway.schemas.messages import Rollout, Signed, Verdict
from headway.schemas.rewards import Scoring
from headway.schemas.sections import AgentConfig, RewardConfig
from headway.schemas.signing import public_key
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import pack
from headway.trainer.batching import Sample, micro_batches
from headway.trainer.intake import Judge

KEY = bytes(range(32))
MASKS = ([0, 0, 1, 1], [0, 1, 0, 0, 1, 1], [0, 0, 0, 1])


def trajectory(*masks: list[int], shift: int = 0) -> Trajectory:
    """Each mask is a segment; token, log-probability and route tell the place, counted from `shift`."""
    mask = np.concatenate(masks)
    starts = np.cumsum([len(part) for part in masks])[:-1].tolist()
    place = np.arange(len(mask)) + shift
    edges = np.flatnonzero(np.diff([*mask, 0])) + 1
    routes = (place[:-1, None, None] % 200).astype(np.uint8) * np.ones((1, 2, 1), np.uint8)
    routes[[at - 1 for at in starts]] = 255
    return Trajectory(
        token_ids=place.astype(np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, -0.01 * place, 0.0).astype(np.float32),
        spans=[
            Span(start=int(a), end=int(b), version=Version(0, n % 2))
            for n, (a, b) in enumerate(zip(edges[::2], edges[1::2], strict=True))
        ],
        routes=routes,
        route_spans=[Span(start=0, end=len(mask) - 1, version=Version(0, 1))],
        layer_map=[0, 1],
        temperature=1.0,
        turns=1,
        stop_reason="submitted",
        segments=starts,
    )


def sample(made: Trajectory, number: int = 0) -> Sample:
    return Sample(
        rollout_id=f"r{number}", group=0, reward=1.0, trajectory=made, span_lags=tuple(s.version.n for s in made.spans)
    )


def test_a_rollouts_segments_are_packed_as_sequences_of_their_own() -> None:
    whole = sample(trajectory(*MASKS))
    starts = [start for start, _ in whole.trajectory.parts()]
    alone = [sample(trajectory(mask, shift=at), n) for n, (mask, at) in enumerate(zip(MASKS, starts, strict=True))]
    [one] = micro_batches([whole], np.full(1, 0.5), 1000)
    [three] = micro_batches(alone, np.full(3, 0.5), 1000)
    for name in ("token_ids_BT", "lengths_B", "routes_BTLk", "rows_N", "targets_N", "behaviour_N", "advantage_N"):
        assert torch.equal(getattr(one, name), getattr(three, name)), name
    assert one.members == (0, 0, 0)
    assert one.sample_N.unique().tolist() == [0]
    assert one.place_N.tolist() == one.targets_N.tolist(), "a place is the token's in its rollout"
    lags = dict(zip(one.place_N.tolist(), one.lag_N.tolist(), strict=True))
    assert lags == {2: 0, 3: 0, 5: 1, 8: 0, 9: 0, 13: 1}
    swapped = dict(zip(one.place_N.tolist(), one.swapped_N.tolist(), strict=True))
    assert [at for at, is_swapped in swapped.items() if is_swapped] == [8, 9], "what another segment held is no prefix"


def test_segments_count_against_the_limit_of_a_micro_batch_one_by_one() -> None:
    micros = micro_batches([sample(trajectory(*MASKS))], np.ones(1), 6)
    assert [micro.members for micro in micros] == [(0, 0), (0,)]
    assert sum(len(micro.targets_N) for micro in micros) == 6


def rollout(made: Trajectory) -> Rollout:
    verdict = Verdict(
        run="r", rollout_id="g0000000s000", attempt="a", task_id="t", host="h", workspace_digest="0" * 64, reward=1.0,
        parts={},
    )  # fmt: skip
    return Rollout(
        rollout_id="g0000000s000", attempt="a", purpose="train", outcome="ok", terminal=True, group=0, sample=0,
        task_id="t", task_seq=1, delivery=1, region="east", agent="a1", reward=1.0, trajectory=made,
        verdict=Signed.seal(KEY, pack(verdict)),
    )  # fmt: skip


def judge(**agent: Any) -> Judge:
    made = types.SimpleNamespace
    settings: dict[str, Any] = {"max_session_tokens": 6, "max_summaries": 2, "summarise_at_tokens": 3} | agent
    plan = made(config=made(agent=AgentConfig(**settings), reward=RewardConfig()))
    model = made(vocab_size=99, sparse_layers=[0, 1], num_experts=250, num_experts_per_tok=1)
    genesis = made(sandbox_key=public_key(KEY))
    return Judge(run="r", genesis=genesis, model=model, plan=plan, scoring=Scoring(RewardConfig()))  # type: ignore[arg-type]


def test_the_trainer_takes_as_many_and_as_long_segments_as_agents_may_make() -> None:
    history: Any = types.SimpleNamespace(manifests={Version(0, 0): "", Version(0, 1): ""})
    whole = rollout(trajectory(*MASKS))
    judge().check(whole, history)
    for changed in ({"max_session_tokens": 5}, {"max_summaries": 1}, {"summarise_at_tokens": 0}):
        with pytest.raises(WireError, match="3 segments of up to 6 tokens"):
            judge(**changed).check(whole, history)


def test_segments_draw_differently_at_equal_places() -> None:
    assert segment_seed(7, 0) == 7
    assert len({segment_seed(seed, n) for seed in (7, 8) for n in range(9)}) == 18
    assert all(0 <= segment_seed(7, n) < 1 << 63 for n in range(9))


CHAT = {"tasks.env": "repo", "model.max_position_embeddings": 90_000, "agent.max_session_tokens": 90_000}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"agent.turn_timeout_s": 5.0}, "deadlines must nest"),
        ({"agent.session_timeout_s": 30.0}, "deadlines must nest"),
        ({"agent.rollout_timeout_s": 120.0}, "deadlines must nest"),
        ({"agent.summarise_at_tokens": 80_000}, "no summary would fit"),
        ({"agent.summarise_at_tokens": 9_000, "agent.max_summaries": 12}, "lower agent.max_summaries"),
        ({"agent.summarise_at_tokens": 9_000, "agent.harness": "a:b"}, "a harness"),
        ({"tasks.env": "mine"}, "tasks.agent_side"),
        ({"tasks.env": "mine", "tasks.host_side": "a:b"}, "tasks.agent_side"),
        (
            {"run.lockstep": True, "staleness.max_lag": 0, "staleness.swap_slack": 0, "agent.at_deadline": "grade"},
            "no clock may decide",
        ),
    ],
)
def test_settings_that_contradict_are_refused(changes: dict[str, Any], says: str) -> None:
    parse_config("", "test", CHAT)
    with pytest.raises(ConfigError, match=says):
        parse_config("", "test", CHAT | changes)


def test_an_environment_that_cannot_be_had_or_cannot_summarise_is_refused_at_start_up() -> None:
    environment_of(parse_config("", "test", CHAT | {"agent.summarise_at_tokens": 1000}))
    with pytest.raises(ConfigError, match="expr cannot summarise"):
        environment_of(parse_config("", "test", CHAT | {"tasks.env": "expr", "agent.summarise_at_tokens": 1000}))
    sides = {"tasks.env": "mine", "tasks.agent_side": "no_such:make", "tasks.host_side": "no_such:make"}
    with pytest.raises(ConfigError, match=r"tasks\.agent_side"):
        environment_of(parse_config("", "test", CHAT | sides))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        environment_of(parse_config("", "test", CHAT | {"agent.tokenizer": "/nowhere"}))
