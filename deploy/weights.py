"""`headway weights ledger`: which agent took which version when, from what they published."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.deploy.local import with_bus
from headway.deploy.progress import escape
from headway.deploy.run_folder import RunFolder
from headway.schemas.config import Config
from headway.schemas.errors import WireError
from headway.schemas.messages import Applied
from headway.schemas.version import Version

Say = Callable[[str], None]
Swaps = dict[Version, dict[str, Applied]]
LEGEND = "each swap: ms from knowing of the version to serving it, ms staged, ms paused, way"


async def swaps(bus: Bus) -> Swaps:
    """Version -> agent ("region/agent") -> its newest swap to it."""
    found: Swaps = {}
    async for stored in read_all(bus, "EVENTS", filter_subject=f"rl.{bus.run}.applied.>"):
        try:
            applied = await bus.open(Applied, stored)
        except WireError:
            continue  # the audit counts it
        found.setdefault(applied.version, {})[f"{applied.region}/{applied.agent}"] = applied
    return found


def table(found: Swaps) -> Iterator[str]:
    """A row a version, a column an agent; `-` where an agent went past it or has not come to it."""
    agents = sorted({agent for row in found.values() for agent in row})
    yield LEGEND
    rows = [["version", *agents]]
    for version in sorted(found):
        rows.append([str(version), *(_cell(found[version].get(agent)) for agent in agents)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield escape("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(swap: Applied | None) -> str:
    return "-" if swap is None else f"{swap.head_ms:.0f} {swap.stage_ms:.0f} {swap.pause_ms:.0f} {swap.way}"


async def command(options: argparse.Namespace, folder: RunFolder, config: Config, say: Say) -> None:
    for line in table(await with_bus(config, folder, swaps)):
        say(line)
