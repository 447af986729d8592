"""`headway pause|resume|drain|rollback`: what a person may tell a run that is up, or down.

Instances are those whose heartbeats are heard; each is asked by request/reply and answers with its status.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.bus.connection import Bus
from headway.bus.service import ENDED
from headway.deploy.fleet import Fleet, listen
from headway.deploy.local import with_bus
from headway.deploy.progress import escape
from headway.deploy.run_folder import RunFolder
from headway.schemas import signing
from headway.schemas.config import Config
from headway.schemas.errors import InputError, UnavailableError
from headway.schemas.messages import Event
from headway.schemas.version import Version
from headway.trainer.rollback import rollback as fork_ledger

REPLY_S_MAX = 5.0
BEAT_LATE_S = 3.0
"""After the time that a drain has: for the process to end, and its last beat to arrive."""
POLL_S = 0.1
ROLLED_BACK = "rolled_back"
Say = Callable[[str], None]


def require_up(config: Config, folder: RunFolder) -> None:
    """Raises UnavailableError when the run's embedded server is not running."""
    if not (config.bus.url or os.environ.get("HEADWAY_NATS_URL") or folder.url_file.exists()):
        raise UnavailableError(f"run {config.run.name} is not up", hint=f"headway up --config {folder.config_file}")


async def tell(
    bus: Bus, service: str, instance: str | None, verb: str, say: Say, fields: dict[str, Any] | None = None
) -> list[str]:
    """Send `verb` to one instance of `service`, or to all that are heard: who took it. Raises UnavailableError."""
    named = [instance] if instance else [beat.instance for beat in (await listen(bus)).of(service)]
    if not named:
        raise UnavailableError(f"no {service} of run {bus.run} is heard", hint=f"headway top {bus.run}")
    for name in named:
        status = await bus.request(bus.subjects.ctl(service, name, verb), fields or {}, timeout_s=REPLY_S_MAX)
        say(f"{service} {name}: {verb} taken, phase {escape(str(status.get('phase', '?')))}")
    return named


async def drain_agents(bus: Bus, instance: str | None, within_s: float, say: Say) -> None:
    """Drain agents, and wait for their last beats. Raises UnavailableError naming those that do not end in time."""
    clock = asyncio.get_running_loop().time
    fleet = Fleet(clock=clock)
    await fleet.hear(bus)
    named = await tell(bus, "agent", instance, "drain", say, {"within_s": within_s})
    began_s, open_s = clock(), within_s + BEAT_LATE_S
    while named and clock() < began_s + open_s:
        await asyncio.sleep(POLL_S)
        for beat in [b for b in fleet.of("agent") if b.instance in named and b.text("phase") == ENDED]:
            named.remove(beat.instance)
            left = f"{beat.number('ok'):.0f} sessions finished, {beat.number('handed_back'):.0f} handed back"
            say(f"agent {beat.instance}: ended after {beat.heard_s - began_s:.1f} s; {left}")
    if named:
        raise UnavailableError(
            f"no last word of agent {', '.join(named)} within {open_s:g} s",
            hint=f"if `headway top {bus.run} --once` still shows it, stop its unit: what it saved goes on elsewhere",
        )


async def require_no_trainer(bus: Bus, why: str) -> None:
    """Raises InputError while a trainer is heard."""
    for beat in (await listen(bus)).of("trainer"):
        raise InputError(
            f"trainer {beat.instance} is running",
            why=why,
            hint="stop `headway up` (or the trainer's unit), do it again, start the trainer again",
        )


async def rollback(bus: Bus, key: bytes, base: Version, say: Say) -> None:
    """Fork the ledger at `base`. Raises InputError while a trainer is heard."""
    await require_no_trainer(
        bus, "a rollback is for a run whose trainer has stopped; it would be fenced out in the middle of a step"
    )
    fork = await fork_ledger(bus, key, base)
    event = Event(
        service="headway", instance="cli", name=ROLLED_BACK, fields={"version": str(fork.version), "base": str(base)}
    )
    await bus.publish(bus.subjects.event("headway", ROLLED_BACK), event)
    say(f"version {fork.version} has the weights of {base}; training goes on from it at the next start")


async def command(options: argparse.Namespace, folder: RunFolder, config: Config, say: Say) -> None:
    """Run one of the four commands."""
    within_s = getattr(options, "within", None)
    if within_s is not None and options.service != "agent":
        raise InputError(f"{options.service} takes no --within", why="only agents have sessions to save")
    if options.command == "rollback":
        key = signing.load_key(Path(folder.environment("trainer", config)["HEADWAY_KEYS_DIR"]) / "trainer.key")
        await with_bus(config, folder, lambda bus: rollback(bus, key, options.to, say))
        return
    require_up(config, folder)
    service = options.service if options.command == "drain" else "dispatcher"
    instance = options.instance if options.command == "drain" else None
    if within_s is not None:
        await with_bus(config, folder, lambda bus: drain_agents(bus, instance, within_s, say))
        return
    await with_bus(config, folder, lambda bus: tell(bus, service, instance, options.command, say))
