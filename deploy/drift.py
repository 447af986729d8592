"""`headway topology plan | apply`: what the server holds against what `bus.topology` declares.

Invariants: applying twice changes nothing; nothing is changed when anything is refused; no stored message
is lost by an apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, StreamConfig
from nats.js.errors import NotFoundError

from headway.bus.connection import Bus
from headway.bus.health import require_jetstream
from headway.bus.topology import AGENTS_CONSUMER, Topology
from headway.schemas.errors import ConfigError, UnavailableError

FIXED = frozenset({"retention", "storage", "sealed", "ack_policy", "deliver_policy", "replay_policy", "max_waiting"})
"""What a server cannot change, or only by forgetting messages."""
UNSET = {"max_msgs": -1, "max_msgs_per_subject": -1, "max_age": 0, "max_consumers": -1, "sealed": False}
"""Limits that nobody declares: a stream that has one forgets what the ledger still needs."""
NANOSECONDS = frozenset({"max_age", "duplicate_window", "ack_wait"})
INSUFFICIENT_STORAGE = 10047


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A stream or consumer that differs; `fields` maps a key to (found, declared), empty when it is missing."""

    name: str
    fields: Mapping[str, tuple[Any, Any]]
    stored_bytes: int = 0
    declared: StreamConfig | ConsumerConfig

    @property
    def missing(self) -> bool:
        return not self.fields

    def lines(self) -> list[str]:
        if self.missing:
            return [f"+ {self.name}"]
        fixed = dict.fromkeys(self.fields.keys() & FIXED, " (cannot be changed)")
        return [f"~ {self.name}"] + [
            f"    {key}: {_shown(key, found)} -> {_shown(key, declared)}{fixed.get(key, '')}"
            for key, (found, declared) in self.fields.items()
        ]

    def refusal(self) -> ConfigError | None:
        """Why this cannot be applied, if so."""
        fixed = sorted(self.fields.keys() & FIXED)
        if fixed:
            return ConfigError(
                f"{self.name} has {', '.join(f'{key} = {self.fields[key][0]}' for key in fixed)}",
                why=f"the server cannot change {', '.join(fixed)} of what exists",
                hint=f"start the run under another name, or back up and delete {self.name.partition(' ')[0]}",
            )
        if "max_bytes" in self.fields and 0 < self.fields["max_bytes"][1] < self.stored_bytes:
            return ConfigError(
                f"{self.name} holds {self.stored_bytes} bytes and would be cut to {self.fields['max_bytes'][1]}",
                why="a smaller limit forgets the oldest messages",
                hint="raise bus.max_stream_bytes",
            )
        return None


async def plan(bus: Bus, topology: Topology) -> list[Change]:
    """What `apply` would do, in its order. Raises UnavailableError."""
    await require_jetstream(bus.js)
    changes: list[Change] = []
    for stream in topology.streams():
        config, stored_bytes = await _found(bus.js, str(stream.name))
        changes += _difference(str(stream.name), config, stream, UNSET, stored_bytes)
    tasks = bus.subjects.stream("TASKS")
    consumer, _ = await _found(bus.js, tasks, AGENTS_CONSUMER)
    return changes + _difference(f"{tasks} consumer {AGENTS_CONSUMER}", consumer, topology.agents_consumer(), {}, 0)


async def apply(bus: Bus, topology: Topology) -> list[Change]:
    """Create what is missing and change what differs; what was done.

    Raises ConfigError when something cannot be changed (nothing has been changed then), UnavailableError.
    """
    changes = await plan(bus, topology)
    for change in changes:
        if refused := change.refusal():
            raise refused
    for change in changes:
        try:
            await _carry_out(bus, change)
        except nats.js.errors.APIError as error:
            full = error.err_code == INSUFFICIENT_STORAGE
            raise UnavailableError(
                f"the server refuses {change.name}",
                why=str(error.description),
                hint="lower bus.max_stream_bytes, which the server reserves for each of six streams, or free disk space"
                if full
                else "`headway topology plan` shows what differs; another stream may hold the same subjects",
            ) from None
    return changes


async def _carry_out(bus: Bus, change: Change) -> None:
    if isinstance(change.declared, ConsumerConfig):
        await bus.js.add_consumer(bus.subjects.stream("TASKS"), change.declared)
    elif change.missing:
        await bus.js.add_stream(change.declared)
    else:
        await bus.js.update_stream(change.declared)


async def _found(js: JetStreamContext, stream: str, consumer: str = "") -> tuple[dict[str, Any] | None, int]:
    """The config as the server has it, and the stored bytes; None when there is none."""
    try:
        if consumer:
            return (await js.consumer_info(stream, consumer)).config.as_dict(), 0
        info = await js.stream_info(stream)
        return info.config.as_dict(), int(info.state.bytes)
    except NotFoundError:
        return None, 0
    except (nats.errors.Error, nats.js.errors.Error, OSError, TimeoutError) as error:
        raise UnavailableError(f"the server does not describe {stream}", why=repr(error)[:200]) from None


def _difference(
    name: str,
    found: dict[str, Any] | None,
    declared: StreamConfig | ConsumerConfig,
    unset: Mapping[str, Any],
    stored_bytes: int,
) -> list[Change]:
    if found is None:
        return [Change(name=name, fields={}, declared=declared)]
    wanted = {**unset, **{key: value for key, value in declared.as_dict().items() if value not in (None, [], {})}}
    fields = {key: (found.get(key), value) for key, value in wanted.items() if found.get(key, value) != value}
    return [Change(name=name, fields=fields, stored_bytes=stored_bytes, declared=declared)] if fields else []


def _shown(key: str, value: Any) -> str:
    return f"{value / 1e9:g} s" if key in NANOSECONDS and value is not None else str(getattr(value, "value", value))


async def command(bus: Bus, topology: Topology, say: Callable[[str], None], *, change: bool) -> None:
    """Print the difference, and remove it if `change`."""
    found = await (apply if change else plan)(bus, topology)
    for line in (line for one in found for line in one.lines()):
        say(line)
    count = f"{len(topology.streams())} streams and 1 consumer of run {topology.run}"
    if not found:
        say(f"no drift: {count} are as declared")
    elif change:
        say(f"applied: {count} are as declared")
    elif any(one.refusal() for one in found):
        say("`headway topology apply` would refuse: what cannot be changed is marked, and no stored message is lost")
    else:
        say("`headway topology apply` would do this")
