from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.kernels.decoder import KVCache, forward_cached, forward_full, token_logprob
from headway.kernels.quant import dequantise
from headway.kernels.weights import prepare
from headway.schemas.errors import HeadwayError, PromiseViolated
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.trainer.batching import Sample
from headway.trainer.checkpoint import from_bytes, to_bytes
from headway.trainer.learner import StepResult

from .learner_stand import EXPERT, HEAD, MODEL, batch, changed, fingerprint, learner, rollout


def test_a_step_is_a_pure_function_of_checkpoint_batch_and_config() -> None:
    results: list[tuple[StepResult, str]] = []
    for _ in range(2):
        made = learner()
        result = made.step(batch(made.rollout_weights()))
        results.append((result, fingerprint(made)))
    assert results[0] == results[1]
    assert fingerprint(learner()) != results[0][1]


def test_a_learner_resumed_from_a_checkpoint_takes_the_same_next_step() -> None:
    first = learner()
    first.step(batch(first.rollout_weights()))
    resumed = learner(seed=9)
    resumed.load_state(from_bytes(to_bytes(first.state()), MODEL.tensor_shapes()))
    assert resumed.steps_done == 1
    samples = batch(first.rollout_weights())
    assert first.step(samples) == resumed.step(samples)
    assert fingerprint(first) == fingerprint(resumed)


def test_what_the_engine_recorded_equals_the_trainers_forward_bit_for_bit_also_after_a_swap() -> None:
    made = learner()
    older = made.rollout_weights()
    made.step(batch(older))
    result = made.step(batch(made.rollout_weights(), older))
    assert result.metrics["lag0_equal_fraction"] == 1.0
    assert result.metrics["lag0_diff_max"] == 0.0
    assert result.metrics["lag0_tokens"] == 24
    assert result.metrics["lag0_swapped_tokens"] == 12
    assert result.metrics["stale_diff_max"] > 1e-3
    assert result.metrics["lag0_flipped_fraction"] == 0.0
    assert result.metrics["unrouted_tokens"] == 0
    assert result.metrics["lag_mean"] == pytest.approx(12 / 36)


def test_one_ulp_at_lag_0_violates_p7_and_leaves_the_state_alone() -> None:
    made = learner()
    samples, before = batch(made.rollout_weights()), fingerprint(made)
    logprobs = samples[6].trajectory.logprobs.copy()
    place = int(np.flatnonzero(logprobs)[1])
    logprobs[place] = np.nextafter(logprobs[place], np.float32(-99))
    samples[6] = changed(samples[6], logprobs=logprobs)
    with pytest.raises(PromiseViolated, match=rf"P7: rollout r6 token {place}: .*routes agree \(1 such"):
        made.step(samples)
    assert fingerprint(made) == before
    assert learner(numerics="off").step(samples).metrics["lag0_equal_fraction"] < 1.0
    assert learner(same=False).step(samples).metrics["lag0_equal_fraction"] == pytest.approx(35 / 36, abs=0.02)


def test_a_rollout_of_advantage_0_is_checked_as_well() -> None:
    made = learner()
    samples = [changed(s) for s in batch(made.rollout_weights())]
    samples = [Sample(**{f: getattr(s, f) for f in s.__slots__} | {"reward": 1.0}) for s in samples]
    samples[1] = changed(samples[1], logprobs=samples[1].trajectory.logprobs * np.float32(1.001))
    with pytest.raises(PromiseViolated, match="rollout r1 "):
        made.step(samples)


def test_other_routes_at_lag_0_violate_p7() -> None:
    made = learner()
    samples = batch(made.rollout_weights())
    place = int(np.flatnonzero(samples[2].trajectory.loss_mask)[0])
    routes = samples[2].trajectory.routes.copy()
    routes[place - 1, 1] = routes[place - 1, 1][::-1]
    samples[2] = changed(samples[2], routes=routes)
    with pytest.raises(PromiseViolated, match=rf"rollout r2 token {place}: .*routes differ"):
        made.step(samples)


def test_a_token_older_than_max_lag_contributes_nothing() -> None:
    made, twin = learner(), learner()
    now, old = made.rollout_weights(), learner(seed=4).rollout_weights()
    samples = batch(now)
    samples[3] = rollout([(3, old), (0, now)], 3, 1.0)
    logprobs = samples[3].trajectory.logprobs.copy()
    logprobs[np.flatnonzero(logprobs)[:3]] *= np.float32(0.5)
    wild = [*samples[:3], changed(samples[3], logprobs=logprobs), *samples[4:]]
    one, other = made.step(samples), twin.step(wild)
    assert one.metrics["masked_tokens"] == other.metrics["masked_tokens"] == 3
    assert one.metrics["trained_tokens"] == 24
    assert fingerprint(made) == fingerprint(twin)
    fresh = learner()
    fresh.step(batch(now))
    assert fingerprint(fresh) != fingerprint(made)


