"""`headway record`: a run's streams and the objects they name, in one file."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path

from headway.bus.connection import Bus
from headway.bus.recorder import Recorder, Selection, about
from headway.bus.recording_writer import RecordingWriter
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.deploy.sources import files_of
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError, UnavailableError
from headway.schemas.leases import Lease
from headway.schemas.ledger import LedgerEntry
from headway.schemas.messages import BUS_MESSAGES
from headway.schemas.version import VERSION_MAX
from headway.schemas.wire import digest_of, pack

SUFFIX = ".hwr"
KINDS = {LedgerEntry.KIND, *BUS_MESSAGES}
Say = Callable[[str], None]


def selection_of(options: argparse.Namespace) -> Selection:
    """Raises ConfigError."""
    if unknown := sorted(set(options.kind) - KINDS):
        raise ConfigError(
            f"--kind {unknown[0][:80]!r}", why="no message is of that kind", hint=", ".join(sorted(KINDS))
        )
    return Selection(
        since_s=_time(options.since),
        until_s=_time(options.until),
        steps=_steps(options.steps),
        kinds=tuple(options.kind),
        checkpoints=options.checkpoints,
    )


def _time(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone().timestamp()
    except ValueError as error:
        raise ConfigError(f"{text!r} is no time", why=str(error), hint="2026-11-30T12:00:00+00:00") from None


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dots, last = text.partition("..")
    if not (first.isdecimal() and (last or first).isdecimal() and (dots or not last)):
        raise ConfigError(f"--steps {text!r}", why="a step or a range of steps is due", hint="--steps 3..7")
    found = int(first), int(last or first)
    if not 1 <= found[0] <= found[1] <= VERSION_MAX:
        why = f"a last step is not before the first, and at most {VERSION_MAX}"
        raise ConfigError(f"--steps {text[:80]!r} is empty", why=why, hint="--steps 3..7")
    return found


async def record(bus: Bus, recorder: Recorder, say: Say, *, follow: bool) -> None:
    """Until everything is taken; with `follow` until the run ends, the bus goes away, or a signal comes."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await (recorder.follow(stop) if follow else recorder.catch_up())
    except UnavailableError as error:
        if not follow:
            raise
        say(f"stopped: {error}; the same command goes on")
    taken, contents = recorder.taken, recorder.writer.contents
    gone = f", {taken['gone']} objects were gone" if taken["gone"] else ""
    whole = "" if contents.whole else "; not whole yet, the same command goes on"
    say(
        f"{recorder.writer.path}: {taken['messages']} messages and {taken['objects']} objects taken{gone}, "
        f"{contents.end / 1e6:.2f} MB, run {bus.run} up to version {recorder.head}{whole}"
    )


@contextlib.asynccontextmanager
async def held(bus: Bus, writer: RecordingWriter, say: Say) -> AsyncIterator[None]:
    """Keep what is still to be recorded from being swept meanwhile."""
    assert bus.store is not None
    key = bus.keys.lease(f"recording-{digest_of(str(writer.path).encode())[:16]}")
    tasks_seq, rollouts_seq = (writer.cursor(suffix) + 1 for suffix in ("TASKS", "ROLLOUTS"))
    lease = Lease(
        holder=f"headway record {writer.path}"[-200:], tasks_from_seq=tasks_seq, rollouts_from_seq=rollouts_seq
    )
    try:
        await bus.store.delete(key)  # of a recorder that was killed
        await bus.store.put(key, pack(lease))
    except UnavailableError as error:
        say(f"the run may sweep what is not recorded yet: {error}")
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(UnavailableError):
            await bus.store.delete(key)


async def command(options: argparse.Namespace, folder: RunFolder, config: Config, say: Say) -> None:
    selection = selection_of(options)
    path: Path = options.out or folder.path / f"{config.run.name}{SUFFIX}"
    with RecordingWriter(path, about(config.run.name, selection)) as writer:

        async def work(bus: Bus) -> None:
            files = files_of(folder, config)
            recorder = Recorder(bus=bus, writer=writer, selection=selection, files=files)
            async with held(bus, writer, say):
                await record(bus, recorder, say, follow=options.follow)

        await with_bus(config, folder, work)
