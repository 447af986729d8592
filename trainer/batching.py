"""From trajectories to padded micro-batches of fixed composition.

A sequence is one segment of a rollout, and nearly always all of it.
Shapes: B sequences of a micro-batch, T padded input tokens, N sampled tokens, L MoE layers, k experts a token.

Which sequences share a micro-batch, and in which order their tokens are summed, is a pure function of the
batch's order and lengths: those of rollouts that learn come first, then those of advantage 0 (which only need a
forward); each part is sorted by length, ties by place in the batch, and filled up to a token limit.
The last token of a sequence is never an input, as nothing comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.schemas.errors import PromiseViolated
from headway.schemas.trajectory import Span, Trajectory, span_cover
from headway.schemas.version import Version
from headway.schemas.vocab import PAD

ABANDONED_LAG = 1 << 30
"""The lag of a token whose version is no ancestor of the trainer's: above every max_lag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One graded rollout of a batch. span_lags, route_lags: of each of `trajectory.spans` and `.route_spans`."""

    rollout_id: str
    group: int
    reward: float
    trajectory: Trajectory
    span_lags: tuple[int, ...]
    route_lags: tuple[int, ...] = ()
    """Empty: as young as the tokens."""

    def __post_init__(self) -> None:
        if len(self.span_lags) != len(self.trajectory.spans) or not self.trajectory.spans:
            raise ValueError(f"{self.rollout_id}: {len(self.span_lags)} lags, {len(self.trajectory.spans)} spans")
        if self.route_lags and len(self.route_lags) != len(self.trajectory.route_spans):
            raise ValueError(f"{self.rollout_id}: {len(self.route_lags)} lags of route spans")
        if min(self.span_lags + self.route_lags) < 0:
            raise PromiseViolated(
                f"{self.rollout_id} was sampled by a version newer than the trainer's: lags {self.span_lags}"
            )

    def token_lags(self) -> np.ndarray:
        """int64 [T], -1 where a token was not sampled."""
        trajectory = self.trajectory
        cover = span_cover(trajectory.spans, len(trajectory.token_ids))
        return np.where(cover < 0, -1, np.asarray(self.span_lags)[cover])

    def routes(self, max_lag: int) -> np.ndarray | None:
        """Expert ids int64 [T - 1, L, k], -1 in rows that nobody recorded or that are older than max_lag."""
        trajectory = self.trajectory
        if not trajectory.routes.size:
            return None
        missing = trajectory.routes == np.iinfo(trajectory.routes.dtype).max
        for span, lag in zip(trajectory.route_spans, self.route_lags, strict=bool(self.route_lags)):
            missing[span.start : span.end] |= lag > max_lag
        return np.where(missing, -1, trajectory.routes.astype(np.int64))

    def counts(self, max_lag: int) -> tuple[int, int]:
        """(tokens within max_lag, tokens masked because they are older)."""
        sizes = [(span.end - span.start, lag) for span, lag in zip(self.trajectory.spans, self.span_lags, strict=True)]
        kept = sum(size for size, lag in sizes if lag <= max_lag)
        return kept, sum(size for size, _ in sizes) - kept