def test_the_gradient_is_taken_at_the_rollout_weights_and_lands_on_the_masters() -> None:
    """Masters that round to the same bf16 weights receive the same update, master for master."""
    made, moved = learner(warmup_steps=0), learner(warmup_steps=0)
    state = moved.state()
    nudged = {n: w * (1 + 2.0**-11) if w.dim() > 1 else w for n, w in state.masters.items()}
    state.masters.update(nudged)
    moved.load_state(state)
    assert all(torch.equal(a, moved.rollout_weights()[n]) for n, a in made.rollout_weights().items())
    before = {"made": made.state().masters, "moved": moved.state().masters}
    samples = batch(made.rollout_weights())
    assert made.step(samples).metrics == moved.step(samples).metrics
    for name, w in made.state().masters.items():
        torch.testing.assert_close(
            w - before["made"][name], moved.state().masters[name] - before["moved"][name], rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize("rollout_dtype", ["float16", "fp8"])
def test_an_engine_of_quantised_weights_agrees_bit_for_bit_step_after_step(rollout_dtype: str) -> None:
    made, coarse = learner(rollout_dtype=rollout_dtype), 0.0
    for _ in range(2):
        served = made.rollout_weights()
        result = made.step(batch(served))
        assert result.metrics["trained_tokens"] > 0
        coarse = max(
            coarse, float((dequantise(served, torch.float32)[EXPERT] - made.state().masters[EXPERT]).abs().max())
        )
    assert coarse > 0, "the masters are not quantised"
    with pytest.raises(PromiseViolated):
        made.step(batch(learner(rollout_dtype="bfloat16").rollout_weights()))


def test_how_a_batch_is_cut_into_micro_batches_changes_only_rounding() -> None:
    whole, cut = learner(), learner(micro_batch_tokens=12)
    samples = batch(whole.rollout_weights())
    one, other = whole.step(samples), cut.step(samples)
    assert one.metrics == pytest.approx(other.metrics, rel=1e-3, abs=1e-4)


def test_rewarded_tokens_become_likelier() -> None:
    made = learner(learning_rate=3e-3)
    samples = batch(made.rollout_weights())

    def likelihood(reward: float) -> float:
        weights = {name: w.float() for name, w in made.rollout_weights().items()}
        prepared, total = prepare(weights, MODEL, torch.float32), 0.0
        for s in samples:
            ids = torch.from_numpy(s.trajectory.token_ids.astype(np.int64))
            hidden = forward_full(prepared, MODEL, ids[None], torch.tensor([len(ids)])).hidden[0]
            place = np.flatnonzero(s.trajectory.loss_mask)
            if s.reward == reward:
                total += float(token_logprob(prepared, hidden[place - 1], ids[place])[0].sum())
        return total

    right, wrong = likelihood(1.0), likelihood(0.0)
    made.step(samples)
    assert likelihood(1.0) - right > 0.1
    assert likelihood(0.0) - wrong < -0.1


def test_replay_takes_the_recorded_experts_and_falls_back_where_none_were_recorded() -> None:
    samples = batch(learner().rollout_weights())
    live = learner(numerics="off")
    live.step(samples)
    flipped = [changed(s, routes=(3 - s.trajectory.routes).astype(np.uint8)) for s in samples]
    forced, plain = learner(numerics="replay"), learner(numerics="off")
    forced.step(flipped)
    plain.step(flipped)
    assert fingerprint(plain) == fingerprint(live)
    assert fingerprint(forced) != fingerprint(live)
    missing = [changed(s, routes=np.full_like(s.trajectory.routes, 255)) for s in samples]
    fallen = learner(numerics="replay")
    assert fallen.step(missing).metrics["unrouted_tokens"] == 24
    assert fingerprint(fallen) == fingerprint(live)


def test_a_gradient_that_is_not_finite_stops_the_step_and_leaves_the_state_alone() -> None:
    made = learner(numerics="off", entropy_bonus=1e300)
    before = fingerprint(made)
    with pytest.raises(HeadwayError, match="step 1 was not taken: the gradient norm"):
        made.step(batch(made.rollout_weights()))
    assert fingerprint(made) == before


def spanning(number: int, versions: list[Mapping[str, Tensor]], reward: float) -> Sample:
    """Swaps in place: each version goes on from the KV of the one before, and its rows keep its routes."""
    rng = torch.Generator().manual_seed(number)
    prompt = torch.randint(40, (5,), generator=rng).tolist()
    ids, logprobs, rows, spans, row_spans = prompt, [0.0] * 5, [], [], []
    cache, pages = KVCache.allocate(MODEL, 2, torch.float32), torch.tensor([[1, 0]])
    for lag, weights in zip(range(len(versions) - 1, -1, -1), versions, strict=True):
        prepared = prepare({name: w.float() for name, w in weights.items()}, MODEL, torch.float32)
        spans.append(Span(start=len(ids), end=len(ids) + 4, version=Version(0, HEAD - lag)))
        row_spans.append(Span(start=len(rows), end=len(ids) + 3, version=Version(0, HEAD - lag)))
        for _ in range(4):
            held = torch.tensor([len(rows)])
            chunk = torch.tensor([ids[len(rows) :]])
            out = forward_cached(prepared, MODEL, cache, pages, held, chunk, torch.tensor([chunk.shape[1]]))
            rows += out.routes[0].tolist()
            token = int(torch.randint(40, (1,), generator=rng))
            logprobs.append(float(token_logprob(prepared, out.hidden[0, -1:], torch.tensor([token]))[0]))
            ids = [*ids, token]
    made = Trajectory(
        token_ids=np.asarray(ids, np.int32),
        loss_mask=np.asarray([0] * 5 + [1] * (len(ids) - 5), np.uint8),
        logprobs=np.asarray(logprobs, np.float32),
        spans=spans,
        routes=np.asarray(rows, np.uint8),
        route_spans=row_spans,
        layer_map=[0, 1],
        temperature=1.0,
        turns=1,
        stop_reason="submitted",
    )
    lags = tuple(range(len(versions) - 1, -1, -1))
    return Sample(
        rollout_id=f"r{number}", group=number // 4, reward=reward, trajectory=made, span_lags=lags, route_lags=lags
    )


@pytest.mark.parametrize("max_lag", [2, 1])
def test_a_rollout_across_three_versions_replays_each_span_under_its_own(
    max_lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = [learner(seed=n).rollout_weights() for n in (3, 4)]
    made = learner(numerics="replay", seed=0)
    made._max_lag = max_lag
    samples = [spanning(n, [*versions, made.rollout_weights()], float(n % 3 == 0)) for n in range(8)]
    taken: dict[int, np.ndarray] = {}

    def watched(prepared: object, model: object, ids: Tensor, lengths: Tensor, *rest: object) -> object:
        out = forward_full(prepared, model, ids, lengths, *rest)  # type: ignore[arg-type]
        for row in range(len(ids)):
            (n,) = [n for n, s in enumerate(samples) if s.trajectory.token_ids[:-1].tolist() == ids[row].tolist()]
            taken[n] = out.routes[row].numpy()
            if max_lag == 1:  # the oldest span is masked, and its rows steer nothing
                old = samples[n].trajectory.route_spans[0]
                assert torch.equal(out.routes[row, : old.end], out.live[row, : old.end])
        return out

    monkeypatch.setattr("headway.trainer.learner.forward_full", watched)
    metrics = made.step(samples).metrics
    assert len(taken) == 8
    alive = 0
    for n, sample in enumerate(samples):
        for span, lag in zip(sample.trajectory.route_spans, sample.route_lags, strict=True):
            recorded = sample.trajectory.routes[span.start : span.end]
            if lag <= max_lag:
                assert np.array_equal(taken[n][span.start : span.end], recorded)
            else:
                alive += int((taken[n][span.start : span.end] != recorded).any())
    assert alive == (8 if max_lag == 1 else 0), "negative control: where nothing is replayed, routes differ"
    assert metrics["stale_tokens"] == 64
    assert metrics["lag0_tokens"] == 32
    assert metrics["masked_tokens"] == (32 if max_lag == 1 else 0)
    assert metrics["stale_fallback_fraction"] == (0.5 if max_lag == 1 else 0.0)
    assert metrics["stale_flipped_fraction"] > 0.1


def test_replay_brings_the_engines_experts_back_and_the_filter_is_counted_by_layer() -> None:
    """An engine whose router is off: live routing disagrees with it, replayed routing does not."""
    made = learner(numerics="off")
    rng = torch.Generator().manual_seed(0)
    other = {
        name: w + 0.1 * torch.randn(w.shape, generator=rng) if name.endswith("mlp.gate.weight") else w
        for name, w in made.rollout_weights().items()
    }
    samples = batch(other)
    off = made.step(samples).metrics
    replay = learner(numerics="replay").step(samples).metrics
    assert off["lag0_flipped_fraction"] > 0.2
    assert replay["lag0_k3"] < 0.7 * off["lag0_k3"], "gate weights still differ"
    assert replay["lag0_filtered_fraction"] == replay["lag0_fallback_fraction"] == 0.0
    strict = learner(numerics="replay", route_plausibility=1.0).step(samples).metrics
    per_layer = [strict[f"lag0_filtered_fraction_layer_{n}"] for n in range(2)]
    assert strict["lag0_filtered_fraction"] == pytest.approx(sum(per_layer) / 2) != 0.0
    assert strict["lag0_k3"] == pytest.approx(off["lag0_k3"]), "nothing but the live set is plausible"
    tokens = sum(len(s.trajectory.token_ids) for s in samples)
    assert strict["route_bytes_per_token"] == pytest.approx(4 * (1 - 8 / tokens))


def test_the_routers_learn_from_the_policy_loss_alone_unless_asked() -> None:
    plain, zero, balanced = learner(), learner(balance_loss=0.0), learner(balance_loss=0.1)
    samples = batch(plain.rollout_weights())
    results = [made.step(samples) for made in (plain, zero, balanced)]
    assert fingerprint(plain) == fingerprint(zero) != fingerprint(balanced)
    assert results[0].metrics["loss"] == results[2].metrics["loss"], "the policy loss is reported as such"
