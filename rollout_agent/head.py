"""Which weight version is the head: read from the ledger, never from an announcement.

An announcement only wakes the reader up and its content is never read, so a lost one delays by POLL_S_MAX at most
and a forged one, which the ledger does not bind, changes nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from nats.aio.msg import Msg

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader, Link
from headway.schemas.chat import require_same_chat
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError, UnavailableError
from headway.schemas.ledger import Counters, Drops, Fork, Genesis, Step
from headway.schemas.version import Version

POLL_S, POLL_S_MAX = 1.0, 8.0
"""The ledger is read so long after something new was in it, then less and less often: agents that only wait would
otherwise ask a large fleet's bus more than all that work. A session that starts reads it anyway."""
LEDGER_AWAY_S_MAX = 120.0


@dataclass(frozen=True, slots=True)
class Head:
    """A version and what the ledger binds it to. `seen_s`: when it was read, by the event loop's clock."""

    version: Version
    manifest: str
    root: str
    seen_s: float


class HeadTracker:
    """Follows the ledger from its start. `changed` is set whenever there is a new head."""

    def __init__(self, bus: Bus, config: Config) -> None:
        self._bus, self._config = bus, config
        self._reader = LedgerReader(bus)
        self._poke = asyncio.Event()
        self._reads_begun = self._reads_done = 0
        self._read = asyncio.Condition()
        self.head: Head | None = None
        self.genesis: Genesis | None = None
        self.counters = Counters()
        self.changed = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled.

        Raises ConfigError when the genesis was made with another config or chat template, PromiseViolated when
        the chain breaks, UnavailableError after LEDGER_AWAY_S_MAX without an answer.
        """
        await self._bus.client.subscribe(self._bus.subjects.every_weights, cb=self._on_announcement)
        clock = asyncio.get_running_loop().time
        answered_s, wait_s = clock(), POLL_S
        while True:
            self._poke.clear()
            self._reads_begun += 1
            try:
                async for link in self._reader.links():
                    self._take(link)  # one by one: a read that fails halfway has moved the reader's tail
                    wait_s = POLL_S
                answered_s = clock()
                async with self._read:
                    self._reads_done = self._reads_begun
                    self._read.notify_all()
            except UnavailableError:
                if clock() - answered_s > LEDGER_AWAY_S_MAX:
                    raise
            try:
                async with asyncio.timeout(wait_s):
                    await self._poke.wait()
            except TimeoutError:
                wait_s = min(2 * wait_s, POLL_S_MAX)

    async def refresh(self) -> None:
        """Return once the ledger was read, from a moment after this call, to its end.

        Whoever holds a task then knows every version that its issue was based on, announced or not.
        """
        wanted = self._reads_begun + 1
        self._poke.set()
        async with self._read:
            await self._read.wait_for(lambda: self._reads_done >= wanted)

    def lag_of(self, version: Version) -> int:
        """How many steps `version` is behind the head; a version of another epoch is far behind."""
        if self.head is None:
            return 0
        return self.head.version.n - version.n if self.head.version.epoch == version.epoch else 1 << 30

    def _take(self, link: Link) -> None:
        body, seen_s = link.record.body, asyncio.get_running_loop().time()
        if isinstance(body, Step | Drops):
            self.counters = body.counters
        if isinstance(body, Genesis):
            if body.config_digest != self._config.shared_digest():
                raise ConfigError(
                    "this agent's run.toml differs from the one the run began with",
                    why="the genesis record names another config digest",
                    hint="copy the run's own run.toml here",
                )
            require_same_chat(body.chat, self._config)
            self.genesis, found = body, Head(link.version, body.base_manifest, body.base_root, seen_s)
        elif isinstance(body, Step | Fork):
            found = Head(body.version, body.manifest, body.root, seen_s)
        else:
            return
        self.head = found
        self.changed.set()

    async def _on_announcement(self, message: Msg) -> None:
        self._poke.set()
