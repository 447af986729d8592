"""A rollout's recorded log-probabilities against those of the very weights that sampled each span (P7 at any lag).

On the local engine they agree bit for bit, routes included, since a span's prefix was computed by the span's own
weights (swap modes retract and finish). With `in_place` a kept prefix is older, so there only the difference counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.kernels.config import ModelConfig
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.numerics import FAST, INVARIANT
from headway.kernels.quant import dequantise
from headway.kernels.weights import prepare
from headway.schemas.config import Config
from headway.schemas.trajectory import Span, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanScore:
    """One span under its own weights. `first_unequal` is the index of the first token that differs, -1 if none."""

    span: Span
    equal_tokens: int
    first_unequal: int
    recorded: float
    recomputed: float
    diff_max: float
    routes_differ: int

    @property
    def tokens(self) -> int:
        return self.span.end - self.span.start

    @property
    def exact(self) -> bool:
        return self.equal_tokens == self.tokens and self.routes_differ == 0


@torch.no_grad()
def rescore(
    weights: Mapping[str, Tensor], model: ModelConfig, config: Config, trajectory: Trajectory, span: Span
) -> SpanScore:
    """`weights` are those of `span.version` as engines load them."""
    dtype = getattr(torch, config.model.compute_dtype)
    kernels = INVARIANT if config.engine.numerics == "bitwise" else FAST
    prepared = prepare(dequantise(weights, torch.float32), model, dtype)
    begin = max(start for start, _ in trajectory.parts() if start <= span.start)
    inputs_BT = torch.from_numpy(trajectory.token_ids[begin : span.end - 1].astype(np.int64))[None]
    out = forward_full(prepared, model, inputs_BT, torch.tensor([span.end - 1 - begin]), kernels)
    places_N = torch.arange(span.start, span.end)
    targets_N = torch.from_numpy(trajectory.token_ids[span.start : span.end].astype(np.int64))
    heat = trajectory.temperature or 1.0  # greedy sessions are scored at temperature 1
    now_N, _ = token_logprob(prepared, out.hidden[0].index_select(0, places_N - begin - 1), targets_N, heat, kernels)
    recorded_N = torch.from_numpy(trajectory.logprobs[span.start : span.end].astype(np.float32))
    unequal = (now_N.view(torch.int32) != recorded_N.view(torch.int32)).nonzero().flatten().tolist()
    first = unequal[0] if unequal else -1
    return SpanScore(
        span=span,
        equal_tokens=len(places_N) - len(unequal),
        first_unequal=span.start + first if unequal else -1,
        recorded=float(recorded_N[first]) if unequal else 0.0,
        recomputed=float(now_N[first]) if unequal else 0.0,
        diff_max=float((now_N.double() - recorded_N.double()).abs().max()),
        routes_differ=_routes_differ(trajectory, span, begin, out.routes[0]),
    )


def _routes_differ(trajectory: Trajectory, span: Span, begin: int, routes_TLk: Tensor) -> int:
    """How many of the rows that the span's version routed took other experts than recorded.

    `routes_TLk` are of the segment that begins at `begin`.
    """
    if not trajectory.routes.size:
        return 0
    taken = routes_TLk.numpy()
    differ = 0
    for part in trajectory.route_spans:
        if part.version == span.version:
            rows = slice(max(part.start, begin), max(min(part.end, span.end - 1), begin))
            recorded = trajectory.routes[rows].astype(np.int64)
            known = recorded != np.iinfo(trajectory.routes.dtype).max
            differ += int(((recorded != taken[rows.start - begin : rows.stop - begin]) & known).any(axis=(1, 2)).sum())
    return differ
