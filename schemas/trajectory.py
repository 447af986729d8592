"""What an engine saw and sampled in one rollout: tokens, their log-probabilities, versions and routes.

Shapes: T tokens of a trajectory (of all its segments), L MoE layers, k experts per token. Token index t counts
from 0; the log-probability at t is log p(token t | tokens < t, of its segment); route row t belongs to the input
token t, so the last token has none.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from headway.schemas.version import VersionField
from headway.schemas.wire import Float32Array, Int32Array, Model, RouteArray, UInt8Array

TOKENS_MAX = 1 << 20
SPANS_MAX = 4096
TURNS_MAX = 4096
SEGMENTS_MAX = 64

Count = Annotated[int, Field(ge=0)]
StopReason = Literal["submitted", "malformed", "turn_limit", "length", "deadline", "aborted"]
"""Why a session ended: `length` is a full context, `turn_limit` no turns (or calls) left, `deadline` no time left."""
TurnStop = Literal["stop", "length", "context", "aborted"]
"""Why a turn ended: a stop token, its limit of tokens, a full context, or the engine gave it up."""


class Span(Model):
    """Tokens [start, end) that one weight version wrote."""

    start: Count
    end: Count
    version: VersionField

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"span [{self.start}, {self.end}) is empty")
        return self


def check_spans(spans: list[Span], limit: int) -> None:
    """Spans must ascend without overlap and end within `limit`. Raises ValueError."""
    at = 0
    for span in spans:
        if span.start < at:
            raise ValueError(f"span [{span.start}, {span.end}) overlaps or goes back")
        at = span.end
    if at > limit:
        raise ValueError(f"spans reach {at}, past the end at {limit}")


def span_cover(spans: list[Span], length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each index of [0, length) the number of its span, -1 where there is none. int64 [length]."""
    cover = np.full(length, -1, np.int64)
    for number, span in enumerate(spans):
        cover[span.start : span.end] = number
    return cover


class Trajectory(Model):
    """What an engine saw and sampled in one rollout, token in, token out."""

    token_ids: Int32Array
    loss_mask: UInt8Array
    logprobs: Float32Array
    spans: Annotated[list[Span], Field(max_length=SPANS_MAX)]
    routes: RouteArray
    route_spans: Annotated[list[Span], Field(max_length=SPANS_MAX)]
    layer_map: Annotated[list[Count], Field(max_length=1024)]
    temperature: Annotated[float, Field(ge=0.0, le=10.0)]
    """0 is greedy decoding: evaluation only, never trained on."""
    turns: Annotated[int, Field(ge=0, le=TURNS_MAX)]
    stop_reason: StopReason
    turn_stops: Annotated[list[TurnStop], Field(max_length=TURNS_MAX)] = Field(default_factory=list)
    """Of each turn, in order; empty where an earlier agent wrote it."""
    segments: Annotated[list[Count], Field(max_length=SEGMENTS_MAX - 1)] = Field(default_factory=list)
    """Where segments after the first begin; see `parts`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        tokens = len(self.token_ids)
        if not 1 <= tokens <= TOKENS_MAX:
            raise ValueError(f"{tokens} tokens")
        if len(self.loss_mask) != tokens or len(self.logprobs) != tokens:
            raise ValueError("token_ids, loss_mask and logprobs differ in length")
        mask, logprobs = self.loss_mask, self.logprobs
        if self.segments:
            self._check_segments(tokens)
        check_spans(self.spans, tokens)
        sampled = np.zeros(tokens, np.uint8)
        for span in self.spans:
            sampled[span.start : span.end] = 1
        if mask[0] or sampled.tobytes() != mask.tobytes():
            if mask[0] or (mask > 1).any():
                raise ValueError("loss_mask is 0 or 1 and the first token is never sampled")
            raise ValueError("the version spans do not cover exactly the sampled tokens")
        if np.minimum.reduce(self.token_ids) < 0:
            raise ValueError("negative token id")
        if np.maximum.reduce(logprobs) > 0 or np.count_nonzero(logprobs[mask == 0]):
            raise ValueError("a log-probability is at most 0, and 0 where the mask is 0")
        self._check_routes(tokens)
        return self

    def parts(self) -> list[tuple[int, int]]:
        """[start, end) of each segment.

        Each is a sequence of its own: its first token follows nothing. A session that went on from a summary has more
        than one; the summary is the end of the segment that it was sampled in, and is repeated, without loss, in the
        next. Places, spans and rows count through all of them; the row of a segment's last token is missing.
        """
        return list(itertools.pairwise([0, *self.segments, len(self.token_ids)]))

    def _check_segments(self, tokens: int) -> None:
        if any(b <= a for a, b in itertools.pairwise([0, *self.segments, tokens])):
            raise ValueError(f"segments {self.segments[:8]} of {tokens} tokens do not ascend")
        if any(self.loss_mask[at] or not self.loss_mask[at - 1] for at in self.segments):
            raise ValueError("a segment ends with what was sampled and begins with what was not")

    def _check_routes(self, tokens: int) -> None:
        if self.routes.size == 0 and not self.route_spans:
            return  # an engine without route capture: the trainer routes live and counts it
        try:
            if self.routes.shape[:2] != (tokens - 1, len(self.layer_map)):
                raise ValueError(f"routes are {self.routes.shape}, not ({tokens - 1}, {len(self.layer_map)}, k)")
            check_spans(self.route_spans, tokens - 1)
            if (span_cover(self.route_spans, tokens - 1) < 0).any():
                raise ValueError("route row versions do not cover every row")
            if any((self.routes[at - 1] != np.iinfo(self.routes.dtype).max).any() for at in self.segments):
                raise ValueError("the last token of a segment is no input, so nothing routed it")
        except ValueError as error:
            raise PydanticCustomError("bad_routes", "{why}", {"why": str(error)}) from None
