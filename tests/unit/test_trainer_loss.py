import math

import numpy as np
import pytest
import torch

from headway.trainer.loss import LossParams, group_advantages, grpo_loss

PARAMS = LossParams(clip_low=0.2, clip_high=0.28, mismatch_cap=2.0, entropy_bonus=0.01, token_budget=50)


def tokens(seed: int, n: int = 40) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    proximal = -rng.exponential(1.0, n)
    return {
        "current_N": torch.tensor(proximal + rng.normal(0, 0.3, n)),
        "entropy_N": torch.tensor(rng.exponential(0.5, n)),
        "behaviour_N": torch.tensor(proximal + rng.normal(0, 0.8, n)),
        "proximal_N": torch.tensor(proximal),
        "advantage_N": torch.tensor(rng.normal(0, 1, n)),
        "keep_N": torch.tensor(rng.random(n) < 0.8),
    }


def slow_loss(t: dict[str, torch.Tensor], p: LossParams) -> float:
    total = 0.0
    for n in range(len(t["current_N"])):
        if not t["keep_N"][n]:
            continue
        weight = min(math.exp(t["proximal_N"][n] - t["behaviour_N"][n]), p.mismatch_cap)
        ratio = math.exp(t["current_N"][n] - t["proximal_N"][n])
        advantage = float(t["advantage_N"][n])
        clipped = min(max(ratio, 1 - p.clip_low), 1 + p.clip_high)
        total += weight * min(ratio * advantage, clipped * advantage) + p.entropy_bonus * float(t["entropy_N"][n])
    return -total / p.token_budget


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_equals_a_token_by_token_oracle(seed: int) -> None:
    t = tokens(seed)
    parts = grpo_loss(**t, params=PARAMS)
    assert float(parts.loss) == pytest.approx(slow_loss(t, PARAMS), rel=1e-12)
    weights = torch.exp(t["proximal_N"] - t["behaviour_N"])[t["keep_N"]]
    assert parts.sums["tokens"] == int(t["keep_N"].sum())
    assert parts.sums["truncated"] == int((weights > PARAMS.mismatch_cap).sum()) > 0
    assert parts.sums["clipped"] > 0


def test_the_gradient_is_that_of_finite_differences() -> None:
    t = tokens(7, n=24)

    def loss(current: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return grpo_loss(**(t | {"current_N": current, "entropy_N": entropy}), params=PARAMS).loss

    inputs = (t["current_N"].requires_grad_(), t["entropy_N"].requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-7)


def test_with_one_update_a_batch_each_token_pulls_with_its_truncated_weight_times_its_advantage() -> None:
    t = tokens(3)
    current = t["proximal_N"].clone().requires_grad_()
    grpo_loss(**(t | {"current_N": current, "proximal_N": current.detach()}), params=PARAMS).loss.backward()
    weight = torch.exp(t["proximal_N"] - t["behaviour_N"]).clamp(max=PARAMS.mismatch_cap)
    wanted = torch.where(t["keep_N"], -weight * t["advantage_N"] / PARAMS.token_budget, 0.0)
    torch.testing.assert_close(current.grad, wanted, rtol=1e-12, atol=0.0)


def test_no_gradient_passes_beyond_the_trust_region_in_the_direction_of_the_advantage() -> None:
    ratio = torch.tensor([1.30, 1.27, 0.79, 0.81, 1.30, 0.79], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    current = ratio.log().requires_grad_()
    zero = torch.zeros(6, dtype=torch.float64)
    grpo_loss(current, zero, zero, zero, advantage, torch.ones(6, dtype=torch.bool), PARAMS).loss.backward()
    assert (current.grad != 0).tolist() == [False, True, False, True, True, True]


def test_a_masked_token_adds_nothing_however_wild_it_is() -> None:
    t = tokens(4)
    t["keep_N"][5] = False
    before = grpo_loss(**t, params=PARAMS)
    wild = t["behaviour_N"].clone()
    wild[5] = -3e38
    after = grpo_loss(**(t | {"behaviour_N": wild}), params=PARAMS)
    assert (float(after.loss), after.sums) == (float(before.loss), before.sums)


def test_advantages_are_the_reward_minus_the_group_mean() -> None:
    got = group_advantages([1.0, 0.0, 0.0, -0.25, 1.0], [7, 7, 7, 2, 2], "mean", 0)
    np.testing.assert_allclose(got, [2 / 3, -1 / 3, -1 / 3, -0.625, 0.625], rtol=1e-6)
    assert got.dtype == np.float32


def test_mean_std_also_divides_by_the_population_deviation() -> None:
    got = group_advantages([1.0, 0.0, 0.0, 0.0], [1, 1, 1, 1], "mean_std", 0)
    np.testing.assert_allclose(got, np.array([0.75, -0.25, -0.25, -0.25]) / math.sqrt(0.1875), rtol=1e-4)


@pytest.mark.parametrize("kind", ["mean", "mean_std"])
def test_a_group_of_equal_rewards_gets_exactly_zero(kind: str) -> None:
    rewards = [0.1, 0.1, 0.1, 1.0, 0.0]
    assert np.mean([0.1] * 3) - 0.1 != 0  # the rounding that must not become a gradient
    got = group_advantages(rewards, [1, 1, 1, 2, 2], kind, 0)  # type: ignore[arg-type]
    assert got[:3].tolist() == [0.0, 0.0, 0.0]
    assert abs(got[3]) > 0.4


def test_the_shuffled_control_keeps_the_numbers_and_loses_their_places_by_seed() -> None:
    rewards, groups = [float(i % 3) for i in range(32)], [i // 8 for i in range(32)]
    plain = group_advantages(rewards, groups, "mean", 0)
    one, again, other = (group_advantages(rewards, groups, "shuffled", seed) for seed in (1, 1, 2))
    assert sorted(one) == sorted(plain)
    assert one.tolist() == again.tolist()
    assert one.tolist() != plain.tolist()
    assert one.tolist() != other.tolist()


def test_advantages_refuse_what_is_no_number() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([float("nan"), 1.0], [1, 1], "mean", 0)
