"""The commands that work on a whole run: up, eval, audit, summary."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import re
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog

from headway.bus.connection import Bus
from headway.bus.rebuild import rebuild
from headway.bus.service import SECOND_SIGNAL_EXIT, configure_logging, first_error
from headway.deploy import drift, plot, summary
from headway.deploy import export as exporting
from headway.deploy.cli.operating import MODULES
from headway.deploy.doctor import Doctor, Finding
from headway.deploy.local import LocalRun, topology, with_bus
from headway.deploy.preview import preview
from headway.deploy.run_folder import RunFolder
from headway.deploy.settings import parse_set, to_toml
from headway.deploy.sources import read_recording
from headway.schemas.config import Config, parse_config
from headway.schemas.errors import ConfigError, PromiseViolated, UnavailableError
from headway.trainer.audit import Report
from headway.trainer.audit import audit as audit_run

Say = Callable[[str], None]
T = TypeVar("T")
VIOLATIONS_SHOWN = 12


def up(config: Config, path: Path, say: Say) -> int:
    """Run to the end, or until a signal. Raises HeadwayError."""
    folder = RunFolder(path)
    run = LocalRun(
        config=config,
        folder=folder,
        say=say,
        finish=lambda bus, wall_s: finish(bus, config, folder, wall_s, say),
    )

    async def until_signal() -> None:
        stop = asyncio.Event()
        on_signals(stop, run.kill)
        await run.run(stop)

    _run(until_signal(), folder)
    return 0


def preview_up(config: Config, path: Path, say: Say) -> int:
    """Print what `up` would start. Raises HeadwayError."""
    for line in preview(config, RunFolder(path)):
        say(line)
    return 0


def fork(config: Config, path: Path, name: str, say: Say, *, dry: bool) -> tuple[Config, Path]:
    """Config and folder of run `name`, whose version 0 is the head of the run in `path`; exported unless `dry`.

    Forking to the same name again goes on with it. Raises HeadwayError.
    """
    origin = RunFolder(path)
    if not origin.config_file.is_file():
        raise ConfigError(f"there is no run in {path} to fork", hint="leave --fork out to begin one")
    base = exporting.fork_base(origin, name)
    if not (dry or base.is_dir()):
        version, _ = _run(exporting.export_run(origin, None, base), origin)
        say(f"run {name} begins from version {version} of {origin.path.name}")
    return exporting.forked(config, origin, name), base.parent


def on_signals(stop: asyncio.Event, kill: Callable[[], Any]) -> None:
    """The first signal asks for a drain; the second ends everything at once."""

    def on_signal() -> None:
        if stop.is_set():
            kill()
            os._exit(SECOND_SIGNAL_EXIT)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _run(work: Coroutine[Any, Any, T], folder: RunFolder | None) -> T:
    """asyncio.run, its log in the run's folder, with the first error of an exception group in the group's place."""
    file = folder.logs / "headway.log" if folder else Path(os.devnull)
    file.parent.mkdir(parents=True, exist_ok=True)
    before = structlog.get_config()
    try:
        with file.open("a") as log:
            configure_logging(log)
            return asyncio.run(work)
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    finally:
        structlog.configure(**before)  # the file is closed


async def finish(bus: Bus, config: Config, folder: RunFolder, wall_s: float, say: Say) -> None:
    """Audit the run, write summary.json and the plot, and print the table. Raises PromiseViolated."""
    report = await audit_run(bus, folder.trainer_public_key())
    reading = await summary.read(bus)
    found = summary.figures(reading, config, rollouts=_ends(report), wall_s=wall_s)
    (folder.path / "summary.json").write_text(summary.to_json(found))
    say(f"run {config.run.name}: {folder.path / 'summary.json'}")
    try:
        plot.draw(found, [reading.events[n] for n in sorted(reading.events)], folder.path / "run.png")
    except UnavailableError as error:
        say(str(error))
    say(summary.table(found))
    _refuse_violations(report)


def _ends(report: Report) -> dict[str, Any]:
    keys = ("issued", "trained", "dropped", "pending", "lost", "trained_twice")
    return {key: value for key, value in report.as_dict().items() if key in keys}


def _refuse_violations(report: Report) -> None:
    if report.violations:
        raise PromiseViolated(
            f"the audit found {len(report.violations)} violations", why="\n".join(report.violations[:VIOLATIONS_SHOWN])
        )


def examine(config: Config, path: Path, say: Say, *, skip: Sequence[str], monitor: str) -> int:
    """Print what `headway doctor` finds; the exit code."""
    levels: list[str] = []

    def tell(finding: Finding) -> None:
        levels.append(finding.level)
        say(str(finding))

    _run(Doctor(config=config, folder=RunFolder(path), tell=tell, monitor=monitor).examine(skip), None)
    say(", ".join(f"{levels.count(level)} {level}" for level in ("ok", "note", "fail")))
    return UnavailableError.exit_code if "fail" in levels else 0


def show_topology(config: Config, path: Path, say: Say, *, change: bool) -> int:
    """Print how the server's streams differ from the declared ones, and end that if `change`."""
    folder, declared = RunFolder(path), topology(config)
    _run(with_bus(config, folder, lambda bus: drift.command(bus, declared, say, change=change)), folder)
    return 0


