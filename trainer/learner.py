"""One GRPO step: fp32 masters in, fp32 masters out, a pure function of (checkpoint, batch in order, config).

The forward runs through the rollout weights (the masters rounded or quantised, which is exactly what engines
serve) in the compute dtype; gradients go straight through the rounding to the masters. Nothing is
written before the whole batch was computed and P7 held, so a failed step leaves the state as it was.

Shapes: as in `batching`. d hidden width, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headway.kernels.config import ModelConfig
from headway.kernels.decoder import Output, forward_full, token_logprob
from headway.kernels.numerics import FAST, INVARIANT
from headway.kernels.quant import RolloutDtype, to_rollout
from headway.kernels.router import balance_loss
from headway.kernels.weights import check_tensors, prepare, round_through
from headway.schemas.errors import HeadwayError
from headway.schemas.sections import GrpoConfig
from headway.trainer.agreement import Agreement
from headway.trainer.batching import MicroBatch, Sample, micro_batches
from headway.trainer.checkpoint import Checkpoint
from headway.trainer.loss import LossParams, group_advantages, grpo_loss
from headway.trainer.optim import AdamW, Schedule, clip_by_global_norm

NumericsMode = Literal["bitwise", "replay", "off"]
SwapMode = Literal["retract", "in_place", "finish"]
COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """metrics: plain numbers of the step; no clock in them, so that a replay gives the same.

    advantages: one a rollout of the batch, in its order.
    """

    metrics: dict[str, float]
    advantages: tuple[float, ...]
    seed: int
    """What the step's random draws are a function of; there is no other generator state."""
    micro_batches: tuple[tuple[int, ...], ...]
    """Which rollouts, by place in the batch, each forward took, in the order in which gradients were added up."""


