"""An engine's replies, read: sizes, ids, spans and routes are checked, for until then a reply is hostile."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from headway.rollout_agent.model_shape import ModelShape
from headway.schemas import routes as routed
from headway.schemas.trajectory import Span, check_spans
from headway.schemas.version import Version
from headway.schemas.wire import NDArray

LOGPROB_SLACK = 1e-4
"""A log-probability above 0 by rounding is taken as 0; above this it is refused."""


Stop = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw. `seed` and a token's position decide it."""

    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A checked reply. N output tokens; R = prompt + N - 1 route rows; L layers with experts.

    `spans` are over output tokens; `route_spans` cover [0, R), or [start, R) as `routes` does where only the rows
    from `start` on were asked for. Routes are absent where the engine has none.
    """

    token_ids: list[int]
    logprobs: NDArray  # [N] f32
    spans: list[Span]
    routes: NDArray | None  # [R, L, k] u8 or u16, sentinel = dtype max
    route_spans: list[Span]
    stop: Stop
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How full an engine is. `tokens`: what running requests hold of its KV cache and waiting ones will need.

    `prefilled_tokens` counts since the engine's start, so a smaller one than before tells of another start.
    """

    running: int
    waiting: int
    tokens: int
    capacity_tokens: int
    prefilled_tokens: int

    @property
    def occupancy(self) -> float:
        """Above 1 while requests wait for room."""
        return self.tokens / self.capacity_tokens


def read_load(reply: dict[str, Any]) -> Load:
    """The sum over an engine's data-parallel ranks. Raises ValueError, KeyError or TypeError."""
    keys = (
        "num_running_reqs",
        "num_waiting_reqs",
        "num_total_tokens",
        "max_total_num_tokens",
        "total_prefill_uncached_tokens",
    )
    rows = [[rank[key] for key in keys] for rank in reply["loads"]]
    if not rows or not all(type(value) is int and value >= 0 for row in rows for value in row):
        raise ValueError("a load that is no count")
    running, waiting, tokens, capacity, prefilled = (sum(column) for column in zip(*rows, strict=True))
    if not capacity:
        raise ValueError("a KV cache of no tokens")
    return Load(running=running, waiting=waiting, tokens=tokens, capacity_tokens=capacity, prefilled_tokens=prefilled)


def read_completion(
    reply: dict[str, Any], prompt: Sequence[int], sampling: Sampling, shape: ModelShape, routes_from: int = 0
) -> Completion:
    """Check a reply to `generate`. Raises ValueError, KeyError or TypeError naming what is wrong."""
    ids, meta = reply["output_ids"], reply["meta_info"]
    if not isinstance(ids, list) or len(ids) > sampling.max_new_tokens:
        raise ValueError(f"output_ids is no list of at most {sampling.max_new_tokens}")
    if not all(type(t) is int and 0 <= t < shape.vocab_size for t in ids):
        raise ValueError("an output id outside the vocabulary")
    if meta["prompt_tokens"] != len(prompt) or meta["completion_tokens"] != len(ids):
        raise ValueError(f"the engine counts {meta['prompt_tokens']} + {meta['completion_tokens']} tokens")
    routes, route_spans = _routes(meta, routes_from, len(prompt) + len(ids) - 1, shape)
    spans = _spans(meta["weight_versions"], 0, len(ids))
    if routes is not None and not route_spans:
        last = Version.parse(meta["weight_version"])
        rows = _rows_of(spans, len(prompt), last, retracted=bool(meta.get("num_retractions")))
        route_spans = [s.model_copy(update={"start": max(s.start, routes_from)}) for s in rows if s.end > routes_from]
    return Completion(
        token_ids=ids,
        logprobs=_logprobs(meta["output_token_logprobs"], ids),
        spans=spans,
        routes=routes,
        route_spans=route_spans,
        stop=_stop(meta["finish_reason"], ids, sampling),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def _stop(reason: Any, ids: list[int], sampling: Sampling) -> Stop:
    kind = reason["type"]
    stopped = bool(ids) and ids[-1] in sampling.stop_ids
    if any(t in sampling.stop_ids for t in ids[:-1]) or (kind == "stop") != stopped:
        raise ValueError(f"finish_reason {kind!r} does not fit the stop tokens of the output")
    if kind == "length" and len(ids) != sampling.max_new_tokens:
        raise ValueError(f"finish_reason 'length' after {len(ids)} of {sampling.max_new_tokens} tokens")
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason {str(kind)[:40]!r}")
    found: Stop = kind
    return found


def _logprobs(entries: Any, ids: list[int]) -> NDArray:
    if not isinstance(entries, list) or [entry[1] for entry in entries] != ids:
        raise ValueError("output_token_logprobs names other ids than output_ids")
    values = [entry[0] for entry in entries]
    if not all(isinstance(v, float | int) and math.isfinite(v) and v <= LOGPROB_SLACK for v in values):
        raise ValueError("a log-probability that is none")
    return np.minimum(np.array(values, np.float32), np.float32(0))


def _spans(entries: Any, start: int, end: int) -> list[Span]:
    """Spans that cover [start, end) without a gap."""
    spans = [Span(start=e["start"], end=e["end"], version=e["version"]) for e in entries]
    check_spans(spans, end)
    if sum(span.end - span.start for span in spans) != end - start or (spans and spans[0].start != start):
        raise ValueError(f"version spans do not cover {start} to {end}")
    return spans


def _rows_of(spans: list[Span], prompt_tokens: int, last: Version, *, retracted: bool) -> list[Span]:
    """Which weights routed which row, where the engine (SGLang) doesn't say.

    Row prompt - 1 + i was computed for output token i, and the prompt's with the first; but a request that was
    retracted computed all of its rows again, with the weights of its last tokens.
    """
    if not spans:
        return [Span(start=0, end=prompt_tokens - 1, version=last)] if prompt_tokens > 1 else []
    before = prompt_tokens - 1
    if retracted:
        return [Span(start=0, end=before + spans[-1].end, version=spans[-1].version)]
    rows = [Span(start=before + s.start, end=before + s.end, version=s.version) for s in spans]
    return [rows[0].model_copy(update={"start": 0}), *rows[1:]]


def _routes(meta: dict[str, Any], start: int, end: int, shape: ModelShape) -> tuple[NDArray | None, list[Span]]:
    """Rows [start, end)."""
    if meta.get("routed_experts") is None:
        return None, []
    rows = end - start
    raw = base64.b64decode(meta["routed_experts"], validate=True)
    if len(raw) != 4 * rows * shape.layers * shape.top_k:
        raise ValueError(f"{len(raw)} bytes of routes for {rows} rows of {shape.layers} x {shape.top_k}")
    everywhere = np.frombuffer(raw, "<i4").reshape(rows, shape.layers, shape.top_k)
    packed = routed.from_engine(everywhere, list(shape.layer_map), shape.experts, shape.top_k)
    versions = meta.get("routed_experts_versions")
    return packed, _spans(versions, start, end) if versions is not None else []
