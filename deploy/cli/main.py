"""`headway`: parse, load the config, hand over. Every import that costs time happens inside a command."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headway.deploy.cli.operating import MODULES
from headway.deploy.cli.options import SERVICES, parser
from headway.deploy.progress import escape
from headway.schemas.config import Config, load_config, parse_config
from headway.schemas.errors import HeadwayError, from_os

ENTRY_POINTS = {
    "trainer": ("headway.trainer.service", "main"),
    "dispatcher": ("headway.trainer.dispatcher", "main"),
    "agent": ("headway.rollout_agent.service", "serve"),
    "sandbox": ("headway.sandbox.service", "serve"),
    "relay": ("headway.weight_sync.relay", "serve"),
}
BROKEN_PIPE = 128 + signal.SIGPIPE
"""What a shell says of a program that this signal ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        options = parser().parse_args(argv)
        options.arguments = sys.argv[1:] if argv is None else list(argv)
        if options.command in SERVICES:
            return _service(options)
        return COMMANDS[options.command](options)
    except HeadwayError as error:
        print(error_block(error), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # an OSError, so it comes first
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit's flush is quiet
        return BROKEN_PIPE
    except OSError as error:
        if (known := from_os(error)) is None:
            raise
        print(error_block(known), file=sys.stderr)
        return known.exit_code
    except KeyboardInterrupt:
        return 130


def error_block(error: HeadwayError) -> str:
    """What happened, why, and what to try, each on lines of its own."""
    block = [f"headway: {escape(error.what)}"]
    for label, text in (("why", error.why), ("try", error.hint)):
        lines = [escape(line) for line in text.splitlines()]
        block += [f"  {label}: {line}" if number == 0 else f"       {line}" for number, line in enumerate(lines)]
    return "\n".join(block)


def _say(line: str) -> None:
    print(line, flush=True)


def _config(options: argparse.Namespace) -> Config:
    from headway.deploy.settings import parse_set

    overrides = parse_set(options.sets)
    if engine := getattr(options, "engine", None):
        overrides["engine.kind"] = engine
        if engine == "sglang":
            overrides.setdefault("engine.numerics", "replay")
    return parse_config("", "defaults", overrides) if options.config is None else load_config(options.config, overrides)


def _run_folder(options: argparse.Namespace, config: Config) -> Path:
    given = options.run_dir or os.environ.get("HEADWAY_RUN_DIR")
    return Path(given or Path("runs") / config.run.name).absolute()


def _service(options: argparse.Namespace) -> int:
    config = _config(options)
    os.environ["HEADWAY_RUN_DIR"] = str(_run_folder(options, config))
    if options.command == "trainer":
        from headway.deploy import ranks

        if (code := ranks.run(config, options.arguments)) is not None:
            return code
    module, function = ENTRY_POINTS[options.command]
    target = getattr(importlib.import_module(module), function)
    from headway.bus.service import run_service

    return run_service(options.command, config, target)


def _engine(options: argparse.Namespace) -> int:
    import structlog

    from headway.bus.service import configure_logging

    config = _config(options)
    from headway.rollout_agent.engine.service import run_engine

    configure_logging()
    structlog.contextvars.bind_contextvars(service="engine", instance=options.name)
    return run_engine(config, host=options.host, port=options.port, key=os.environ.get("HEADWAY_ENGINE_KEY", ""))


def _midtrain(options: argparse.Namespace) -> int:
    from headway.deploy.progress import midtrain_line

    config = _config(options)
    folder = _run_folder(options, config)
    from headway.trainer.midtrain import run_midtrain

    steps = config.midtrain.pretrain_steps + config.midtrain.sft_steps

    def report(fields: dict[str, Any]) -> None:
        if line := midtrain_line(fields, steps):
            _say(line)

    run_midtrain(config, folder / "tasks" / "sessions.jsonl", folder / "base", report)
    return 0


def _tasks(options: argparse.Namespace) -> int:
    from headway.sandbox.tasks import repo
    from headway.sandbox.tasks.build import build

    config = _config(options)
    out = options.out or _run_folder(options, config) / "tasks"
    seed = config.tasks.seed if options.seed is None else options.seed
    sessions = config.tasks.demonstrations if options.sessions is None else options.sessions
    built = repo.build(out) if options.env == "repo" else build(seed, out, sessions)
    _say(
        f"task set {options.env}, seed {seed}, digest {built['task_set'][:16]}: {built['train_tasks']} train "
        f"and {built['heldout_tasks']} held-out tasks, {built['sessions']} demonstrations"
    )
    return 0


def _keys(options: argparse.Namespace) -> int:
    from headway.deploy import keys

    run = _config(options).run.name
    keys.create(options.out, run, options.hub)
    _say(f"secrets of run {run}, by role: {options.out}; nats.conf: include {options.out / 'nats/accounts.conf'}")
    return 0


def _decode(options: argparse.Namespace) -> int:
    from headway.deploy.cli.decode import decode

    _say(decode(sys.stdin.buffer))
    return 0


def _show_config(options: argparse.Namespace) -> int:
    from headway.deploy.settings import origins_of, parse_set, to_toml

    config = _config(options)
    if options.verb == "check":
        _say(f"{options.config or 'the defaults'}: valid; run {config.run.name}, digest {config.shared_digest()[:16]}")
        return 0
    origins = None
    if options.origin:
        text = options.config.read_text() if options.config else ""
        origins = origins_of(text, str(options.config), parse_set(options.sets))
    print(to_toml(config, origins), end="", flush=True)
    return 0


def _up(options: argparse.Namespace) -> int:
    from headway.deploy import commands

    config = _config(options)
    path = _run_folder(options, config)
    if options.fork:
        config, path = commands.fork(config, path, options.fork, _say, dry=options.dry_run)
    return commands.preview_up(config, path, _say) if options.dry_run else commands.up(config, path, _say)


def _topology(options: argparse.Namespace) -> int:
    from headway.deploy import commands

    config = _config(options)
    return commands.show_topology(config, _run_folder(options, config), _say, change=options.verb == "apply")


def _doctor(options: argparse.Namespace) -> int:
    from headway.deploy import commands

    config = _config(options)
    path = _run_folder(options, config)
    return commands.examine(config, path, _say, skip=options.skip, monitor=options.monitor)


def _of_run(name: str) -> Callable[[argparse.Namespace], int]:
    def command(options: argparse.Namespace) -> int:
        commands = importlib.import_module("headway.deploy.commands")
        return int(getattr(commands, name)(options, _say))

    return command


def _weights(options: argparse.Namespace) -> int:
    if options.verb != "plan":
        return _of_run("operate")(options)
    from headway.deploy import weights_plan

    return weights_plan.command(options, _say)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "engine": _engine,
    "midtrain": _midtrain,
    "tasks": _tasks,
    "decode": _decode,
    "keys": _keys,
    "config": _show_config,
    "topology": _topology,
    "doctor": _doctor,
    "audit": _of_run("audit"),
    "summary": _of_run("summarise"),
    "eval": _of_run("evaluate"),
    "export": _of_run("export"),
    "replay": _of_run("replay"),
    **dict.fromkeys(MODULES, _of_run("operate")),
    "weights": _weights,
}

if __name__ == "__main__":
    sys.exit(main())
