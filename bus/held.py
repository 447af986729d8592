"""What an agent holds, on its own disk, so that after a kill whoever takes its name gives it back at once.

The server delivers a dead agent's tasks again only when `ack_wait_s` has passed. A file a lease, named by the task's
sequence, holds the subject on which the server takes the lease's end; its time is that of the last renewal. Nothing
hangs on a file: a missing one costs that wait, one too many costs a task begun twice. So none is made durable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path


class Held:
    """One agent's leases, in `folder`. `clock` goes on over restarts, as time.time does; seconds."""

    def __init__(self, folder: Path, ack_wait_s: float, clock: Callable[[], float]) -> None:
        self._folder, self._ack_wait_s, self._clock = str(folder), ack_wait_s, clock

    def add(self, seq: int, reply: str) -> None:
        """The task at `seq` of TASKS was delivered to this agent, which answers on `reply`."""
        with contextlib.suppress(OSError):
            try:
                self._write(seq, reply)
            except FileNotFoundError:
                os.makedirs(self._folder, exist_ok=True)
                self._write(seq, reply)

    def renewed(self, seq: int) -> None:
        with contextlib.suppress(OSError):
            self._touch(seq)

    def end(self, seq: int) -> None:
        """It was acknowledged or given back."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(seq))

    def take_left(self) -> Iterator[str]:
        """What an earlier life left, as reply subjects; forgets all of it.

        Not what the server has given to somebody else since: that was renewed longer ago than it waits.
        """
        for file in sorted(Path(self._folder).glob("*")):
            with contextlib.suppress(OSError):
                reply, age_s = file.read_text(), self._clock() - file.stat().st_mtime
                file.unlink()
                if reply and age_s < self._ack_wait_s:
                    yield reply

    def _write(self, seq: int, reply: str) -> None:
        with open(self._path(seq), "w") as file:
            file.write(reply)
        self._touch(seq)

    def _touch(self, seq: int) -> None:
        now_s = self._clock()
        os.utime(self._path(seq), (now_s, now_s))

    def _path(self, seq: int) -> str:
        return f"{self._folder}/{seq}"
