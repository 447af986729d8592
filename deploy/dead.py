"""`headway dead`: messages that nobody could process, as they lie in `rl.<run>.dead.>`.

Retrying publishes the original bytes and headers to the original subject. It is refused where order is
meaning: the ledger has one writer, and TASKS is continued from its last message.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import nats.errors
import nats.js.errors

from headway.bus.connection import DEAD_BODY_BYTES_MAX, Bus, StoredMessage
from headway.bus.failpoints import failpoint
from headway.bus.reader import read_all, read_at
from headway.deploy.local import with_bus
from headway.deploy.progress import escape
from headway.deploy.run_folder import RunFolder
from headway.schemas.config import Config
from headway.schemas.errors import InputError, UnavailableError, WireError
from headway.schemas.messages import Dead, render
from headway.schemas.wire import H_MSG_ID

RETRIED = {"rollout": "ROLLOUTS", "stamp": "STAMPS", "weights": "WEIGHTS", "applied": "EVENTS", "event": "EVENTS"}
"""Kinds of subject that may be published again, and the stream that holds the original."""
Say = Callable[[str], None]


async def find(bus: Bus, seq: int) -> Dead:
    """The dead letter at `seq` of EVENTS. Raises InputError."""
    stored = await read_at(bus, "EVENTS", seq)
    if stored is None or bus.subjects.parse(stored.subject)[0] != "dead":
        raise InputError(f"there is no dead letter {seq} in run {bus.run}", hint=f"headway dead ls {bus.run}")
    return await bus.open(Dead, stored)


async def show_all(bus: Bus, say: Say) -> None:
    """One line a letter."""
    count = 0
    async for stored in read_all(bus, "EVENTS", filter_subject=bus.subjects.dead("x").removesuffix("x") + ">"):
        count += 1
        try:
            dead = await bus.open(Dead, stored)
        except WireError as error:
            say(f"{stored.seq:>8}  unreadable: {escape(error.what)}")
            continue
        say(escape(f"{stored.seq:>8}  {dead.reason:<18} {dead.subject} {dead.stream_seq}  {dead.detail}"))
    say(f"{count} dead letters")


async def show(bus: Bus, seq: int, say: Say) -> None:
    """Everything about one letter, its body decoded as far as it goes."""
    dead = await find(bus, seq)
    picture = {**dead.model_dump(mode="python", exclude={"body"}), "body": dead.body}
    say(json.dumps(render(picture), indent=1))


async def retry(bus: Bus, seq: int, say: Say) -> None:
    """Publish the original again, under a dedup id of its own, so that retrying twice stores once.

    Raises InputError when that is not safe or the bytes are gone.
    """
    dead = await find(bus, seq)
    kind = bus.subjects.parse(dead.subject)[0]
    if kind not in RETRIED:
        raise InputError(
            f"a {kind} message cannot be published again",
            why="the ledger and TASKS are continued from their last message; a copy would fork or rewind them",
            hint="nothing is lost: a task that failed for good ends as infra_failed, and its group is declared",
        )
    headers, body = await _original(bus, RETRIED[kind], dead)
    kept = {key: value for key, value in headers.items() if not key.lower().startswith("nats-")}
    try:
        failpoint("publish.again.before")
        ack = await bus.js.publish(dead.subject, body, headers={**kept, H_MSG_ID: f"retry/{seq}"})
        failpoint("publish.again.after")
    except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
        raise UnavailableError(f"{escape(dead.subject)} did not take it", why=repr(error)[:200]) from None
    done = "was published again before" if ack.duplicate else "is published again"
    say(escape(f"dead letter {seq} {done}, as {dead.subject} {ack.seq}"))


async def _original(bus: Bus, suffix: str, dead: Dead) -> tuple[dict[str, str], bytes]:
    """Headers and bytes from the stream that still holds them, else the letter's copy if that is whole."""
    stored: StoredMessage | None = await read_at(bus, suffix, dead.stream_seq) if dead.stream_seq else None
    if stored is not None and stored.subject == dead.subject and stored.body.startswith(dead.body):
        return stored.headers, stored.body
    if len(dead.body) >= DEAD_BODY_BYTES_MAX:
        raise InputError("the original is gone from its stream", why="the letter holds only its first 32 KiB")
    return dead.original_headers, dead.body


async def drop(bus: Bus, seq: int, say: Say) -> None:
    """Delete a letter from its stream."""
    dead = await find(bus, seq)
    try:
        await bus.js.delete_msg(bus.subjects.stream("EVENTS"), seq)
    except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
        raise UnavailableError(f"dead letter {seq} was not deleted", why=repr(error)[:200]) from None
    say(escape(f"dead letter {seq} ({dead.reason}, {dead.subject}) is deleted"))


async def command(options: argparse.Namespace, folder: RunFolder, config: Config, say: Say) -> None:
    if options.verb == "ls":
        await with_bus(config, folder, lambda bus: show_all(bus, say))
        return
    if options.verb == "drop" and not options.yes:
        raise InputError(f"dead letter {options.seq} would be gone for good", hint="add --yes")
    act = {"show": show, "retry": retry, "drop": drop}[options.verb]
    await with_bus(config, folder, lambda bus: act(bus, options.seq, say))
