"""Continuous batching: one thread owns the model, the cache and every sequence.

Other threads only put commands into its inbox and get a call back; between two forwards the thread takes
what has arrived. A step is at most one prefill forward (several sequences together) and one decode
forward. Invariants: a lease's first `filled` positions were computed from exactly its tokens; a token's version
is that of the weights whose logits it was drawn from.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from headway.kernels.decoder import KVCache, forward_cached, logits
from headway.kernels.logprob import log_probabilities
from headway.kernels.numerics import PAGE, Numerics
from headway.rollout_agent.engine.pages import Lease, NDArray, PagePool, SpanRow, pages_for, write_span
from headway.rollout_agent.engine.requests import BadRequest, Generate
from headway.rollout_agent.engine.sampling import draw
from headway.rollout_agent.engine.weights import Weights

PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Sizes of the batch and the cache, which has pages for `slots` sequences of `context_tokens`."""

    slots: int
    max_batch: int
    prefill_tokens: int
    context_tokens: int
    threads: int
    compute_dtype: torch.dtype
    numerics: Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a request ended. Spans are half-open; `spans` counts output tokens, `route_spans` rows."""

    request: Generate
    output_ids: list[int]
    logprobs: list[float]
    spans: list[SpanRow]
    reason: dict[str, Any]
    cached_tokens: int
    routes: NDArray | None  # [prompt + completion - 1 - start, L, k] i32
    route_spans: list[SpanRow]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request on its way. `tokens` is prompt + output, shared with its lease."""

    request: Generate
    done: Callable[[Finished], object]
    tokens: list[int]
    lease: Lease | None = None
    admitted: bool = False
    cached_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    spans: list[SpanRow] = field(default_factory=list)

    @property
    def place(self) -> Lease:
        """The pages of a running sequence."""
        assert self.lease is not None
        return self.lease

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.tokens) - self.place.filled


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What the engine holds now. Busy pages are those that running sequences have reserved."""

    running: int
    waiting: int
    waiting_tokens: int
    pages: int
    pages_busy: int
    paused: str


@dataclass(slots=True)
class Counters:
    """Since start."""

    requests: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    retracted_tokens: int = 0
    forwards: int = 0
    swaps: int = 0


class EngineCore:
    """The model thread. `on_fatal` is called from it with what stopped it, once."""

    def __init__(self, settings: CoreSettings, on_fatal: Callable[[BaseException], object]) -> None:
        self.settings, self._on_fatal = settings, on_fatal
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._paused: PauseMode | None = None
        self._generation = 0
        self._cache: KVCache | None = None
        self._pool: PagePool | None = None
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)
        self.weights: Weights | None = None
        self.counters = Counters()

    # From any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after its present step and wait for it."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, request: Generate, done: Callable[[Finished], object]) -> None:
        """Queue a request; `done` is called in the model thread."""
        sequence = Sequence(request=request, done=done, tokens=list(request.input_ids))
        self._inbox.put(lambda: self._waiting.append(sequence))

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` (one of the methods below) in the model thread between two forwards."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has hung up
            try:
                future.set_result(command())
            except Exception as error:  # the caller decides what a failed command means
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def loads(self) -> Loads:
        """As it is in the middle of a step; never waits for one."""
        pages = self.settings.slots * pages_for(self.settings.context_tokens)
        return Loads(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=sum(len(sequence.tokens) for sequence in list(self._waiting)),
            pages=pages,
            pages_busy=pool.busy if (pool := self._pool) is not None else 0,
            paused=self._paused or "",
        )

    # Commands: only through `call`

    def pause(self, mode: PauseMode) -> None:
        """Stop before the next forward. `abort` ends everything, `retract` drops the running KV.

        A retract that was asked for is not weakened by a later in_place.
        """
        if self._paused != "retract":
            self._paused = mode
        if mode == "abort":
            self.abort(None)

    def resume(self) -> None:
        """Go on. After `retract`, what was running is computed again from its first token."""
        if self._paused == "retract":
            for sequence in reversed(self._running):
                self.counters.retracted_tokens += sequence.place.filled
                self._release(sequence)
                self._waiting.appendleft(sequence)
            self._running.clear()
        self._paused = None

    def swap(self, weights: Weights, flush: bool) -> None:
        """Serve `weights` from the next forward on. Pages of the old ones are not read by new requests.

        Raises BadRequest, changing nothing, while requests run unpaused, or when `flush` is asked for while
        in_place keeps their KV.
        """
        if self._running and self._paused is None:
            raise BadRequest("requests are running", hint="pause_generation first")
        if self._running and self._paused == "in_place" and flush:
            raise BadRequest("flush_cache = true under in_place, which keeps the KV of running requests")
        if self._cache is None:
            s, c = self.settings, weights.config
            pages = s.slots * pages_for(s.context_tokens)
            self._cache = KVCache.allocate(c, pages, s.compute_dtype)
            self._pool = PagePool(pages, c.num_hidden_layers, c.num_experts_per_tok)
        self.weights = weights
        self._generation += 1
        self.counters.swaps += 1

    def release_memory(self) -> None:
        """Give weights and KV cache up until weights are loaded again. Raises BadRequest while there are requests."""
        if self._running or self._waiting:
            raise BadRequest("requests are running or waiting", hint="abort_request first")
        self.weights = self._cache = self._pool = None
        self._generation += 1

    def abort(self, rid: str | None) -> int:
        """End the request `rid`, or all, with what it has. Returns how many ended."""
        hit = [s for s in [*self._running, *self._waiting] if rid is None or s.request.rid == rid]
        for sequence in hit:
            if sequence.lease is None:
                self._waiting.remove(sequence)
            self._finish(sequence, {"type": "abort", "message": "aborted by request"})
        return len(hit)

    def flush(self) -> None:
        """Forget the prefixes that nobody uses."""
        if self._pool is not None:
            self._pool.flush()

    # The thread

    def _main(self) -> None:
        torch.set_num_threads(self.settings.threads)
        try:
            with torch.inference_mode():
                while self._take_commands():
                    if self._paused is None and self.weights is not None:
                        self._step(self.weights)
        except BaseException as error:  # the thread is the engine: without it the process must end
            self._on_fatal(error)

    def _take_commands(self) -> bool:
        """Run what has arrived; waits when there is nothing to compute. False: stop."""
        idle = self._paused is not None or self.weights is None or not (self._running or self._waiting)
        while True:
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            idle = False

    def _step(self, weights: Weights) -> None:
        self._admit(weights)
        budget, chunks = self.settings.prefill_tokens, []
        for sequence in self._running:
            if sequence.missing > 1 and budget > 0:
                chunks.append((sequence, min(sequence.missing, budget)))
                budget -= chunks[-1][1]
        if chunks:
            self._forward(weights, chunks)
        if decoding := [(sequence, 1) for sequence in self._running if sequence.missing == 1]:
            self._forward(weights, decoding)

    def _admit(self, weights: Weights) -> None:
        while self._waiting and len(self._running) < self.settings.max_batch:
            assert self._pool is not None
            sequence, request = self._waiting[0], self._waiting[0].request
            room = len(request.input_ids) + request.max_new_tokens
            lease = self._pool.acquire(sequence.tokens, room, self._generation, request.salt, weights.version)
            if lease is None:
                return
            self._waiting.popleft()
            if not sequence.admitted:
                self.counters.requests += 1
                sequence.admitted, sequence.cached_tokens = True, lease.filled
            sequence.lease = lease
            self.counters.cached_tokens += lease.filled
            self._running.append(sequence)

    def _forward(self, weights: Weights, chunks: list[tuple[Sequence, int]]) -> None:
        """Compute the next n tokens of each sequence; draw a token where that reaches its end."""
        assert self._cache is not None
        assert self._pool is not None
        leases, lengths = [sequence.place for sequence, _ in chunks], np.array([n for _, n in chunks])
        starts, width = np.array([lease.filled for lease in leases]), int(lengths.max())
        pages = np.zeros((len(chunks), pages_for(int((starts + lengths).max()))), np.int64)
        ids = np.zeros((len(chunks), width), np.int64)
        for row, ((sequence, n), lease) in enumerate(zip(chunks, leases, strict=True)):
            pages[row, : len(lease.pages)] = lease.pages[: pages.shape[1]]
            ids[row, :n] = sequence.tokens[lease.filled : lease.filled + n]
        out = forward_cached(
            weights.prepared,
            weights.config,
            self._cache,
            torch.from_numpy(pages),
            torch.from_numpy(starts),
            torch.from_numpy(ids),
            torch.from_numpy(lengths),
            self.settings.numerics,
            weights.packed,
        )
        real = np.arange(width) < lengths[:, None]
        owner, column = real.nonzero()
        position = starts[owner] + column
        routes = out.routes.numpy()[real]
        # the first layers may be dense
        rows = pages[owner, position // PAGE] * PAGE + position % PAGE
        self._pool.routes[rows, -routes.shape[1] :] = routes
        for lease, (_, n) in zip(leases, chunks, strict=True):
            self._pool.advance(lease, n, weights.version)
        self.counters.forwards += 1
        self.counters.prefilled_tokens += int(lengths.sum()) if width > 1 else 0
        ready = [row for row, (sequence, _) in enumerate(chunks) if sequence.missing == 0]
        if ready:
            hidden = out.hidden[:, 0] if width == 1 else out.hidden[ready, lengths[ready] - 1]
            self._sample(weights, [chunks[row][0] for row in ready], hidden)

    def _sample(self, weights: Weights, ready: list[Sequence], hidden: torch.Tensor) -> None:
        """hidden [N, d]: the state after the last token of each sequence of `ready`."""
        heats = [sequence.request.temperature for sequence in ready]
        scores = logits(weights.prepared, hidden, self.settings.numerics)
        seeds, positions = [s.request.seed for s in ready], [len(s.tokens) for s in ready]
        ids = draw(scores, heats, seeds, positions)
        divisor = torch.tensor([heat or 1.0 for heat in heats])[:, None]
        chosen = log_probabilities(scores, divisor).gather(1, ids[:, None])[:, 0]
        for sequence, token, logprob in zip(ready, ids.tolist(), chosen.tolist(), strict=True):
            self._append(sequence, token, logprob, weights.version)

    def _append(self, sequence: Sequence, token: int, logprob: float, version: str) -> None:
        if not math.isfinite(logprob):
            self._discard(sequence)
            self._finish(sequence, {"type": "error", "message": f"non-finite logits under {version}"})
            return
        at = len(sequence.logprobs)
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.spans = write_span(sequence.spans, at, at + 1, version)
        self.counters.sampled_tokens += 1
        if token in sequence.request.stop_ids:
            self._finish(sequence, {"type": "stop", "matched": token})
        elif at + 1 == sequence.request.max_new_tokens:
            self._finish(sequence, {"type": "length", "length": at + 1})

    def _discard(self, sequence: Sequence) -> None:
        assert self._cache is not None
        assert self._pool is not None
        self._cache.clear(self._pool.discard(sequence.place))

    def _release(self, sequence: Sequence) -> None:
        assert self._pool is not None
        self._pool.release(sequence.place)
        sequence.lease = None

    def _finish(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        request = sequence.request
        start, rows = request.routes_start, len(sequence.tokens) - 1
        routes: NDArray | None = None
        route_spans: list[SpanRow] = []
        if start is not None and self._pool is not None:
            routes, route_spans = self._pool.routed(sequence.lease, start, rows)
        if sequence.lease is not None:
            self._running.remove(sequence)
            self._release(sequence)
        sequence.done(
            Finished(
                request=request,
                output_ids=sequence.tokens[len(request.input_ids) :],
                logprobs=sequence.logprobs,
                spans=sequence.spans,
                reason=reason,
                cached_tokens=sequence.cached_tokens,
                routes=routes,
                route_spans=route_spans,
            )
        )
