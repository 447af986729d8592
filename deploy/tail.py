"""`headway tail`: events as they come; with --headers, every message's subject and headers."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Collection, Mapping

from nats.aio.msg import Msg

from headway.bus.connection import Bus, StoredMessage
from headway.bus.reader import follow
from headway.deploy.control import require_up
from headway.deploy.local import with_bus
from headway.deploy.progress import escape
from headway.deploy.run_folder import RunFolder
from headway.schemas.config import Config
from headway.schemas.errors import WireError
from headway.schemas.messages import Applied, Dead, Event
from headway.schemas.wire import H_DIGEST

POLL_S = 0.2
LINE_CHARS_MAX = 2000
Say = Callable[[str], None]


async def line_of(bus: Bus, stored: StoredMessage, kinds: Collection[str]) -> str | None:
    """The line of a message of EVENTS, None when `kinds` leaves it out. Swaps are `applied`, dead letters `dead`."""
    subject = bus.subjects.parse(stored.subject)
    try:
        if subject[0] == "event":
            event = await bus.open(Event, stored)
            name, who, fields = event.name, f"{event.service}/{event.instance}", dict(event.fields)
        elif subject[0] == "applied":
            applied = await bus.open(Applied, stored)
            name, who = "applied", f"agent/{applied.agent}"
            fields = applied.model_dump(mode="json", exclude={"agent", "root"})
        else:
            dead = await bus.open(Dead, stored)
            name, who = "dead", dead.subject
            fields = {"seq": stored.seq, "reason": dead.reason, "detail": dead.detail}
    except WireError as error:
        name, who, fields = "unreadable", stored.subject, {"seq": stored.seq, "why": error.what}
    return None if kinds and name not in kinds else _line(name, who, fields)


def _line(name: str, who: str, fields: Mapping[str, object]) -> str:
    pairs = (f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in fields.items())
    return escape(" ".join((f"{name:<18}", f"{who:<24}", *pairs))[:LINE_CHARS_MAX])


async def tail(bus: Bus, say: Say, kinds: Collection[str], *, start_seq: int | None = None) -> None:
    """Every event from `start_seq` (by default from now) on, for ever."""
    last = await bus.last("EVENTS")
    start = (last.seq + 1 if last else 1) if start_seq is None else start_seq
    async for stored in follow(bus, "EVENTS", start, poll_s=POLL_S):
        if (line := await line_of(bus, stored, kinds)) is not None:
            say(line)


async def tail_headers(bus: Bus, say: Say, kinds: Collection[str]) -> None:
    """Every message that is published from now on, by its headers, for ever; heartbeats have none and are left out."""

    async def show(message: Msg) -> None:
        headers = {k.removeprefix("Headway-").lower(): v for k, v in (message.headers or {}).items() if k != H_DIGEST}
        kind = headers.pop("kind", "")
        if kind and (not kinds or kind in kinds):
            say(_line(kind, message.subject, headers))

    await bus.client.subscribe(bus.subjects.everything, cb=show)
    await asyncio.Event().wait()


async def command(options: argparse.Namespace, folder: RunFolder, config: Config, say: Say) -> None:
    require_up(config, folder)
    follow_it = tail_headers if options.headers else tail
    await with_bus(config, folder, lambda bus: follow_it(bus, say, options.kind))
