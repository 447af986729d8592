"""Rows of routes that a session holds already, so that a turn's reply need only carry the new ones.

A prompt is the last prompt, what was sampled and an observation: under the same weights the same engine routes the
rows before as it did. Without this every turn would bring the rows of the whole session again, which for a long one
of a large model is tens of megabytes.
Invariant: rows are put together only where one version routed all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.rollout_agent.replies import Completion
from headway.schemas.trajectory import Span
from headway.schemas.version import Version
from headway.schemas.wire import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRoutes:
    """`routes` [R, L, k] of the tokens `ids` [R], all by `version` in `engine`."""

    engine: object
    ids: list[int]
    routes: NDArray
    version: Version

    @classmethod
    def of(cls, engine: object, prompt: Sequence[int], whole: Completion) -> KnownRoutes | None:
        """What a completion with all its rows leaves to the next turn."""
        versions = {span.version for span in whole.route_spans}
        if whole.routes is None or len(versions) != 1 or _is_unknown(whole.routes[0]):
            return None
        ids = [*prompt, *whole.token_ids][: len(whole.routes)]
        return cls(engine=engine, ids=ids, routes=whole.routes, version=versions.pop())

    def rows_for(self, engine: object, serves: str | None, prompt: Sequence[int]) -> int:
        """How many rows of `prompt` need not be sent by an engine that serves the version `serves`."""
        same = engine is self.engine and serves == str(self.version)
        return len(self.ids) if same and list(prompt[: len(self.ids)]) == self.ids else 0

    def fits(self, new: Completion) -> bool:
        """Whether nothing else than `version` has routed since; a swap may have come in between."""
        return {span.version for span in new.route_spans} <= {self.version}

    @property
    def spans(self) -> list[Span]:
        return [Span(start=0, end=len(self.ids), version=self.version)]


def joined(routes: NDArray, spans: Sequence[Span], new: Completion) -> Completion:
    """`new` with the rows [0, len(routes)) before its own, and whose they are."""
    if new.routes is None:
        return new
    rows = len(routes)
    before = [s if s.end <= rows else s.model_copy(update={"end": rows}) for s in spans if s.start < rows]
    merged: list[Span] = []
    for span in (*before, *new.route_spans):
        if merged and merged[-1].version == span.version:
            merged[-1] = merged[-1].model_copy(update={"end": span.end})
        else:
            merged.append(span)
    return dataclasses.replace(new, routes=np.concatenate([routes, new.routes]), route_spans=merged)


def unknown(rows: int, new: Completion) -> NDArray:
    """Rows that nobody recorded: the trainer routes them itself."""
    assert new.routes is not None
    return np.full((rows, *new.routes.shape[1:]), np.iinfo(new.routes.dtype).max, new.routes.dtype)


def _is_unknown(row: NDArray) -> bool:
    return bool((row == np.iinfo(row.dtype).max).all())
