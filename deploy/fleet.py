"""Who is alive: the newest heartbeat of every service instance, as heard on `rl.<run>.beat.>`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg

from headway.bus.connection import Bus

LISTEN_S = 2.5
"""Two beats and a half: who is silent that long is not there."""
INSTANCES_MAX = 4096
BEAT_BYTES_MAX = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One instance's last sign of life, at `heard_s` of the listener's clock."""

    service: str
    instance: str
    heard_s: float
    fields: dict[str, Any]

    def text(self, key: str) -> str:
        return str(self.fields.get(key, ""))[:80]

    def number(self, key: str) -> float:
        value = self.fields.get(key, 0)
        return float(value) if isinstance(value, int | float) else 0.0


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Beats by instance. What comes over the wire is bounded and shown only escaped."""

    clock: Callable[[], float]
    beats: dict[tuple[str, str], Beat] = field(default_factory=dict)

    async def hear(self, bus: Bus) -> None:
        """Listen from now on."""
        every = bus.subjects.beat("x", "x").removesuffix("x.x") + ">"

        async def take(message: Msg) -> None:
            self.take(bus.subjects.parse(message.subject), message.data)

        await bus.client.subscribe(every, cb=take)

    def take(self, tokens: tuple[str, ...], data: bytes) -> None:
        """Take a heartbeat; one that is malformed is no sign of life."""
        if len(tokens) != 3 or len(data) > BEAT_BYTES_MAX:
            return
        try:
            fields = json.loads(data)
        except ValueError:
            return
        key = tokens[1], tokens[2]
        if isinstance(fields, dict) and (key in self.beats or len(self.beats) < INSTANCES_MAX):
            self.beats[key] = Beat(service=key[0], instance=key[1], heard_s=self.clock(), fields=fields)

    def of(self, service: str) -> Iterator[Beat]:
        return (beat for (name, _), beat in sorted(self.beats.items()) if name == service)


async def listen(bus: Bus, seconds: float = LISTEN_S) -> Fleet:
    """Everyone who beats within `seconds`."""
    fleet = Fleet(clock=asyncio.get_running_loop().time)
    await fleet.hear(bus)
    await bus.client.flush()
    await asyncio.sleep(seconds)
    return fleet