def span_lags(spans: Sequence[Span], head: Version, is_ancestor: Callable[[Version], bool]) -> tuple[int, ...]:
    """Lag of each span under the trainer's version `head`: head.n - span.n, or ABANDONED_LAG off its line."""
    return tuple(head.n - span.version.n if is_ancestor(span.version) else ABANDONED_LAG for span in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one forward takes.

    token_ids_BT i64 right-padded; lengths_B i64; routes_BTLk i64 or None, -1 where there is none (`Sample.routes`);
    rows_N i64, the flat place in B*T of the input before each sampled token; targets_N i64, the sampled
    tokens; behaviour_N, advantage_N, temperature_N f32; lag_N i64; swapped_N bool, True where an earlier
    span of the sequence has another version; sample_N i64, the rollout's place in the batch; place_N i64,
    the token's index in its rollout. `learns` is False when every advantage is 0.
    """

    learns: bool
    members: tuple[int, ...]
    """The rollouts, by place in the batch, in the order of the rows; one for each of its segments here."""
    token_ids_BT: Tensor
    lengths_B: Tensor
    routes_BTLk: Tensor | None
    rows_N: Tensor
    targets_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    temperature_N: Tensor
    lag_N: Tensor
    swapped_N: Tensor
    sample_N: Tensor
    place_N: Tensor


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Tokens [start, end) of the batch's rollout number `sample`."""

    sample: int
    start: int
    end: int

    @property
    def inputs(self) -> int:
        return self.end - self.start - 1


def plan(input_tokens: Sequence[int], learns: Sequence[bool], tokens_max: int) -> list[list[int]]:
    """Which sequences (by place) form each micro-batch of at most `tokens_max` padded tokens.

    One above `tokens_max` gets a micro-batch of its own.
    """
    order = sorted(range(len(input_tokens)), key=lambda i: (not learns[i], input_tokens[i], i))
    parts: list[list[int]] = []
    for i in order:
        fits = parts and (len(parts[-1]) + 1) * input_tokens[i] <= tokens_max
        if fits and learns[parts[-1][0]] == learns[i]:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def micro_batches(
    samples: Sequence[Sample], advantages: np.ndarray, tokens_max: int, max_lag: int = ABANDONED_LAG - 1
) -> list[MicroBatch]:
    """The batch as micro-batches, in the order in which their gradients are to be added up."""
    sequences = [_Sequence(i, *part) for i, sample in enumerate(samples) for part in sample.trajectory.parts()]
    learns = [bool(advantages[one.sample] != 0) for one in sequences]
    parts = plan([one.inputs for one in sequences], learns, tokens_max)
    return [_assemble(samples, [sequences[n] for n in part], advantages, learns[part[0]], max_lag) for part in parts]


def _assemble(
    samples: Sequence[Sample], part: list[_Sequence], advantages: np.ndarray, learns: bool, max_lag: int
) -> MicroBatch:
    width = max(one.inputs for one in part)
    token_ids = np.full((len(part), width), PAD, np.int64)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
    routes: list[np.ndarray | None] = []
    for b, one in enumerate(part):
        sample = samples[one.sample]
        trajectory, inputs = sample.trajectory, slice(one.start, one.end - 1)
        token_ids[b, : one.inputs] = trajectory.token_ids[inputs]
        place = np.flatnonzero(trajectory.loss_mask[one.start : one.end]) + one.start
        own = [span.version if span.start >= one.start else None for span in trajectory.spans]
        swapped = np.asarray([any(v not in (None, version) for v in own[:s]) for s, version in enumerate(own)])
        cover = span_cover(trajectory.spans, len(trajectory.token_ids))
        full = np.full(len(place), 1.0)
        columns["rows"].append(b * width + place - one.start - 1)
        columns["targets"].append(trajectory.token_ids[place])
        columns["behaviour"].append(trajectory.logprobs[place])
        columns["advantage"].append(full * advantages[one.sample])
        columns["temperature"].append(full * trajectory.temperature)
        columns["lag"].append(sample.token_lags()[place])
        columns["swapped"].append(swapped[cover[place]])
        columns["sample"].append(np.full(len(place), one.sample))
        columns["place"].append(place)
        recorded = sample.routes(max_lag)
        routes.append(None if recorded is None else recorded[inputs])
    joined = {
        f"{name}_N": torch.from_numpy(np.concatenate(columns[name]).astype(dtype)) for name, dtype in _COLUMNS.items()
    }
    return MicroBatch(
        learns=learns,
        members=tuple(one.sample for one in part),
        token_ids_BT=torch.from_numpy(token_ids),
        lengths_B=torch.tensor([one.inputs for one in part]),
        routes_BTLk=_routes(routes, width),
        **joined,
    )


_COLUMNS = {
    "rows": np.int64,
    "targets": np.int64,
    "behaviour": np.float32,
    "advantage": np.float32,
    "temperature": np.float32,
    "lag": np.int64,
    "swapped": np.bool_,
    "sample": np.int64,
    "place": np.int64,
}


def _routes(recorded: list[np.ndarray | None], width: int) -> Tensor | None:
    shapes = {rows.shape[1:] for rows in recorded if rows is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"recorded routes of one batch differ in layers or experts a token: {sorted(shapes)}")
    routes = np.full((len(recorded), width, *shapes.pop()), -1, np.int64)
    for b, rows in enumerate(recorded):
        if rows is not None:
            routes[b, : len(rows)] = rows
    return torch.from_numpy(routes)
