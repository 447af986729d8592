"""The grammar of record and replay."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

ALLOW_CODE = "call the reward functions that a recording names, of modules that are installed here"


def add_recording(commands: Any) -> None:
    """Add the parsers."""
    record: ArgumentParser = commands.add_parser("record", help="a run's streams, and what they name, into one file")
    record.add_argument("run", help="name or folder of a run")
    record.add_argument(
        "--out", type=Path, metavar="FILE", help="default: <run>.hwr in the run folder; it is gone on with"
    )
    record.add_argument("--follow", action="store_true", help="go on until the run ends")
    record.add_argument(
        "--checkpoints",
        choices=["none", "anchors", "all"],
        default="anchors",
        help="which of those that the store holds; anchors: one in ten",
    )
    record.add_argument("--since", metavar="TIME", help="leave out what was stored before; ISO 8601")
    record.add_argument("--until", metavar="TIME", help="leave out what was stored later")
    record.add_argument("--steps", metavar="A..B", help="only what those steps settle, and the versions they made")
    record.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="KIND",
        help="only these kinds of message, such as rollout; repeats",
    )

    replay: ArgumentParser = commands.add_parser(
        "replay", help="a recording's streams on a server again; recorded steps, rollouts and decisions once more"
    )
    replay.add_argument(
        "words",
        nargs="+",
        metavar="FILE | step N SOURCE | rollout ID SOURCE | check SOURCE | bundle FILE",
        help="SOURCE is a run, by name or folder, or a recording",
    )
    replay.add_argument("--allow-code", action="store_true", help=ALLOW_CODE)
    replay.add_argument("--into", metavar="URL", help="a NATS server; default: an embedded one")
    replay.add_argument("--run-dir", type=Path, metavar="FOLDER", help="default: runs/<run>-replay")
    replay.add_argument("--speed", choices=["1x", "10x", "max"], default="max")
    replay.add_argument("--until", metavar="MOMENT", help="step=12, seq=345, seq=LEDGER:7 or 'reward<0'")
