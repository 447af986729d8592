"""The command line's grammar: one parser for each command, run.toml options on those that read one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from headway.deploy.cli.operating import add_operating
from headway.deploy.cli.recording import ALLOW_CODE, add_recording
from headway.deploy.cli.weights import add_weights
from headway.schemas.errors import ConfigError
from headway.schemas.sections import INT_MAX
from headway.schemas.version import Version

SERVICES = {
    "trainer": "trains on rollouts, commits the ledger, publishes weights",
    "dispatcher": "appends tasks as fast as the staleness bound allows",
    "agent": "rolls out tasks and swaps weights",
    "sandbox": "runs and grades what models write",
    "relay": "a region's cache of weights: each object comes once from the store",
}


DOCTOR_CHECKS = ("bus", "store", "sandbox", "host", "keys", "numerics")


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as every other error, with exit code 64."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help")


def parser() -> Parser:
    top = Parser(prog="headway", description="Asynchronous reinforcement learning over a message bus.")
    commands = top.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)
    shared = _config_options()

    up = commands.add_parser("up", parents=[shared], help="a whole run on this machine, with an embedded nats-server")
    up.add_argument("--dry-run", action="store_true", help="show what would start, and start nothing")
    up.add_argument("--engine", choices=["local", "sglang"], help="what the agents sample with; default: engine.kind")
    up.add_argument("--fork", metavar="NAME", help="a new run, from the last committed version of this one")
    for name, text in SERVICES.items():
        commands.add_parser(name, parents=[shared], help=f"service: {text}")
    engine = commands.add_parser("engine", parents=[shared], help="service: the local inference engine")
    engine.add_argument("--host", default="127.0.0.1")
    engine.add_argument("--port", type=_port, required=True, help="0: any that is free")
    engine.add_argument("--name", default="engine", help="shown in logs")
    commands.add_parser("midtrain", parents=[shared], help="make the base model of a run: version 0")

    tasks = commands.add_parser("tasks", help="task sets").add_subparsers(
        dest="verb", required=True, metavar="verb", parser_class=Parser
    )
    build = tasks.add_parser("build", parents=[shared], help="write a task set as JSONL")
    build.add_argument("env", choices=["expr", "repo"])
    build.add_argument("--seed", type=_count, help="default: tasks.seed")
    build.add_argument("--sessions", type=_count, help="demonstrations; default: tasks.demonstrations")
    build.add_argument("--out", type=Path, help="default: tasks/ of the run folder")

    doctor = commands.add_parser("doctor", parents=[shared], help="try whether machine, bus and store can carry a run")
    doctor.add_argument("--skip", action="append", default=[], choices=DOCTOR_CHECKS, help="repeats")
    doctor.add_argument(
        "--monitor", default="", metavar="URL", help="the NATS server's monitoring, such as http://h:8222"
    )
    topology = commands.add_parser("topology", help="a run's streams on the NATS server").add_subparsers(
        dest="verb", required=True, metavar="verb", parser_class=Parser
    )
    topology.add_parser("plan", parents=[shared], help="show how they differ from what Headway declares")
    topology.add_parser("apply", parents=[shared], help="create and change them so that they don't")

    secrets = commands.add_parser("keys", help="signing keys, and users of the NATS server").add_subparsers(
        dest="verb", required=True, metavar="verb", parser_class=Parser
    )
    init = secrets.add_parser("init", parents=[shared], help="make those that are missing, in a folder for each role")
    init.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    init.add_argument(
        "--hub", default="", metavar="HOST:PORT", help="also nats/leaf.conf, for servers of regions that connect there"
    )

    commands.add_parser("decode", help="show a message body from standard input as JSON")
    audit = commands.add_parser("audit", help="check a run's ledger against everything on the bus")
    audit.add_argument("run", nargs="?", help="name or folder of a run")
    audit.add_argument("--from", type=Path, dest="recording", metavar="FILE", help="a recording instead of a run")
    audit.add_argument(
        "--rebuild", action="store_true", help="first append what the LEDGER stream lacks of the store's"
    )
    audit.add_argument("--allow-code", action="store_true", help=ALLOW_CODE)
    summary = commands.add_parser("summary", help="write summary.json and the plot of a run again, and print it")
    summary.add_argument("run", help="name or folder of a run")
    evaluate = commands.add_parser("eval", help="evaluate a run's model on its held-out tasks, without training")
    evaluate.add_argument("run", help="name or folder of a run")
    evaluate.add_argument("--version", type=_version, metavar="e.n", help="default: the last committed one")
    evaluate.add_argument("--base", type=Path, help="a Hugging Face folder to evaluate instead of a version of the run")
    evaluate.add_argument("--set", action="append", default=[], dest="sets", metavar="a.b=c")
    export = commands.add_parser("export", help="write a version of a run as a Hugging Face folder")
    export.add_argument("run", help="name or folder of a run")
    export.add_argument("--version", type=_version, metavar="e.n", help="default: the last committed one")
    export.add_argument("--out", type=Path, metavar="FOLDER", help="default: versions/e.n of the run folder")

    add_operating(commands, _version, Parser)
    add_weights(commands, _version, Parser)
    add_recording(commands)
    config = commands.add_parser("config", help="run.toml").add_subparsers(
        dest="verb", required=True, metavar="verb", parser_class=Parser
    )
    config.add_parser("check", parents=[shared], help="say whether it is valid, and why not")
    show = config.add_parser("show", parents=[shared], help="print every setting, resolved")
    show.add_argument("--origin", action="store_true", help="add where each value comes from")
    return top


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= INT_MAX):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no count")
    return int(text)


def _port(text: str) -> int:
    if (port := _count(text)) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{port} is no port: they end at 65535")
    return port


def _version(text: str) -> Version:
    try:
        return Version.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _config_options() -> Parser:
    shared = Parser(add_help=False)
    shared.add_argument("--config", type=Path, metavar="run.toml", help="default: every setting's default")
    shared.add_argument("--set", action="append", default=[], dest="sets", metavar="a.b=c", help="TOML value; repeats")
    shared.add_argument("--run-dir", type=Path, metavar="FOLDER", help="default: runs/<run.name>")
    return shared
