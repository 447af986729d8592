"""Keeps a set of child processes running, and takes them down in order.

Invariants: a child runs in a process group of its own, and nothing of that group outlives it; when the
supervisor itself dies, even by SIGKILL, the kernel kills its children. A child that dies is started
again after a growing pause; an exit code in FINAL_CODES, or more than RESTARTS_MAX deaths within
RESTARTS_WINDOW_S, is a failure of the whole: `failure` is set and nothing is started any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headway.schemas.errors import HeadwayError, UnavailableError

BACKOFF_S_FIRST = 0.2
BACKOFF_S_MAX = 2.0
HEALTHY_S = 10.0
"""A child that ran this long is restarted at the first pause again."""
RESTARTS_MAX = 6
RESTARTS_WINDOW_S = 120.0
"""A service that needs ten seconds to find out that it cannot go on must not be started for ever."""
FINAL_CODES = frozenset({64, 65, 70, 75})
DRAIN_S_DEFAULT = 20.0
KILL_S_MAX = 5.0
LOG_TAIL_BYTES = 16 << 10
PR_SET_PDEATHSIG = 1
T = TypeVar("T")
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to run one child. Children of a lower `rank` are drained first."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    rank: int
    drain_s: float = DRAIN_S_DEFAULT
    once: bool = False
    """Ends by itself: exit code 0 is the result, not a death."""
    show_stdout: bool = False
    """Standard output goes to the terminal instead of the log."""


class ChildFailed(HeadwayError):
    """A child ended in a way that no restart can mend. Carries the child's exit code."""

    def __init__(self, exit_code: int, what: str, *, why: str, hint: str) -> None:
        self.exit_code = exit_code
        super().__init__(what, why=why, hint=hint)


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: subprocess.Popen[bytes] | None = None
    deaths: deque[float] = field(default_factory=deque)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Starts children as tasks of `tasks`; `say` gets one line for each thing a person should know."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        restarts_max: int = RESTARTS_MAX,
    ) -> None:
        self._tasks, self._say, self._clock = tasks, say, clock
        self._restarts_max = restarts_max
        self._children: dict[str, _Child] = {}
        self.failure: asyncio.Future[ChildFailed] = asyncio.get_running_loop().create_future()

    def pids(self) -> dict[str, int]:
        """The process id of each child that runs now."""
        return {name: child.process.pid for name, child in self._children.items() if child.process}

    def start(self, spec: ChildSpec) -> None:
        """Run `spec` until it is drained. Raises UnavailableError when the program cannot be started."""
        if spec.name in self._children and not self._children[spec.name].gone.is_set():
            raise ValueError(f"child {spec.name!r} already runs")
        child = self._children[spec.name] = _Child(spec)
        child.process = _spawn(spec)
        self._tasks.create_task(self._keep(child))

    async def while_up(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns. Raises ChildFailed when a child ends for good before that."""
        task = asyncio.ensure_future(work)
        try:
            waiting: set[asyncio.Future[Any]] = {task, self.failure}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self.failure.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def run_once(self, spec: ChildSpec) -> None:
        """Run a child that ends by itself; return when it is done or drained. Raises ChildFailed."""
        self.start(spec)
        gone = asyncio.create_task(self._children[spec.name].gone.wait())
        waiting: set[asyncio.Future[Any]] = {gone, self.failure}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if self.failure.done():
            raise self.failure.result()

    async def _keep(self, child: _Child) -> None:
        pause_s = BACKOFF_S_FIRST
        try:
            while child.process is not None:
                started_s = self._clock()
                code = await _ended(child.process)
                child.process = None
                if child.stopping.is_set() or self.failure.done() or (child.spec.once and code == 0):
                    return
                if self._is_final(child, code):
                    self.failure.set_result(_explain(child.spec, code))
                    return
                if self._clock() - started_s >= HEALTHY_S:
                    pause_s = BACKOFF_S_FIRST
                self._say(f"{child.spec.name} {_describe(code)}; starting it again in {pause_s:.1f} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.stopping.wait(), pause_s)
                    return
                pause_s = min(2 * pause_s, BACKOFF_S_MAX)
                child.process = _spawn(child.spec)
        finally:
            if child.process is not None:
                _kill_group(child.process)
                child.process = None
            child.gone.set()

    def _is_final(self, child: _Child, code: int) -> bool:
        now_s = self._clock()
        child.deaths.append(now_s)
        while child.deaths[0] < now_s - RESTARTS_WINDOW_S:
            child.deaths.popleft()
        return code in FINAL_CODES or len(child.deaths) > self._restarts_max

    async def drain(self, below_rank: int | None = None) -> None:
        """Stop children in the order of their ranks (all below `below_rank`), each within its `drain_s`."""
        children = [c for c in self._children.values() if below_rank is None or c.spec.rank < below_rank]
        for rank in sorted({child.spec.rank for child in children}):
            await asyncio.gather(*(self._stop(child) for child in children if child.spec.rank == rank))

    async def _stop(self, child: _Child) -> None:
        child.stopping.set()
        if child.process is not None:
            os.kill(child.process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(child.gone.wait(), child.spec.drain_s)
        except TimeoutError:
            self._say(f"{child.spec.name} did not drain within {child.spec.drain_s:g} s; killed")
            if child.process is not None:
                _kill_group(child.process)
            await asyncio.wait_for(child.gone.wait(), KILL_S_MAX)

    def kill_all(self) -> None:
        """SIGKILL every child and its group, now."""
        for child in self._children.values():
            child.stopping.set()
            if child.process is not None:
                _kill_group(child.process)


def _spawn(spec: ChildSpec) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def die_with_parent() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    spec.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with spec.log.open("ab") as log:
            return subprocess.Popen(
                spec.argv,
                env=dict(spec.env),
                stdin=subprocess.DEVNULL,
                stdout=None if spec.show_stdout else log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
    except OSError as error:
        raise UnavailableError(f"cannot start {spec.name}: {spec.argv[0]}", why=str(error)) from None


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code, negative for a signal, once the process has ended and its group is swept."""
    loop = asyncio.get_running_loop()
    fd = os.pidfd_open(process.pid)
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    _kill_group(process)  # before reaping, so that the id cannot have passed to another
    return process.wait()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _describe(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _explain(spec: ChildSpec, code: int) -> ChildFailed:
    final = code in FINAL_CODES
    found = _last_failure(spec.log)
    what = f"{spec.name} {_describe(code)}" + ("" if final else f" too often within {RESTARTS_WINDOW_S:g} s")
    why = ": ".join(part for part in (found.get("what", ""), found.get("why", "")) if part)
    hint = "; ".join(part for part in (found.get("hint", ""), f"the log is {spec.log}") if part)
    return ChildFailed(code if final else UnavailableError.exit_code, what, why=why, hint=hint)


def _last_failure(log: Path) -> dict[str, str]:
    """What, why and hint of the newest failure that the child logged, else its last line as `what`."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            fields = json.loads(line)
            if isinstance(fields, dict) and "what" in fields:
                return {key: str(fields.get(key, "")) for key in ("what", "why", "hint")}
    return {"what": lines[-1][:400]} if lines else {}
