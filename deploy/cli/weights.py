"""The grammar of `headway weights`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.schemas.version import Version


def add_weights(commands: Any, version: Callable[[str], Version], parser_class: type[ArgumentParser]) -> None:
    """Add the parsers. `version` reads e.n."""
    weights = commands.add_parser("weights", help="the weight versions of a run").add_subparsers(
        dest="verb", required=True, metavar="verb", parser_class=parser_class
    )

    def command(verb: str, text: str) -> ArgumentParser:
        parser: ArgumentParser = weights.add_parser(verb, help=text)
        parser.add_argument("run", help="name or folder of a run")
        parser.add_argument("--json", action="store_true", help="values instead of a table")
        return parser

    command("ls", "every version: sizes, parent, whether it is kept and stored")
    command("show", "one version's shards and tensors").add_argument(
        "version", nargs="?", type=version, metavar="e.n", help="default: the last committed one"
    )
    command("verify", "read every stored object again and name the first that is not what was published")
    diff = command("diff", "which fraction of each tensor differs between two versions")
    for name in ("old", "new"):
        diff.add_argument(name, type=version, metavar="e.n")
    gc = command("gc", "delete what nothing needs any more; a running trainer does it by itself")
    gc.add_argument("--dry-run", action="store_true", help="only say what")
    weights.add_parser("ledger", help="which agent took which version when").add_argument(
        "run", help="name or folder of a run"
    )
    plan = weights.add_parser(
        "plan", help="predict bytes, times and pause of a swap at any size, from rates measured here"
    )
    for name, kind, default, text in (
        ("--params", float, 1e12, "parameters, such as 1e12"),
        ("--bytes-per-param", float, 2.0, "2 for bf16, 1 for fp8, 0.5 for int4"),
        ("--changed", float, 0.01, "share of elements that a step changes"),
        ("--ranks", int, 128, "trainer ranks, each with its own shards"),
        ("--rank-cores", float, 8.0, "cores that encode, a rank"),
        ("--rank-gbit", float, 10.0, "from a rank to the store, Gbit/s"),
        ("--regions", int, 4, "regions"),
        ("--region-gbit", float, 10.0, "from the store to a region, Gbit/s"),
        ("--rtt-ms", float, 100.0, "round trip to the store"),
        ("--agents", int, 2, "agents a region"),
        ("--hosts", int, 4, "hosts that share one agent's model"),
        ("--host-cores", float, 32.0, "cores that decode, a host"),
        ("--lan-gbit", float, 100.0, "from the relay, Gbit/s"),
    ):
        plan.add_argument(name, type=kind, default=default, help=f"{text} ({default:g})")
    plan.add_argument("--rates", type=Path, metavar="FILE", help="rates of another machine, as --json prints them")
    plan.add_argument("--warm", action="store_true", help="connections are still open from the version before")
    plan.add_argument("--json", action="store_true", help="one JSON object")
