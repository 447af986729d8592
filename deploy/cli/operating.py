"""The grammar of the commands that watch and steer a run: top, tail, inspect, dead, weights, pause, resume, …"""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from typing import Any

from headway.schemas.version import Version

MODULES = {
    "top": "top",
    "tail": "tail",
    "inspect": "inspect",
    "dead": "dead",
    "weights": "weight_versions",
    "record": "record",
    **dict.fromkeys(("pause", "resume", "drain", "rollback"), "control"),
}
"""Which module of `headway.deploy` holds a command."""


def duration_s(text: str) -> float:
    """`90`, `90s`, `5m` or `1h` as seconds. Raises ArgumentTypeError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", text)
    if found is None or not float(found[1]):
        raise ArgumentTypeError(f"{text!r} is no time, such as 90s or 5m")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def add_operating(commands: Any, version: Callable[[str], Version], parser_class: type[ArgumentParser]) -> None:
    """Add the parsers. `version` reads e.n."""

    def command(name: str, help_text: str) -> ArgumentParser:
        parser: ArgumentParser = commands.add_parser(name, help=help_text)
        parser.add_argument("run", help="name or folder of a run")
        return parser

    top = command("top", "what a run does now")
    top.add_argument("--once", action="store_true", help="print it once")
    tail = command("tail", "events as they come")
    tail.add_argument("--kind", action="append", default=[], metavar="NAME", help="only these, such as step; repeats")
    tail.add_argument(
        "--headers", action="store_true", help="every message's headers; --kind is then a kind of message"
    )
    inspect = commands.add_parser("inspect", help="everything known about one rollout, step or version")
    inspect.add_argument("what", choices=["rollout", "step", "version"])
    inspect.add_argument("id", help="a rollout's id, or e.n")
    inspect.add_argument("run", help="name or folder of a run")
    inspect.add_argument(
        "--tokens", action="store_true", help="a rollout's tokens beside the trainer's forward, worst first"
    )
    inspect.add_argument("--under", type=version, metavar="e.n", help="with --tokens: under these weights")
    dead = commands.add_parser("dead", help="messages that nobody could process").add_subparsers(
        dest="verb", required=True, metavar="verb", parser_class=parser_class
    )
    for verb, text in (("ls", "list"), ("show", "show one"), ("retry", "publish one again"), ("drop", "delete one")):
        parser = dead.add_parser(verb, help=text)
        parser.add_argument("run", help="name or folder of a run")
        if verb != "ls":
            parser.add_argument("seq", type=int, help="its number in `headway dead ls`")
    parser.add_argument("--yes", action="store_true", help="it cannot be undone")
    command("pause", "issue no new tasks until `headway resume`, or until the dispatcher restarts")
    command("resume", "issue tasks again")
    drain = command("drain", "let a service finish what it has and end")
    drain.add_argument("service", choices=["trainer", "dispatcher", "agent", "sandbox", "relay"])
    drain.add_argument("instance", nargs="?", help="default: every one that is heard")
    drain.add_argument(
        "--within",
        type=duration_s,
        metavar="60s",
        help="an agent's time to the end, in which it saves what it cannot finish; wait for that",
    )
    rollback = command("rollback", "go on training from an earlier version")
    rollback.add_argument("--to", type=version, required=True, metavar="e.n")