class Learner:
    """Owns the masters and Adam's moments."""

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        model: ModelConfig,
        config: GrpoConfig,
        *,
        numerics: NumericsMode,
        compute_dtype: torch.dtype,
        max_lag: int,
        seed: int,
        swap_mode: SwapMode = "retract",
        rollout_dtype: RolloutDtype = "bfloat16",
        same_arithmetic: bool = True,
    ) -> None:
        """masters: a checkpoint's tensors under Hugging Face names, any float dtype; copied to fp32.

        P7 is asserted in bitwise numerics, unless swaps happen in place: a kept KV prefix was computed by
        older weights, so there the difference can only be measured; so it is for rollouts that were sampled
        in another environment, which the caller knows (same_arithmetic=False).
        Raises ValueError when the masters do not fit `model`.
        """
        check_tensors({name: tuple(w.shape) for name, w in masters.items()}, model)
        self._model, self._config, self._seed, self._max_lag = model, config, seed, max_lag
        self._rollout_dtype: RolloutDtype = rollout_dtype
        self._compute_dtype, self._replay = compute_dtype, numerics == "replay"
        self._exact = numerics == "bitwise" and swap_mode != "in_place" and same_arithmetic
        self._kernels = INVARIANT if numerics == "bitwise" else FAST
        self._masters = {name: masters[name].detach().float().clone() for name in sorted(masters)}
        self._adam = AdamW(self._masters, beta1=config.adam_beta1, beta2=config.adam_beta2)
        self._steps_done = 0
        self._schedule = Schedule(peak=config.learning_rate, warmup_steps=config.warmup_steps, total_steps=0)
        self._loss = LossParams(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            mismatch_cap=config.mismatch_cap,
            entropy_bonus=config.entropy_bonus,
            token_budget=config.token_budget,
        )

    @property
    def model(self) -> ModelConfig:
        return self._model

    @property
    def steps_done(self) -> int:
        """Steps taken since version 0."""
        return self._steps_done

    def rollout_weights(self) -> dict[str, Tensor]:
        """The weights that engines are to serve, as they load them."""
        return to_rollout(self._masters, self._rollout_dtype)

    def state(self, *, copied: bool = True) -> Checkpoint:
        """Everything the next step depends on: a copy, else the learner's own tensors, to be read before it goes on."""
        return Checkpoint(
            masters={name: master.clone() if copied else master for name, master in self._masters.items()},
            moments=self._adam.state(copied=copied),
            counters={"steps_done": self._steps_done},
        )

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Continue from `state()`'s result. Raises ValueError or KeyError when it does not fit."""
        check_tensors({name: tuple(w.shape) for name, w in checkpoint.masters.items()}, self._model)
        self._adam.load_state(checkpoint.moments, checkpoint.counters["steps_done"])
        self._steps_done = checkpoint.counters["steps_done"]
        for name, master in self._masters.items():
            master.copy_(checkpoint.masters[name])

    def step(self, batch: Sequence[Sample]) -> StepResult:
        """Train once on whole groups, in the order given, and update the masters.

        Raises:
            Disagreement: P7, in bitwise numerics: a token's recorded log-probability or routes differ from
                the recomputed ones though the current version sampled it.
            HeadwayError: the gradient is not finite.
        """
        config, seed = self._config, self._seed * 1_000_003 + self._steps_done
        advantages = group_advantages(
            [sample.reward for sample in batch], [sample.group for sample in batch], config.advantage, seed
        )
        grads = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        agreement = Agreement(exact=self._exact, replay=self._replay)
        sums: dict[str, float] = {"loss": 0.0}
        micros = micro_batches(batch, advantages, config.micro_batch_tokens, self._max_lag)
        for micro in micros:
            for name, value in self._accumulate(micro, grads, agreement).items():
                sums[name] = sums.get(name, 0.0) + value
        agreement.check([sample.rollout_id for sample in batch])
        try:
            norm = clip_by_global_norm(grads, config.clip_norm)
        except ValueError as error:
            raise HeadwayError(
                f"step {self._steps_done + 1} was not taken: {error}", hint="look for NaN in rewards or weights"
            ) from None
        rate = self._schedule.at(self._steps_done)
        self._adam.step(grads, rate)
        self._steps_done += 1
        metrics = _batch_metrics(batch, advantages, self._max_lag) | _token_metrics(sums) | agreement.metrics()
        metrics |= {"grad_norm": norm, "learning_rate": rate}
        return StepResult(
            metrics=metrics,
            advantages=tuple(float(a) for a in advantages),
            seed=seed,
            micro_batches=tuple(micro.members for micro in micros),
        )

    @torch.no_grad()
    def recompute(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Output]:
        """The forward of a step at the present weights: log-probabilities and entropies f32 [N], and the routes."""
        return self._forward(self._masters, micro)

    def _accumulate(self, micro: MicroBatch, grads: dict[str, Tensor], agreement: Agreement) -> dict[str, float]:
        """Add the micro-batch's gradients to `grads`; its sums over tokens."""
        with torch.set_grad_enabled(micro.learns):
            leaves = {name: w.detach().requires_grad_(micro.learns) for name, w in self._masters.items()}
            current_N, entropy_N, out = self._forward(leaves, micro)
            agreement.add(micro, current_N.detach(), out)
            parts = grpo_loss(
                current_N,
                entropy_N,
                micro.behaviour_N,
                current_N.detach(),  # one update a batch: the proximal policy is the current one
                micro.advantage_N,
                micro.lag_N <= self._max_lag,
                self._loss,
            )
            if not micro.learns:
                return parts.sums
            loss = parts.loss
            if self._config.balance_loss:
                loss = loss + self._config.balance_loss * self._imbalance(micro, out)
            found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        for name, grad in zip(leaves, found, strict=True):
            grads[name] += grad
        return parts.sums | {"loss": float(parts.loss.detach())}

    def _imbalance(self, micro: MicroBatch, out: Output) -> Tensor:
        """The balance loss, weighted like a token's in the policy loss, so that micro-batches add up."""
        weight = len(micro.targets_N) / self._config.token_budget
        return balance_loss(out.router_scores, self._model.num_experts_per_tok) * weight

    def _forward(self, masters: Mapping[str, Tensor], micro: MicroBatch) -> tuple[Tensor, Tensor, Output]:
        prepared = prepare(round_through(masters, self._rollout_dtype), self._model, self._compute_dtype)
        forced = micro.routes_BTLk if self._replay else None
        out = forward_full(
            prepared,
            self._model,
            micro.token_ids_BT,
            micro.lengths_B,
            self._kernels,
            forced,
            self._config.route_plausibility,
        )
        hidden_Nd = out.hidden.flatten(0, 1).index_select(0, micro.rows_N)
        current_N, entropy_N = token_logprob(prepared, hidden_Nd, micro.targets_N, micro.temperature_N, self._kernels)
        return current_N, entropy_N, out


def _token_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    tokens = sums.get("tokens", 0.0)
    means = {name: value / max(tokens, 1.0) for name, value in sums.items() if name not in ("loss", "tokens")}
    return {"loss": sums["loss"], "trained_tokens": tokens} | {f"{name}_mean": v for name, v in means.items()}


def _batch_metrics(batch: Sequence[Sample], advantages: np.ndarray, max_lag: int) -> dict[str, float]:
    by_group: dict[int, set[float]] = {}
    for sample in batch:
        by_group.setdefault(sample.group, set()).add(sample.reward)
    lags = [
        (lag, span.end - span.start)
        for sample in batch
        for span, lag in zip(sample.trajectory.spans, sample.span_lags, strict=True)
    ]
    kept = [(lag, size) for lag, size in lags if lag <= max_lag]
    tokens = max(1, sum(size for _, size in kept))
    return {
        "reward_mean": float(np.mean([sample.reward for sample in batch])),
        "advantage_abs_mean": float(np.abs(advantages).mean()),
        "zero_variance_groups": float(sum(len(rewards) == 1 for rewards in by_group.values())),
        "lag_mean": sum(lag * size for lag, size in kept) / tokens,
        "lag_max": float(max((lag for lag, _ in kept), default=0)),
        "masked_tokens": float(sum(size for _, size in lags) - sum(size for _, size in kept)),
        "route_bytes_per_token": sum(s.trajectory.routes.nbytes for s in batch)
        / max(1, sum(len(s.trajectory.token_ids) for s in batch)),
    }
