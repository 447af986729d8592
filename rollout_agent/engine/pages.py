"""Which page of the KV cache holds which tokens, and who may read or continue there.

A page's key is the digest of all tokens up to its end, seeded with the weights' generation and the request's salt,
so equal keys mean equal bits: every position was computed from the same tokens by order-stable kernels. Full pages
are shared. A page that is not full is taken over by the first request that continues exactly there, so that a
session's next turn computes nothing twice. Pages that nobody holds stay readable until somebody needs the room;
those idle for longest go first, a sequence's last pages before its first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headway.kernels.numerics import PAGE

NDArray = np.ndarray[Any, np.dtype[Any]]
SpanRow = tuple[int, int, str]
"""Rows [start, end) that were computed under a version."""


def write_span(spans: list[SpanRow], start: int, end: int, version: str) -> list[SpanRow]:
    """`spans` (ascending, without overlap) after rows [start, end) were computed again under `version`."""
    if spans and spans[-1][1:] == (start, version):
        return [*spans[:-1], (spans[-1][0], end, version)]
    kept = [(a, min(b, start), v) for a, b, v in spans if a < start]
    tail = [(max(a, end), b, v) for a, b, v in spans if b > end]
    merged: list[SpanRow] = []
    for span in [*kept, (start, end, version), *tail]:
        if merged and merged[-1][2] == span[2] and merged[-1][1] == span[0]:
            merged[-1] = (merged[-1][0], span[1], span[2])
        else:
            merged.append(span)
    return merged


def clip_spans(spans: list[SpanRow], start: int, end: int) -> list[SpanRow]:
    """The part of `spans` within [start, end)."""
    return [(max(a, start), min(b, end), v) for a, b, v in spans if a < end and b > start]


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """The pages of one sequence. `tokens[:filled]` are in them; position t is at row t % PAGE of pages[t // PAGE]."""

    tokens: list[int]
    pages: NDArray  # [ceil(room / PAGE)] i64
    filled: int
    chain: bytes  # key of the last page that is full, or of none
    sealed: int  # pages that are full and were given their key
    spans: list[SpanRow] = field(default_factory=list)  # of the rows of routes

    def rows(self, start: int, end: int) -> NDArray:
        """Where positions [start, end) are in a table of pages * PAGE rows."""
        at = np.arange(start, end)
        found: NDArray = self.pages[at // PAGE] * PAGE + at % PAGE
        return found


def _key(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.blake2b(np.asarray(tokens, "<i4").tobytes(), key=parent, digest_size=16).digest()


class PagePool:
    """All pages of a cache. Not thread-safe: the model thread owns it.

    routes [pages * PAGE, L, k] i32: row t of a sequence routes its token t; dense layers stay -1.
    """

    def __init__(self, pages: int, layers: int, top_k: int) -> None:
        self.routes = np.full((pages * PAGE, layers, top_k), -1, np.int32)
        self._uses = [0] * pages
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def acquire(self, tokens: list[int], room: int, generation: int, salt: str, version: str) -> Lease | None:
        """Pages for a sequence that begins with `tokens` and never has more than `room`; None when they don't fit.

        `filled` says how many tokens are there already, all computed under `version`; at least one is left.
        """
        chain, found = hashlib.blake2b(f"{generation} {salt}".encode(), digest_size=16).digest(), list[int]()
        while (end := (len(found) + 1) * PAGE) < len(tokens):
            key = _key(chain, tokens[end - PAGE : end])
            if (page := self._page_of.get(key)) is None:
                break
            chain = key
            found.append(page)
        if pages_for(room) > len(found) + len(self._idle) - sum(self._uses[page] == 0 for page in found):
            return None
        filled = len(found) * PAGE
        for page in found:
            self._take(page)
        for n in range(min(PAGE, len(tokens) - filled) - 1, 0, -1):
            page = self._page_of.get(_key(chain, tokens[filled : filled + n]), -1)
            if page >= 0 and self._uses[page] == 0:
                self._forget(page)
                self._take(page)
                found.append(page)
                filled += n
                break
        sealed = filled // PAGE
        while len(found) < pages_for(room):
            page = next(iter(self._idle))
            self._forget(page)
            self._take(page)
            found.append(page)
        spans = [(0, filled, version)] if filled else []
        return Lease(tokens=tokens, pages=np.array(found), filled=filled, chain=chain, sealed=sealed, spans=spans)

    def advance(self, lease: Lease, tokens: int, version: str) -> None:
        """`tokens` more were computed under `version`: what became full may be shared."""
        lease.spans = write_span(lease.spans, lease.filled, lease.filled + tokens, version)
        lease.filled += tokens
        while (lease.sealed + 1) * PAGE <= lease.filled:
            at = lease.sealed * PAGE
            lease.chain = _key(lease.chain, lease.tokens[at : at + PAGE])
            self._remember(int(lease.pages[lease.sealed]), lease.chain)
            lease.sealed += 1

    def release(self, lease: Lease) -> None:
        """Give pages back; what they hold stays until somebody needs the room."""
        if rest := lease.filled - lease.sealed * PAGE:
            self._remember(
                int(lease.pages[lease.sealed]), _key(lease.chain, lease.tokens[lease.filled - rest : lease.filled])
            )
        for page in reversed(lease.pages.tolist()):
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._idle[page] = None

    def discard(self, lease: Lease) -> list[int]:
        """Never share what this lease holds. Returns its pages that nobody else holds: they must be cleared."""
        lease.filled = lease.sealed * PAGE
        own = [page for page in lease.pages.tolist() if self._uses[page] == 1]
        for page in own:
            self._forget(page)
        return own

    def routed(self, lease: Lease | None, start: int, end: int) -> tuple[NDArray, list[SpanRow]]:
        """A copy of route rows [start, end), -1 where none was computed, and their versions."""
        rows = np.full((max(0, end - start), *self.routes.shape[1:]), -1, np.int32)
        if lease is None:
            return rows, []
        known = min(end, lease.filled)
        rows[: max(0, known - start)] = self.routes[lease.rows(start, known)]
        return rows, clip_spans(lease.spans, start, known)

    def flush(self) -> None:
        """Forget what idle pages hold."""
        for page in self._idle:
            self._forget(page)

    @property
    def busy(self) -> int:
        return len(self._uses) - len(self._idle)

    def __len__(self) -> int:
        return len(self._uses)

    def _take(self, page: int) -> None:
        self._uses[page] += 1
        self._idle.pop(page, None)

    def _remember(self, page: int, key: bytes) -> None:
        if key not in self._page_of:
            self._page_of[key], self._key_of[page] = page, key

    def _forget(self, page: int) -> None:
        if (key := self._key_of.pop(page, None)) is not None:
            del self._page_of[key]
