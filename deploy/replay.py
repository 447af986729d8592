"""`headway replay`: a recording's streams on a server again, or what was recorded computed once more."""

from __future__ import annotations

import argparse
import asyncio
import functools
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

from headway.bus.recorded import RecordedBus
from headway.bus.replayer import Replayer, until
from headway.deploy.local import cancel, embedded_bus, topology
from headway.deploy.progress import escape
from headway.deploy.run_folder import RunFolder
from headway.deploy.settings import to_toml
from headway.deploy.sources import Source, read_recording, read_source
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError

SPEEDS = {"1x": 1.0, "10x": 10.0, "max": None}
USAGE = (
    "replay FILE | replay step N SOURCE | replay rollout ID SOURCE | replay check SOURCE | replay bundle FILE; "
    "SOURCE is a run or a recording"
)
Say = Callable[[str], None]


async def command(options: argparse.Namespace, say: Say) -> None:
    """Raises HeadwayError."""
    read = functools.partial(read_source, allow_code=options.allow_code)
    match options.words:
        case ["step", wanted, source]:
            from headway.deploy import reexecution

            await read(source, lambda found: reexecution.step(found, wanted, say))
        case ["rollout", rollout_id, source]:
            from headway.deploy import reexecution

            await read(source, lambda found: reexecution.rollout(found, rollout_id, say))
        case ["check", source]:
            from headway.deploy import reexecution

            await read(source, lambda found: reexecution.decisions(found, say))
        case ["bundle", source]:
            from headway.deploy import reexecution

            await read(source, lambda found: reexecution.bundle(found, say))
        case [file] if file not in ("step", "rollout", "check", "bundle"):
            await read_recording(Path(file), lambda found: replay(found, options, say), allow_code=options.allow_code)
        case _:
            raise ConfigError(f"replay {' '.join(options.words)[:80]}", why="these words say nothing", hint=USAGE)


def prepare(folder: RunFolder, config: Config, source: Source) -> None:
    """Make a run folder in which every command that reads finds the replayed run.

    It gets no keys of the run: the genesis names what signatures are checked with, and nothing can be appended.
    """
    folder.check_same(config)
    for path in (folder.keys, folder.logs, folder.nats, folder.tasks):
        path.mkdir(parents=True, exist_ok=True)
    folder.keys.chmod(0o700)
    if not folder.token():
        (folder.keys / "nats.token").touch(0o600)
        (folder.keys / "nats.token").write_text(secrets.token_hex(16))
    folder.config_file.write_text(to_toml(config))
    for name, data in source.files.items():
        (folder.path / name).write_bytes(data)


async def replay(source: Source, options: argparse.Namespace, say: Say) -> None:
    """Replay into `--into`, or into the embedded server of a folder, until the end, `--until`, or a signal."""
    assert isinstance(source.bus, RecordedBus)
    config = Config.model_validate({**source.config.model_dump(), "bus": {"url": options.into or ""}})
    folder = RunFolder((options.run_dir or Path("runs") / f"{config.run.name}-replay").absolute())
    stop = until(options.until) if options.until else (lambda stream, message: False)
    with folder.locked():
        prepare(folder, config, source)
        async with asyncio.TaskGroup() as tasks, embedded_bus(config, folder, tasks, say) as (_, _, bus):
            replayer = Replayer(recording=source.bus.recording, bus=bus, speed=SPEEDS[options.speed], stop=stop)
            assert bus.store is not None
            await replayer.prepare(bus.store, topology(config))
            say(f"run {bus.run} is replayed in {folder.path}")
            work, signalled = asyncio.create_task(replayer.run()), asyncio.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, signalled.set)
            waiting = asyncio.create_task(signalled.wait())
            await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
            reached = work.result() if work.done() else "a signal"
            await cancel(work, waiting)
    where = f"stopped at {reached}" if reached else "at its end"
    say(escape(f"{replayer.published} messages published, {where}"))
    say(f"headway top, tail, audit or inspect {folder.path} reads it; the same command goes on")
