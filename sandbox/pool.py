"""Boxes made ahead, so that a session does not wait for one."""

from __future__ import annotations

import asyncio

from headway.sandbox.isolation import Box, BoxFailed, Sandbox
from headway.schemas.errors import UnavailableError

REFILL_PER_S_MAX = 100.0
REFILL_FAILURES_MAX = 5
REFILL_RETRY_S = 0.5


class Pool:
    """At most `size` warm boxes, refilled one at a time and at most REFILL_PER_S_MAX a second."""

    def __init__(self, sandbox: Sandbox, size: int) -> None:
        self._sandbox = sandbox
        self._warm: asyncio.Queue[Box] = asyncio.Queue(size)
        self._room = asyncio.Event()

    @property
    def warm(self) -> int:
        return self._warm.qsize()

    async def take(self) -> Box:
        """A fresh box, used by nobody before. Raises BoxFailed."""
        while not self._warm.empty():
            box = self._warm.get_nowait()
            self._room.set()
            if box.alive():
                return box
            await box.destroy()
        return await self._sandbox.create()

    async def close(self) -> None:
        """Destroy the warm boxes, once nobody refills them any more."""
        while not self._warm.empty():
            await self._warm.get_nowait().destroy()

    async def run(self) -> None:
        """Refill until cancelled. Raises UnavailableError after REFILL_FAILURES_MAX failures in a row."""
        failures = 0
        while True:
            while not self._warm.full():
                try:
                    self._warm.put_nowait(await self._sandbox.create())
                    failures = 0
                except BoxFailed as error:
                    failures += 1
                    if failures >= REFILL_FAILURES_MAX:
                        raise UnavailableError(f"{failures} boxes in a row did not start", why=str(error)) from None
                    await asyncio.sleep(REFILL_RETRY_S)
                await asyncio.sleep(1 / REFILL_PER_S_MAX)
            self._room.clear()
            await self._room.wait()