def summarise(options: argparse.Namespace, say: Say) -> int:
    """Write the summary of an existing run again."""
    folder = RunFolder.existing(options.run)
    config = folder.config()
    wall_s = folder.spend(0.0)
    _run(with_bus(config, folder, lambda bus: finish(bus, config, folder, wall_s, say)), folder)
    return 0


def audit(options: argparse.Namespace, say: Say) -> int:
    """Check every promise that the streams of a run, or a recording of them, can prove. Raises PromiseViolated."""
    if (options.run is None) == (options.recording is None) or (options.rebuild and options.run is None):
        why = "a run or a recording is due, and only a run can be rebuilt"
        raise ConfigError("audit what?", why=why, hint="headway audit RUN, or --from FILE")
    if options.recording is not None:
        report = _run(
            read_recording(options.recording, lambda found: audit_run(found.bus), allow_code=options.allow_code), None
        )
    else:
        folder = RunFolder.existing(options.run)
        key = folder.trainer_public_key()
        config = folder.config()

        async def look(bus: Bus) -> Report:
            if options.rebuild:
                await drift.apply(bus, topology(config))
                say(f"{await rebuild(bus, key)} records of the ledger put back from {folder.store_url(config)}")
            return await audit_run(bus, key)

        report = _run(with_bus(config, folder, look), folder)
    say(json.dumps(report.as_dict(), indent=1))
    _refuse_violations(report)
    return 0


def replay(options: argparse.Namespace, say: Say) -> int:
    """Give a recording's streams a server again, or compute once more what was recorded. Raises HeadwayError."""
    from headway.deploy import replay as replaying

    _run(replaying.command(options, say), None)
    return 0


def export(options: argparse.Namespace, say: Say) -> int:
    """Write a committed version as a Hugging Face folder."""
    folder = RunFolder.existing(options.run)
    out = options.out.absolute() if options.out else None
    version, path = _run(exporting.export_run(folder, options.version, out), folder)
    say(f"version {version} of {folder.path.name}: {path}")
    return 0


def evaluate(options: argparse.Namespace, say: Say) -> int:
    """A run of zero steps whose base is the given checkpoint: nothing but an evaluation block."""
    folder = RunFolder.existing(options.run)
    base = (options.base or _run(exporting.export_run(folder, options.version, None), folder)[1]).absolute()
    if not (base / "config.json").is_file():
        raise ConfigError(f"{base} is no model", why="it holds no config.json", hint="--base FOLDER")
    origin = folder.config()
    overrides = {
        "run.name": f"{origin.run.name[:40]}-eval-{re.sub('[^A-Za-z0-9_-]', '-', base.name)[:16]}",
        "run.steps": 0,
        "model.base": str(base),
        "eval.at": ["start"],
        **parse_set(options.sets),
    }
    config = parse_config(to_toml(origin), str(folder.config_file), overrides)
    return up(config, folder.path.parent / config.run.name, say)


def operate(options: argparse.Namespace, say: Say) -> int:
    """The commands that watch and steer a run. Raises HeadwayError."""
    folder = RunFolder.existing(options.run)
    module = importlib.import_module(f"headway.deploy.{MODULES[options.command]}")
    _run(module.command(options, folder, folder.config(), say), folder)
    return 0
