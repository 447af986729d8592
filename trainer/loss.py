"""GRPO: advantages within a group, and the one loss function that its variants are parts of.

Shapes: R rollouts of a batch, N sampled tokens of a micro-batch.

Two ratios are kept apart. Behaviour -> proximal corrects for who sampled a token (older weights, another
engine's numerics): it only weighs a token, is truncated, and carries no gradient. Proximal -> current is
the trust region of PPO. (Decoupled PPO: Hilton et al., arXiv:2110.00641. Clip-higher and the token-level
sum: DAPO, arXiv:2503.14476. No division by the standard deviation, constant denominator: Dr. GRPO,
arXiv:2503.20783. Group mean as the baseline: DeepSeekMath, arXiv:2402.03300.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Advantage = Literal["mean", "mean_std", "shuffled"]
STD_FLOOR = 1e-6
FloatArray = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParams:
    """Settings of the loss; named as in `[grpo]`. `token_budget` is in tokens, the rest are ratios."""

    clip_low: float
    clip_high: float
    mismatch_cap: float
    entropy_bonus: float
    token_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """The loss of a micro-batch (scalar, to be summed over micro-batches) and detached sums over its tokens."""

    loss: Tensor
    sums: dict[str, float]


def group_advantages(rewards: list[float], groups: list[int], kind: Advantage, seed: int) -> FloatArray:
    """One advantage a rollout, float32 [R]: its reward minus the mean of its group's rewards.

    `mean_std` divides by the group's population standard deviation. `shuffled` permutes the `mean`
    advantages over the whole batch by `seed`: same numbers, no information; the control experiment.
    A group whose rewards are all equal gets exactly 0.
    """
    reward_R = np.asarray(rewards, np.float64)
    group_R = np.asarray(groups, np.int64)
    if len(reward_R) != len(group_R) or not np.isfinite(reward_R).all():
        raise ValueError(f"{len(reward_R)} rewards (all finite?) for {len(group_R)} group numbers")
    advantage_R = np.zeros(len(reward_R), np.float64)
    for group in np.unique(group_R):
        member_R = group_R == group
        own = reward_R[member_R]
        if own.min() == own.max():
            continue  # the mean of equal numbers may be off by an ulp: no gradient from rounding
        spread = own.std() + STD_FLOOR if kind == "mean_std" else 1.0
        advantage_R[member_R] = (own - own.mean()) / spread
    if kind == "shuffled":
        advantage_R = np.random.Generator(np.random.PCG64(seed)).permutation(advantage_R)
    return advantage_R.astype(np.float32)


def grpo_loss(
    current_N: Tensor,
    entropy_N: Tensor,
    behaviour_N: Tensor,
    proximal_N: Tensor,
    advantage_N: Tensor,
    keep_N: Tensor,
    params: LossParams,
) -> LossParts:
    """The token-level clipped policy loss minus the entropy bonus, over a constant token budget.

    Args:
        current_N: float32 [N], log-probabilities under the weights that learn; carries the gradient.
        entropy_N: float32 [N], entropies (nats) of the same distributions; carries the gradient.
        behaviour_N: float32 [N], as recorded when sampled.
        proximal_N: float32 [N], under the weights at the start of the step.
        advantage_N: float32 [N], the rollout's advantage, repeated.
        keep_N: bool [N], False where a token is stale: it then adds nothing, not even to the entropy.
    """
    weight_N = torch.exp(proximal_N - behaviour_N).detach()
    truncated_N = weight_N > params.mismatch_cap
    weight_N = weight_N.clamp(max=params.mismatch_cap)
    ratio_N = torch.exp(current_N - proximal_N.detach())
    clipped_N = ratio_N.clamp(1.0 - params.clip_low, 1.0 + params.clip_high)
    surrogate_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    gain_N = weight_N * surrogate_N + params.entropy_bonus * entropy_N
    # where, not a product: a masked token's infinity must not become NaN.
    loss = -torch.where(keep_N, gain_N, 0.0).sum() / params.token_budget

    def total(value_N: Tensor) -> float:
        return float(torch.where(keep_N, value_N.detach().double(), 0.0).sum())

    sums = {
        "tokens": total(torch.ones_like(current_N)),
        "entropy": total(entropy_N),
        "clipped": total((ratio_N * advantage_N > clipped_N * advantage_N).float()),
        "truncated": total(truncated_N.float()),
        "mismatch_ratio": total(weight_N),
    }
    return LossParts(loss=loss, sums=sums)
