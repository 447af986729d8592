"""A session's tokens: what the next prompt is, and in the end the trajectory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.rollout_agent.client import Completion
from headway.rollout_agent.model_shape import ModelShape
from headway.schemas.errors import PromiseViolated
from headway.schemas.trajectory import TOKENS_MAX, Span, StopReason, Trajectory, TurnStop
from headway.schemas.wire import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """[start, end) of a segment with its routes, None where nobody recorded them, and their spans over its rows."""

    start: int
    end: int
    routes: NDArray | None
    route_spans: list[Span]


@dataclass(slots=True, kw_only=True)
class Recorder:
    """`ids` is every token so far; `mask` and `logprobs` run beside it. A turn is a run of sampled tokens.

    `start` is where the present segment begins, which is what the engine is shown; `closed` are those before it.
    """

    ids: list[int]
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turns: int = 0
    routes: NDArray | None = None
    route_spans: list[Span] = field(default_factory=list)
    stops: list[TurnStop] = field(default_factory=list)
    start: int = 0
    closed: list[_Segment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pad()

    @classmethod
    def resumed(cls, saved: Trajectory) -> Recorder:
        *before, (start, _) = saved.parts()
        return cls(
            ids=saved.token_ids.tolist(),
            mask=saved.loss_mask.tolist(),
            logprobs=saved.logprobs.tolist(),
            spans=list(saved.spans),
            turns=saved.turns,
            stops=list(saved.turn_stops),
            start=start,
            closed=[_Segment(start=a, end=b, routes=None, route_spans=[]) for a, b in before],
        )

    @property
    def prompt(self) -> list[int]:
        """What the next prompt will be."""
        return self.ids[self.start :]

    def add(self, prompt: Sequence[int], completion: Completion, *, context_tokens_max: int = TOKENS_MAX) -> None:
        """A completion of `prompt`, a turn's or its rest. Raises PromiseViolated when the prompt forks the session."""
        if list(prompt) != self.prompt:
            raise PromiseViolated("a turn's prompt is not the previous prompt, completion and observation")
        at, sampled = len(self.ids), len(completion.token_ids)
        if self.mask[-1]:
            self.stops = self.stops[:-1]  # of the part before: it is one turn
        else:
            self.turns += 1
        self.stops = [*self.stops, _stop(completion, full=len(prompt) + sampled >= context_tokens_max)]
        self.ids = [*self.ids, *completion.token_ids]
        self.mask += [1] * sampled
        self.logprobs += completion.logprobs.tolist()
        self.spans += [Span(start=at + s.start, end=at + s.end, version=s.version) for s in completion.spans]
        self.routes, self.route_spans = completion.routes, completion.route_spans

    def restart(self, opening: Sequence[int]) -> None:
        """Begin a new segment; the present one ends with what was just sampled."""
        assert self.mask[-1], "a segment ends with what was sampled"
        self.closed = [*self.closed, self._present(len(self.ids))]
        self.start, self.routes, self.route_spans = len(self.ids), None, []
        self.observe(opening)

    def observe(self, ids: Sequence[int]) -> None:
        self.ids = [*self.ids, *ids]
        self._pad()

    def line(self) -> list[int]:
        """What was sampled since the last observation."""
        unsampled = next((n for n, sampled in enumerate(reversed(self.mask)) if not sampled), len(self.mask))
        return self.ids[len(self.ids) - unsampled :]

    def exchanges(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Each turn that was answered: the tokens of its segment with it, the turn, and what answered it.

        A summary's answer is the opening of the next segment.
        """
        starts = [*(segment.start for segment in self.closed), self.start]
        edges = [0, *(np.flatnonzero(np.diff(self.mask)) + 1).tolist(), len(self.ids)]
        for begin, end, answered in zip(edges[1::2], edges[2::2], edges[3::2], strict=False):
            start = max(at for at in starts if at < end)
            yield end - start, self.ids[begin:end], self.ids[end:answered]

    def trajectory(self, shape: ModelShape, temperature: float, stop_reason: StopReason) -> Trajectory:
        """Everything up to the last sampled token, with the routes of the last forward.

        Without routes when nothing was sampled since the session was resumed: the trainer then routes live.
        """
        last = len(self.mask) - self.mask[::-1].index(1)
        return self._trajectory(last, shape, temperature, stop_reason, with_routes=True)

    def saved(self, shape: ModelShape, temperature: float) -> Trajectory:
        """Everything so far, the last observation included, without routes."""
        return self._trajectory(len(self.ids), shape, temperature, "aborted", with_routes=False)

    def _trajectory(
        self, end: int, shape: ModelShape, temperature: float, stop_reason: StopReason, *, with_routes: bool
    ) -> Trajectory:
        parts = [part for part in (*self.closed, self._present(end)) if part.start < end]
        routes, route_spans = _joined(parts, self.spans, shape) if with_routes else (None, [])
        return Trajectory(
            token_ids=np.array(self.ids[:end], np.int32),
            loss_mask=np.array(self.mask[:end], np.uint8),
            logprobs=np.array(self.logprobs[:end], np.float32),
            spans=self.spans,
            routes=np.zeros((0, len(shape.layer_map), shape.top_k), np.uint8) if routes is None else routes,
            route_spans=route_spans,
            layer_map=list(shape.layer_map),
            temperature=temperature or 1.0,
            turns=self.turns,
            stop_reason=stop_reason,
            segments=[part.start for part in parts[1:]],
            turn_stops=self.stops if len(self.stops) == self.turns else [],
        )

    def _present(self, end: int) -> _Segment:
        return _Segment(start=self.start, end=end, routes=self.routes, route_spans=self.route_spans)

    def _pad(self) -> None:
        more = len(self.ids) - len(self.mask)
        self.mask += [0] * more
        self.logprobs += [0.0] * more


def _stop(completion: Completion, *, full: bool) -> TurnStop:
    if completion.stop == "length":
        return "context" if full else "length"
    return "stop" if completion.stop == "stop" else "aborted"


def _joined(parts: list[_Segment], spans: list[Span], shape: ModelShape) -> tuple[NDArray | None, list[Span]]:
    """The rows of all segments, with a missing one between two, and their versions; None where none has any."""
    known = [part.routes for part in parts if part.routes is not None]
    if not known:
        return None, []
    rows, found = [], list[Span]()
    for part in parts:
        last = part is parts[-1]
        count = part.end - part.start - 1
        width = (len(shape.layer_map), shape.top_k)
        missing = np.iinfo(known[0].dtype).max
        rows.append(np.full((count, *width), missing, known[0].dtype) if part.routes is None else part.routes)
        if not last:
            rows.append(np.full((1, *width), missing, known[0].dtype))
        newest = [span.version for span in spans if span.end <= part.end][-1]
        own = part.route_spans if part.routes is not None else []
        moved = [Span(start=part.start + s.start, end=part.start + s.end, version=s.version) for s in own]
        at, end = moved[-1].end if moved else part.start, part.end - int(last)
        if at < end:
            moved.append(Span(start=at, end=end, version=moved[-1].version if moved else newest))
        found += moved
    return np.concatenate(rows), found
