"""A session that summarises itself trains as one rollout of several sequences, and P7 holds in each, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from headway.rollout_agent.client import EngineClient
from headway.rollout_agent.environments import chat
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.recorder import Recorder
from headway.rollout_agent.session import Diverged, Session, SessionResult
from headway.schemas.config import Config, parse_config
from headway.schemas.errors import PromiseViolated, UnavailableError
from headway.schemas.expr_protocol import GradeReply
from headway.schemas.messages import Signed, Task
from headway.schemas.sections import GrpoConfig
from headway.schemas.trajectory import Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import pack, unpack
from headway.trainer.agreement import Disagreement
from headway.trainer.batching import Sample, micro_batches
from headway.trainer.learner import Learner
from headway.trainer.rescore import rescore

from .conftest import TINY, Engine, tiny_weights

CONTEXT, SUMMARISE_AT, ACTION = 256, 90, 12
LONG = dataclasses.replace(TINY, max_position_embeddings=4096)
"""Room for all segments of a session in one sequence, where they do not belong."""
SHAPE = ModelShape(vocab_size=260, layers=2, layer_map=(0, 1), experts=4, top_k=2)


def settings(**agent: Any) -> Config:
    found = {"max_turns": 11, "max_action_tokens": ACTION, "max_session_tokens": CONTEXT, "max_observation_bytes": 64}
    found |= {"summarise_at_tokens": SUMMARISE_AT, "max_summaries": 3} | agent
    return parse_config("", "test", {"tasks.env": "repo"} | {f"agent.{key}": value for key, value in found.items()})


@dataclass
class Box:
    """Nothing is ever called: what a random model says is no call."""

    statement: str = "fix it"

    async def create(self, task: Task, attempt: str) -> Box:
        return self

    async def grade(self, *, submitted: bool, malformed: bool) -> GradeReply:
        return GradeReply(reward=1.0, verdict=Signed(payload=b"", signature=b""))

    async def destroy(self) -> None: ...


@pytest.fixture(autouse=True)
def short_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "ASKED", "sum up")
    monkeypatch.setattr(chat, "TOLD", "no: {}")
    monkeypatch.setattr(chat, "WENT_ON", "\nso far: ")


Keep = Callable[[Session], Awaitable[None]]


def session(engine: Engine, seed: int, config: Config, keep: Keep | None = None) -> Session:
    @contextlib.asynccontextmanager
    async def gate() -> AsyncIterator[None]:
        yield

    task = Task(
        rollout_id=f"r{seed}", purpose="train", env="repo", task_set="0" * 64, task_id="t", group=0, sample=seed,
        temperature=1.0, sampling_seed=seed, groups_issued=1, eval_blocks_issued=0, last_of_unit=False,
    )  # fmt: skip
    box: Any = Box()
    return Session(
        task=task, attempt=f"a{seed}", engine=EngineClient(engine.http, engine.url, SHAPE), sandbox=box,
        config=config.agent, shape=SHAPE, turn_gate=gate, clock=time.perf_counter, keep=keep,
        environment=chat.ChatEnvironment.of(config, "s", ()),
    )  # fmt: skip


async def sessions(engine: Engine, count: int = 4, swap_in: int = -1) -> list[Trajectory]:
    """As they travel. While number `swap_in` is in its second segment, version 0.1 takes the engine over."""
    made = []
    for seed in range(count):

        async def keep(session: Session, seed: int = seed) -> None:
            if seed == swap_in and len(session.recorder.closed) == 1:
                await engine.load("0.1", tiny_weights(1))

        found = (await session(engine, seed, settings(), keep).run()).trajectory
        made.append(unpack(Trajectory, pack(found)))
    return made


def samples(trajectories: list[Trajectory], head: int) -> list[Sample]:
    return [
        Sample(
            rollout_id=f"r{n}", group=0, reward=float(n % 3 == 0), trajectory=trajectory,
            span_lags=tuple(head - s.version.n for s in trajectory.spans),
            route_lags=tuple(head - s.version.n for s in trajectory.route_spans),
        )
        for n, trajectory in enumerate(trajectories)
    ]  # fmt: skip


def learner(seed: int, numerics: str = "bitwise") -> Learner:
    return Learner(
        tiny_weights(seed), LONG, GrpoConfig(token_budget=64, micro_batch_tokens=600), numerics=numerics,  # type: ignore[arg-type]
        compute_dtype=torch.float32, max_lag=2, seed=1,
    )  # fmt: skip


async def test_the_session_goes_on_from_the_task_and_its_own_words(engine: Engine) -> None:
    [made] = await sessions(engine, 1)
    assert (len(made.segments), made.turns, len(made.turn_stops)) == (3, 11, 11)
    decode = chat.ChatEnvironment.of(settings(), "s", ()).tokenizer.decode
    parts = made.parts()
    assert max(end - start for start, end in parts) <= CONTEXT
    for (start, end), (begin, finish) in itertools.pairwise(parts):
        runs = np.flatnonzero(np.diff(made.loss_mask[start:end])) + 1 + start
        asked, summary = made.token_ids[runs[-2] : runs[-1]].tolist(), made.token_ids[runs[-1] : end].tolist()
        assert "sum up" in decode(asked)
        words = [t for t in summary if t < 256]
        opening = made.token_ids[begin:finish].tolist()
        opening = opening[: next(n for n in range(len(opening)) if made.loss_mask[begin + n])]
        assert opening == [256, *b"system\ns", 257, 256, *b"user\nfix it\nso far: ", *words, 257, 256, *b"assistant\n"]


async def test_every_segment_is_asserted_bit_for_bit_in_the_learners_step(engine: Engine) -> None:
    made = await sessions(engine)
    batch = samples(made, 0)
    result = learner(0).step(batch)
    sampled = sum(int(t.loss_mask.sum()) for t in made)
    assert result.metrics["lag0_tokens"] == result.metrics["trained_tokens"] == sampled
    assert (result.metrics["lag0_equal_fraction"], result.metrics["lag0_flipped_fraction"]) == (1.0, 0.0)
    assert result.metrics["unrouted_tokens"] == 0
    assert result.advantages == (0.5, -0.5, -0.5, 0.5), "a rollout counts once, however many segments it has"
    places = [place for part in result.micro_batches for place in part]
    assert sorted(places) == sorted(n for n, t in enumerate(made) for _ in t.parts())
    gradient = learner(0)
    gradient.step(batch)
    assert gradient.step(samples(made, 1)).metrics["stale_tokens"] == sampled


async def test_read_as_one_sequence_it_would_not_agree(engine: Engine) -> None:
    [made] = await sessions(engine, 1)
    with pytest.raises(Disagreement, match=f"token {made.segments[0] + 1}|token"):
        learner(0).step(samples([made.model_copy(update={"segments": []})] * 2, 0))
    last = int(np.flatnonzero(made.loss_mask)[-1])
    logprobs = made.logprobs.copy()
    logprobs[last] = np.nextafter(logprobs[last], np.float32(-99))
    with pytest.raises(Disagreement, match=f"token {last}:"):
        learner(0).step(samples([made, made.model_copy(update={"logprobs": logprobs})], 0))


async def test_versions_are_told_apart_within_and_across_segments(engine: Engine) -> None:
    made = await sessions(engine, 2, swap_in=1)
    versions = [{s.version for s in t.spans} for t in made]
    assert versions == [{Version(0, 0)}, {Version(0, 0), Version(0, 1)}]
    result = learner(1).step(samples(made, 1))
    assert result.metrics["lag0_equal_fraction"] == 1.0
    assert result.metrics["lag0_tokens"] > 0
    assert result.metrics["stale_tokens"] > int(made[0].loss_mask.sum())
    config = parse_config("", "test")
    for trajectory in made:
        for span in trajectory.spans:
            score = rescore(tiny_weights(span.version.n), TINY, config, trajectory, span)
            assert score.exact, f"{span} recorded {score.recorded}, recomputed {score.recomputed}"


async def test_recorded_routes_are_replayed_in_each_segment(engine: Engine) -> None:
    made = await sessions(engine, 2)
    batch = samples(made, 0)
    for micro in micro_batches(batch, np.ones(2, np.float32), 600):
        assert micro.routes_BTLk is not None
        assert (micro.routes_BTLk.flatten(0, 1)[micro.rows_N] >= 0).all()
    result = learner(0, "replay").step(batch)
    assert result.metrics["lag0_fallback_fraction"] == result.metrics["lag0_flipped_fraction"] == 0.0


@pytest.mark.parametrize("turn", [3, 4, 8])
async def test_a_session_cut_off_in_any_segment_ends_as_if_it_had_not_been(engine: Engine, turn: int) -> None:
    async def leave(session: Session) -> None:
        if session.recorder.turns == turn:
            raise UnavailableError("gone")

    whole = (await session(engine, 0, settings()).run()).trajectory
    first = session(engine, 0, settings(), leave)
    with pytest.raises(UnavailableError):
        await first.run()
    saved = unpack(Trajectory, pack(first.recorder.saved(SHAPE, 1.0)))

    async def go_on(**agent: Any) -> SessionResult:
        second = session(engine, 0, settings(**agent))
        second.recorder = Recorder.resumed(saved)
        return await second.run()

    found = (await go_on()).trajectory
    for name in ("token_ids", "loss_mask", "logprobs"):
        assert np.array_equal(getattr(found, name), getattr(whole, name))
    assert (found.segments, found.spans, found.turn_stops) == (whole.segments, whole.spans, whole.turn_stops)
    assert learner(0).step(samples([found, whole], 0)).metrics["lag0_equal_fraction"] == 1.0
    with pytest.raises(Diverged):
        await go_on(summarise_at_tokens=SUMMARISE_AT - 70)


async def test_a_wire_trajectory_with_bad_segments_is_refused(engine: Engine) -> None:
    [made] = await sessions(engine, 1)
    start = made.segments[0]
    fields = made.model_dump() | {"routes": made.routes[:0], "route_spans": []}
    for segments in ([start - 1], [start + 1], [start, start], [0], [len(made.token_ids)], [len(made.token_ids) + 5]):
        with pytest.raises(ValueError):
            Trajectory.model_validate(fields | {"segments": segments})
    routes = made.routes.copy()
    routes[start - 1] = 0
    with pytest.raises(ValueError, match="nothing routed it"):
        Trajectory.model_validate(made.model_dump() | {"routes": routes})


def test_a_prompt_of_an_earlier_segment_is_refused() -> None:
    recorder = Recorder(ids=[1, 2])
    with pytest.raises(PromiseViolated):
        recorder.add([2], None)  # type: ignore[arg-type]
