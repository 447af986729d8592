"""P7: do the log-probabilities that a rollout recorded equal those the trainer computes?

Tokens of lag 0 were sampled by the very weights of this step, so on the local engine they must agree bit
for bit, routes included; for older tokens the difference is the policy's own movement and is only measured.

Shapes: N sampled tokens, L MoE layers, k experts a token. A token's routes are those of the row before it,
whose forward sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headway.kernels.decoder import Output
from headway.schemas.errors import PromiseViolated
from headway.trainer.batching import MicroBatch

EXTREME_RATIO = 2.0
"""A token whose probability grew or shrank by more than this factor counts as extreme."""
GAP_NATS_MAX = 50.0
"""Ratios and k3 are computed as if no gap were wider: what an agent wrote must not overflow."""
LAYERS_REPORTED_MAX = 64
"""Layers above have no metric of their own; their flips are in `…_flipped_fraction`."""


class Disagreement(PromiseViolated):
    """P7 does not hold for some rollouts of a batch.

    details: rollout id -> what differs, in batch order. agreeing: the ids of those with tokens of lag 0 that all agree.
    """

    def __init__(self, details: dict[str, str], agreeing: frozenset[str], tokens: int) -> None:
        self.details, self.agreeing = details, agreeing
        first = next(iter(details))
        super().__init__(
            f"P7: rollout {first} {details[first]} ({tokens} such tokens in {len(details)} rollouts of the batch)",
            why="the version that trains sampled this token, so engine and trainer computed it differently",
            hint="compare the engine's and the trainer's `headway doctor`: build, threads, compute dtype; "
            "or begin a run with engine.numerics = replay",
        )


class Agreement:
    """Collects micro-batches, then judges. `exact`: a mismatch at lag 0 violates P7. `replay`: routes were replayed."""

    def __init__(self, *, exact: bool, replay: bool = False) -> None:
        self._exact, self._replay = exact, replay
        self._columns: dict[str, list[Tensor]] = {}

    def add(self, micro: MicroBatch, current_N: Tensor, out: Output) -> None:
        """current_N f32 [N], and what the forward of the micro-batch returned."""
        self.take(columns_of(micro, current_N, out))

    def take(self, columns: Mapping[str, Tensor]) -> None:
        """What `columns_of` made of a micro-batch, of the next one in order."""
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column)

    def check(self, rollout_ids: Sequence[str]) -> None:
        """Raises Disagreement with the first unequal token of each rollout."""
        if not self._exact or not self._columns:
            return
        column = {name: torch.cat(parts) for name, parts in self._columns.items()}
        moved_N, fresh_N = column["moved"].any(dim=1), column["lag"] == 0
        bad_N = fresh_N & ((_bits(column["current"]) != _bits(column["recorded"])) | moved_N)
        bad = bad_N.nonzero().flatten().tolist()
        if not bad:
            return
        bad.sort(key=lambda n: (int(column["sample"][n]), int(column["place"][n])))
        details: dict[str, str] = {}
        for n in bad:
            recorded, current = float(column["recorded"][n]), float(column["current"][n])
            details.setdefault(
                rollout_ids[int(column["sample"][n])],
                f"token {int(column['place'][n])}: recorded log-probability {recorded!r}, recomputed {current!r}, "
                f"routes {'differ' if moved_N[n] else 'agree'}",
            )
        fresh = {rollout_ids[i] for i in column["sample"][fresh_N].unique().tolist()}
        raise Disagreement(details, frozenset(fresh - details.keys()), len(bad))

    def metrics(self) -> dict[str, float]:
        """Counts, differences in nats, ratios and fractions, of tokens with lag 0 and of older ones (`stale_`)."""
        if not self._columns:
            return {}
        column = {name: torch.cat(parts) for name, parts in self._columns.items()}
        fresh_N = column["lag"] == 0
        found = {
            "lag0_swapped_tokens": float((fresh_N & column["swapped"]).sum()),
            "unrouted_tokens": float((~column["known"].all(dim=1)).sum()),
        }
        for name, part_N in (("lag0", fresh_N), ("stale", ~fresh_N)):
            part = {key: value[part_N] for key, value in column.items()}
            found |= {f"{name}_{key}": value for key, value in self._part(part).items()}
        return found

    def _part(self, column: dict[str, Tensor]) -> dict[str, float]:
        differences = mismatch(column["current"], column["recorded"])
        flipped_NL, known_NL = column["flipped"], column["known"]
        flipped_N = flipped_NL.any(dim=1)
        routed = {
            "flipped_fraction": _mean(flipped_N.double()),
            "order_only_fraction": _mean((column["moved"].any(dim=1) & ~flipped_N).double()),
        }
        if self._replay:
            routed["fallback_fraction"] = _mean((~known_NL).double())
            routed["filtered_fraction"] = _mean(column["filtered"].double())
        for layer in range(min(flipped_NL.shape[1], LAYERS_REPORTED_MAX)):
            routed[f"flipped_fraction_layer_{layer}"] = _mean(flipped_NL[known_NL[:, layer], layer].double())
            if self._replay:
                routed[f"filtered_fraction_layer_{layer}"] = _mean(column["filtered"][:, layer].double())
        return differences | routed


def columns_of(micro: MicroBatch, current_N: Tensor, out: Output) -> dict[str, Tensor]:
    """By token, what was recorded and what is now. current_N f32 [N]; `out` is what the forward returned."""
    used_NLk, live_NLk = (routes.flatten(0, 1)[micro.rows_N] for routes in (out.routes, out.live))
    recorded_NLk = torch.full_like(used_NLk, -1)
    if micro.routes_BTLk is not None:
        recorded_NLk = micro.routes_BTLk.flatten(0, 1)[micro.rows_N]
    known_NL = (recorded_NLk >= 0).all(dim=2)
    return {
        "current": current_N,
        "recorded": micro.behaviour_N,
        "lag": micro.lag_N,
        "swapped": micro.swapped_N,
        "sample": micro.sample_N,
        "place": micro.place_N,
        "known": known_NL,
        "moved": known_NL & (recorded_NLk != live_NLk).any(dim=2),
        "flipped": known_NL & (recorded_NLk.sort(2).values != live_NLk.sort(2).values).any(dim=2),
        "filtered": known_NL & (recorded_NLk != used_NLk).any(dim=2),
    }


def mismatch(current_N: Tensor, recorded_N: Tensor) -> dict[str, float]:
    """How far the log-probabilities of sampled tokens are apart: nats, fractions; no token gives the best values.

    k1 and k3 estimate KL(who sampled || who trains) (Schulman, "Approximating KL Divergence", 2020); ess is the
    effective sample size of the ratios as a fraction of the tokens (Kish).
    """
    gap_N = current_N.double() - recorded_N.double()
    bounded_N = gap_N.clamp(-GAP_NATS_MAX, GAP_NATS_MAX)
    ratio_N = bounded_N.exp()
    extreme_N = (ratio_N > EXTREME_RATIO) | (ratio_N < 1 / EXTREME_RATIO)
    squares = float((ratio_N**2).mean()) if len(ratio_N) else 0.0
    return {
        "tokens": float(len(gap_N)),
        "diff_mean": _mean(gap_N.abs()),
        "diff_max": float(gap_N.abs().max()) if len(gap_N) else 0.0,
        "k1": _mean(-gap_N),
        "k3": _mean(bounded_N.expm1() - bounded_N),
        "equal_fraction": _mean((_bits(current_N) == _bits(recorded_N)).double(), empty=1.0),
        "extreme_fraction": _mean(extreme_N.double()),
        "ess": float(ratio_N.mean()) ** 2 / squares if squares > 0 else 1.0,
    }


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.int32)


def _mean(value: Tensor, empty: float = 0.0) -> float:
    return float(value.mean()) if len(value) else empty
