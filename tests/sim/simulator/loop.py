"""An asyncio loop with a virtual clock, whose tasks belong to lives of processes that can end at any await.

A life is carried by the context of every callback. Once it is over, none of its callbacks runs any more: no
`except`, no `finally`, as after SIGKILL. Threads run inline, sets of tasks iterate in the order of creation, so
that one seed gives one history.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import heapq
import itertools
import sys
from asyncio import base_events
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MOST_CALLBACKS = 1_000_000


class Killed(BaseException):
    """Ends the stack in which a process was killed; nothing of that process runs afterwards."""


@dataclass(eq=False)
class Life:
    """One life of one process. `offset_s` and `rate` are its clock's; `fuse` kills it before that many callbacks."""

    name: str
    region: str
    offset_s: float = 0.0
    rate: float = 1.0
    alive: bool = True
    fuse: int | None = None
    frozen: list[asyncio.Handle] | None = None
    """Callbacks that wait for SIGCONT; None while it runs."""
    stop: asyncio.Event | None = None
    """Its service's: set by SIGTERM."""
    on_death: Callable[[Life], None] = lambda life: None
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def die(self) -> None:
        if self.alive:
            self.alive, self.frozen = False, None
            self.on_death(self)

    def admits(self, handle: asyncio.Handle) -> bool:
        """Whether a callback of this life may run now."""
        if not self.alive:
            return False
        if self.frozen is not None:
            self.frozen.append(handle)
            return False
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse <= 0:
                self.die()
                return False
        return True


LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        life = self._context.get(LIFE)
        if life is None or life.admits(self):
            super()._run()


class _Timer(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        life = self._context.get(LIFE)
        if life is None or life.admits(self):
            super()._run()


class _Task(asyncio.Task):  # type: ignore[type-arg]
    _numbers = itertools.count()

    def __new__(cls, *args: Any, **kwargs: Any) -> _Task:
        task: _Task = super().__new__(cls)
        task.number = next(cls._numbers)
        return task

    def __hash__(self) -> int:
        return self.number


class _Clock:
    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise RuntimeError("nothing will ever happen any more")
        self._loop.now += timeout_s
        return []


class SimLoop(base_events.BaseEventLoop):
    """`now` is the world's time in seconds."""

    def __init__(self, compute_s: Callable[[Any], float]) -> None:
        super().__init__()
        self.now = 0.0
        self.callbacks = 0
        self.failures: list[dict[str, Any]] = []
        self._selector, self._compute_s = _Clock(self), compute_s
        _Task._numbers = itertools.count()
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._on_failure)
        self.world = contextvars.Context()

    def at(self, when: float, act: Callable[..., Any], *args: Any) -> None:
        """Let `act` happen in the world at time `when`."""
        timer = _Timer(when, act, args, self, self.world)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True

    def after(self, delay_s: float, act: Callable[..., Any], *args: Any) -> None:
        self.at(self.now + delay_s, act, *args)

    def thaw(self, life: Life) -> None:
        """SIGCONT."""
        if life.frozen is not None:
            self._ready.extend(life.frozen)
            life.frozen = None

    # What asyncio calls

    def time(self) -> float:
        life = LIFE.get()
        return self.now if life is None else life.offset_s + life.rate * self.now

    def call_at(self, when, callback, *args, context=None):  # type: ignore[no-untyped-def]
        life = LIFE.get()
        if life is not None:
            when = (when - life.offset_s) / life.rate
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def _call_soon(self, callback, args, context):  # type: ignore[no-untyped-def]
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        self.callbacks += 1
        if self.callbacks > MOST_CALLBACKS:
            raise RuntimeError(f"more than {MOST_CALLBACKS} callbacks: the run does not end")
        return handle

    def run_in_executor(self, executor, func, *args):  # type: ignore[no-untyped-def]
        done = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        called = func.args[0] if isinstance(func, functools.partial) and func.args else func
        seconds = self._compute_s(called)
        if seconds:
            self.call_later(seconds, run)
        else:
            self.call_soon(run)
        return done

    def _make_task(self, loop, coro, context=None):  # type: ignore[no-untyped-def]
        task = _Task(coro, loop=loop, context=context)
        life = (context or contextvars.copy_context()).get(LIFE)
        if life is not None:
            life.tasks.append(task)
        return task

    def _on_failure(self, loop: Any, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Killed):
            self.failures.append(context)

    def _process_events(self, events: Any) -> None:
        return

    def _write_to_self(self) -> None:
        return

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        return

    def bury(self, lives: list[Life]) -> None:
        """Take what is left of the lives apart, so that nothing of it runs or complains later."""
        for life in lives:
            life.alive = False
            for task in life.tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(BaseException):
                        task.get_coro().close()  # type: ignore[union-attr]
            life.tasks.clear()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the remains of killed coroutines say while they are collected is of no interest."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda args: None
    try:
        yield
    finally:
        sys.unraisablehook = before
