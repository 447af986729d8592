import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.schemas.errors import PromiseViolated
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.trainer.batching import ABANDONED_LAG, Sample, micro_batches, plan, span_lags


def trajectory(lengths: list[tuple[int, int, int]], seed: int, routes: bool = False) -> Trajectory:
    """Turns of (observed tokens >= 1, sampled tokens >= 1, version number)."""
    rng, mask, spans = np.random.default_rng(seed), [], []
    for observed, sampled, n in lengths:
        mask += [0] * observed + [1] * sampled
        spans.append(Span(start=len(mask) - sampled, end=len(mask), version=Version(0, n)))
    size = len(mask)
    recorded = rng.integers(0, 4, (size - 1, 2, 2)).astype(np.uint8) if routes else np.zeros((0, 2, 2), np.uint8)
    return Trajectory(
        token_ids=rng.integers(0, 256, size).astype(np.int32),
        loss_mask=np.asarray(mask, np.uint8),
        logprobs=np.where(mask, -rng.random(size), 0.0).astype(np.float32),
        spans=spans,
        routes=recorded,
        route_spans=[Span(start=0, end=size - 1, version=Version(0, 0))] if routes else [],
        layer_map=[0, 1],
        temperature=0.7,
        turns=len(lengths),
        stop_reason="submitted",
    )


def sample(lengths: list[tuple[int, int, int]], seed: int = 0, head: int = 5, **extra: object) -> Sample:
    made = trajectory(lengths, seed, bool(extra.pop("routes", False)))
    lags = tuple(head - n for _, _, n in lengths)
    return Sample(rollout_id=f"g{seed}", group=seed // 2, reward=0.0, trajectory=made, span_lags=lags)


TURNS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(TURNS, min_size=1, max_size=9), st.integers(1, 80), st.integers(0, 3))
def test_every_sampled_token_is_in_exactly_one_micro_batch_with_its_own_facts(
    shapes: list[list[tuple[int, int, int]]], limit: int, zeros: int
) -> None:
    samples = [sample(turns, seed) for seed, turns in enumerate(shapes)]
    advantages = np.asarray([0.0 if i % 4 < zeros else i + 1.0 for i in range(len(samples))], np.float32)
    seen = set()
    for micro in micro_batches(samples, advantages, limit):
        b, width = micro.token_ids_BT.shape
        assert b == 1 or b * width <= limit
        assert micro.learns == bool(micro.advantage_N.any())
        for n in range(len(micro.targets_N)):
            i, place = int(micro.sample_N[n]), int(micro.place_N[n])
            made = samples[i].trajectory
            seen.add((i, place))
            row, column = divmod(int(micro.rows_N[n]), width)
            assert column == place - 1 < int(micro.lengths_B[row]) == len(made.token_ids) - 1
            assert micro.token_ids_BT[row, :place].tolist() == made.token_ids[:place].tolist()
            assert int(micro.targets_N[n]) == made.token_ids[place]
            assert float(micro.behaviour_N[n]) == made.logprobs[place]
            assert float(micro.advantage_N[n]) == advantages[i]
            assert float(micro.temperature_N[n]) == pytest.approx(0.7)
            span = next(s for s in made.spans if s.start <= place < s.end)
            assert int(micro.lag_N[n]) == 5 - span.version.n
            assert bool(micro.swapped_N[n]) == any(s.version != span.version for s in made.spans if s.end <= span.start)
    assert seen == {(i, int(p)) for i, s in enumerate(samples) for p in np.flatnonzero(s.trajectory.loss_mask)}


def test_similar_lengths_share_a_micro_batch_and_ties_keep_the_batch_order() -> None:
    assert plan([10, 90, 10, 80, 20], [True] * 5, 100) == [[0, 2, 4], [3], [1]]
    assert plan([10, 10, 10, 10], [True, False, True, False], 100) == [[0, 2], [1, 3]]
    assert plan([500], [True], 100) == [[0]]


def test_a_span_off_the_trainers_line_is_older_than_any_max_lag() -> None:
    spans = [Span(start=i, end=i + 1, version=Version(e, n)) for i, (e, n) in enumerate([(0, 3), (0, 6), (1, 5)])]
    line = lambda v: v.epoch == 1 or v.n <= 4  # noqa: E731
    assert span_lags(spans, Version(1, 7), line) == (4, ABANDONED_LAG, 2)


def test_a_token_from_the_future_violates_a_promise() -> None:
    with pytest.raises(PromiseViolated, match="newer"):
        sample([(2, 2, 6)], head=5)


def test_tokens_are_counted_as_trained_or_masked_by_the_lag_of_their_span() -> None:
    made = sample([(3, 4, 2), (2, 5, 3), (1, 1, 5)])
    assert made.counts(max_lag=2) == (6, 4)
    assert made.token_lags().tolist() == [-1] * 3 + [3] * 4 + [-1] * 2 + [2] * 5 + [-1, 0]


def test_recorded_routes_travel_along_and_a_sentinel_means_none() -> None:
    with_routes, without = sample([(3, 2, 5)], 0, routes=True), sample([(2, 4, 5)], 1)
    routes = with_routes.trajectory.routes.copy()
    routes[1] = 255
    with_hole = with_routes.trajectory.model_copy(update={"routes": routes})
    holed = Sample(rollout_id="h", group=0, reward=0.0, trajectory=with_hole, span_lags=(0,))
    [micro] = micro_batches([holed, without], np.ones(2, np.float32), 100)
    assert micro.routes_BTLk is not None
    got = micro.routes_BTLk.numpy()
    assert (got[0, 1] == -1).all()
    assert np.array_equal(got[0, [0, 2, 3]], routes[[0, 2, 3]])
    assert (got[1] == -1).all()
    assert micro_batches([without], np.ones(1, np.float32), 100)[0].routes_BTLk is None
