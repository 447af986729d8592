from __future__ import annotations

import asyncio
import contextlib

from headway.bus.ending import ending


async def test_a_loop_ends_although_its_cancellation_was_swallowed() -> None:
    async def loop() -> int:
        rounds = 0
        while not ending():
            rounds += 1
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return rounds

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    task.cancel()
    assert await asyncio.wait_for(task, 5) == 1
