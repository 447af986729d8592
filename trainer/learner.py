"""One GRPO step: fp32 masters in, fp32 masters out, a pure function of (checkpoint, batch in order, config).

The forward runs through the rollout weights (the masters rounded or quantised, which is exactly what engines
serve) in the compute dtype; gradients go straight through the rounding to the masters (straight-through
estimator, Bengio et al. 2013). Nothing is written before the whole batch was computed and P7 held, so a failed
step leaves the state as it was.

Several ranks take a step together: micro-batches go round them, each adds the gradients of the tensors it owns in
the order of micro-batches, and updates these alone (ZeRO, arXiv:1910.02054). The bits are those of one rank.

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
from headway.kernels.quant import RolloutDtype, dequantise, to_rollout
from headway.kernels.router import balance_loss
from headway.kernels.weights import check_tensors, prepare
from headway.schemas.errors import HeadwayError
from headway.schemas.sections import GrpoConfig
from headway.trainer.agreement import Agreement, columns_of
from headway.trainer.batching import MicroBatch, Sample, micro_batches
from headway.trainer.checkpoint import Checkpoint
from headway.trainer.loss import LossParams, group_advantages, grpo_loss
from headway.trainer.mesh import Layout, Mesh
from headway.trainer.optim import MOMENTS, AdamW, Schedule, clip_by_norm, squared_norms
from headway.trainer.report import Report, exchange, summed

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
    """Owns the masters and Adam's moments, on several ranks each its share.

    All ranks then call `step`, `state` and `load_state` in the same order.
    """

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
        mesh: Mesh | None = None,
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
        self._mesh = mesh or Mesh()
        self._layout = Layout.of({name: tuple(w.shape) for name, w in masters.items()}, self._mesh.size)
        self._parts = [to_rollout({n: masters[n] for n in names}, rollout_dtype) for names in self._layout.owned]
        own = self._layout.owned[self._mesh.rank]
        self._masters = {name: masters[name].detach().float().clone() for name in own}
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
        """The weights that engines are to serve, as they load them. They never change: a step makes new ones."""
        return {name: w for part in self._parts for name, w in part.items()}

    def state(self, *, copied: bool = True) -> Checkpoint:
        """Everything the next step depends on: a copy, else the learner's own tensors, to be read before it goes on.

        Whole on rank 0; on another rank its share.
        """
        own = {"masters": self._masters} | self._adam.moments()
        found = {
            kind: {name: w.clone() if copied else w for name, w in self._mesh.collect(self._layout, share).items()}
            for kind, share in own.items()
        }
        return Checkpoint(
            masters=found.pop("masters"),
            moments={f"{kind}/{name}": w for kind, share in found.items() for name, w in share.items()},
            counters={"steps_done": self._steps_done},
        )

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Continue from `state()`'s result; on several ranks from rank 0's, the others need the counters alone.

        Raises ValueError or KeyError when it does not fit.
        """
        if self._mesh.rank == 0:
            check_tensors({name: tuple(w.shape) for name, w in checkpoint.masters.items()}, self._model)
        steps_done, own = checkpoint.counters["steps_done"], {}
        for kind in MOMENTS:
            whole = {name: checkpoint.moments[f"{kind}/{name}"] for name in checkpoint.masters}  # on rank 0
            own |= {f"{kind}/{name}": w for name, w in self._mesh.hand_out(self._layout, whole).items()}
        masters = self._mesh.hand_out(self._layout, checkpoint.masters)
        self._adam.load_state(own, steps_done)
        self._steps_done = steps_done
        for name, master in self._masters.items():
            master.copy_(masters[name])
        self._renew_weights()

    def _renew_weights(self) -> None:
        """Rounded from the masters, each rank its own, and passed on to the others."""
        parts = list(self._parts)
        parts[self._mesh.rank] = to_rollout(self._masters, self._rollout_dtype)
        self._parts = self._mesh.spread(parts)

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
        micros = micro_batches(batch, advantages, config.micro_batch_tokens, self._max_lag)
        grads, reports = self._accumulate(micros)
        agreement = Agreement(exact=self._exact, replay=self._replay)
        for report in reports:
            agreement.take(report.columns)
        agreement.check([sample.rollout_id for sample in batch])
        try:
            squares = self._mesh.merge(squared_norms(grads), sorted(self._layout.shapes))
            norm = clip_by_norm(grads, squares, config.clip_norm)
        except ValueError as error:
            raise HeadwayError(
                f"step {self._steps_done + 1} was not taken: {error}", hint="look for NaN in rewards or weights"
            ) from None
        rate = self._schedule.at(self._steps_done)
        self._adam.step(grads, rate)
        self._steps_done += 1
        self._renew_weights()
        tokens = _token_metrics(summed(reports))
        metrics = _batch_metrics(batch, advantages, self._max_lag) | tokens | agreement.metrics()
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
        return self._forward(self._plain_weights(), micro)

    def _plain_weights(self) -> dict[str, Tensor]:
        """What the forward computes with, f32, of all ranks' tensors."""
        return dequantise(self.rollout_weights(), torch.float32)

    def _accumulate(self, micros: Sequence[MicroBatch]) -> tuple[dict[str, Tensor], list[Report]]:
        """The summed gradients of the tensors this rank owns, and the reports of all micro-batches."""
        mesh, weights = self._mesh, self._plain_weights()
        sums = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        reports: dict[int, Report] = {}
        failure: Exception | None = None
        for first in range(0, len(micros), mesh.size):
            now, found = micros[first : first + mesh.size], None
            if mesh.rank < len(now) and failure is None:
                try:
                    found, reports[first + mesh.rank] = self._gradients(weights, now[mesh.rank])
                except Exception as error:  # of any type: the other ranks wait for this one
                    failure = error
            mesh.add_in_order(self._layout, sums, found, [micro.learns for micro in now])
        return sums, exchange(mesh, reports, failure)

    def _gradients(self, weights: Mapping[str, Tensor], micro: MicroBatch) -> tuple[dict[str, Tensor] | None, Report]:
        """The micro-batch's gradients, None when it does not learn, and its report."""
        with torch.set_grad_enabled(micro.learns):
            leaves = {name: w.detach().requires_grad_(micro.learns) for name, w in weights.items()}
            current_N, entropy_N, out = self._forward(leaves, micro)
            columns = columns_of(micro, current_N.detach(), out)
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
                return None, Report(sums=parts.sums, columns=columns)
            loss = parts.loss
            if self._config.balance_loss:
                loss = loss + self._config.balance_loss * self._imbalance(micro, out)
            found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        sums = parts.sums | {"loss": float(parts.loss.detach())}
        return dict(zip(leaves, found, strict=True)), Report(sums=sums, columns=columns)

    def _imbalance(self, micro: MicroBatch, out: Output) -> Tensor:
        """The balance loss, weighted like a token's in the policy loss, so that micro-batches add up."""
        weight = len(micro.targets_N) / self._config.token_budget
        return balance_loss(out.router_scores, self._model.num_experts_per_tok) * weight

    def _forward(self, weights: Mapping[str, Tensor], micro: MicroBatch) -> tuple[Tensor, Tensor, Output]:
        prepared = prepare(weights, self._model, self._compute_dtype)
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
