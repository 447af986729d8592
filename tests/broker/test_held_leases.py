"""What a killed agent held is begun again at once, not when the server has waited for it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from headway.bus.connection import Bus
from headway.bus.held import Held
from headway.bus.leases import TaskQueue
from headway.bus.topology import Topology

from ..conftest import NatsProcess
from .test_bus_promises import make_task

ACK_WAIT_S = 60.0
SOON_S = 20.0


async def queue_of_long_waits(bus: Bus, tasks: int, held: Held) -> TaskQueue:
    await Topology(run="test", ack_wait_s=ACK_WAIT_S).apply(bus.js)
    for index in range(tasks):
        await bus.publish(bus.subjects.task("expr"), make_task(index))
    return TaskQueue(bus, held)


async def test_what_an_agent_held_when_everything_was_killed_is_begun_again_at_once(
    bus: Bus, nats_process: NatsProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "leases"
    queue = await queue_of_long_waits(bus, 4, Held(folder, ACK_WAIT_S, time.time))
    acked, given, kept, other = await queue.fetch(4)
    await acked.ack()
    await given.give_back(ACK_WAIT_S)
    await bus.client.flush()
    nats_process.kill()
    await nats_process.start()
    while not bus.client.is_connected:
        await asyncio.sleep(0.02)
    again = TaskQueue(bus, Held(folder, ACK_WAIT_S, time.time))
    await again.give_back_left()
    found: set[int] = set()
    async with asyncio.timeout(SOON_S):
        while not found >= {kept.seq, other.seq}:
            found |= {lease.seq for lease in await again.fetch(4)}


async def test_what_others_may_have_by_now_is_left_to_them(bus: Bus, tmp_path: Path) -> None:
    now_s = 1_000.0
    queue = await queue_of_long_waits(bus, 3, Held(tmp_path, ACK_WAIT_S, lambda: now_s))
    renewed, old, adopted = await queue.fetch(3)
    now_s += ACK_WAIT_S - 1
    await renewed.renew()
    adopted.adopt(adopted._message)
    now_s += 2
    again = TaskQueue(bus, Held(tmp_path, ACK_WAIT_S, lambda: now_s))
    await again.give_back_left()
    assert {lease.seq for lease in await again.fetch(3)} == {renewed.seq, adopted.seq}
    assert old.kept


async def test_a_folder_that_cannot_be_written_costs_the_wait_alone(bus: Bus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    queue = await queue_of_long_waits(bus, 1, Held(tmp_path / "file" / "leases", ACK_WAIT_S, time.time))
    [lease] = await queue.fetch(1)
    await lease.renew()
    await lease.ack()
    await queue.give_back_left()
    assert await queue.fetch(1, 0.3) == []
