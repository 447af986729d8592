"""CPU cost of boxes and of a typical rollout: `python tests/bench/sandbox.py [rollouts]`.

CPU-ms are those of this process (the sandbox host without the bus) plus those of the fork server and of every
ended box, as the kernel accounts them. The last line is JSON for the benchmark collector.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from headway.sandbox.expr_workspaces import ExprWorkspaces
from headway.sandbox.host import Host, HostSettings
from headway.sandbox.isolation import Limits, Sandbox
from headway.sandbox.pool import Pool
from headway.sandbox.tasks.build import build
from headway.sandbox.tasks.expr import load_task_set

ROLLOUT_CPU_MS_MAX = 60.0


async def measure(sandbox: Sandbox, count: int, once: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """(CPU-ms, wall-ms) of one `once()`, the mean of `count` in a row."""
    host_s, boxes_s, wall_s = time.process_time(), await sandbox.cpu_s(), time.perf_counter()
    for _ in range(count):
        await once()
    host_s, wall_s = time.process_time() - host_s, time.perf_counter() - wall_s
    boxes_s = await sandbox.cpu_s() - boxes_s
    return (host_s + boxes_s) / count * 1e3, wall_s / count * 1e3


async def main(count: int) -> None:
    ids = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        build(0, Path(folder), sessions=0)
        task_set = load_task_set(Path(folder))
    limits = Limits()
    sandbox = await Sandbox.start(limits)
    settings = HostSettings(run="r", host="h", key=bytes(32), limits=limits, sessions_max=64, idle_s_max=60.0)
    host = Host(settings, Pool(sandbox, 1), ExprWorkspaces(task_set))

    async def ask(verb: str, **fields: Any) -> dict[str, Any]:
        return await host.verbs[verb]({"command_id": f"c{next(ids)}", **fields})

    async def create() -> str:
        named = {"rollout_id": "g", "attempt": "a", "task_set": task_set.digest, "task_id": "train-000-0"}
        return str((await ask("create", **named))["box"])

    async def cycle(*calls: tuple[str, int]) -> None:
        """A box with so many calls of each tool: commands are charged when their box has ended."""
        box = await create()
        for name, times in calls:
            for _ in range(times):
                await ask("tool", box=box, name=name, argument="x*5-7" if name == "w" else "")
        await ask("destroy", box=box)

    async def rollout() -> None:
        box = await create()
        for name in "rwtwt":
            await ask("tool", box=box, name=name, argument="x*5-7" if name == "w" else "")
        await ask("grade", box=box, submitted=True, malformed=False)

    async def bare_grade() -> None:
        await ask("grade", box=await create(), submitted=True, malformed=False)

    await rollout()
    empty, empty_wall = await measure(sandbox, count, cycle)
    rows = {"create and destroy": (empty, empty_wall)}
    for label, name in (("r", "r"), ("w", "w"), ("t", "t")):
        cpu, wall = await measure(sandbox, max(count // 10, 1), lambda name=name: cycle((name, 20)))
        rows[label] = ((cpu - empty) / 20, (wall - empty_wall) / 20)
    cpu, wall = await measure(sandbox, count, bare_grade)
    rows["grade"] = (cpu - empty, wall - empty_wall)
    rows["rollout (create r w t w t grade)"] = await measure(sandbox, count, rollout)
    wall_s = time.perf_counter()
    await asyncio.gather(*(rollout() for _ in range(32)))
    rate = 32 / (time.perf_counter() - wall_s)
    await sandbox.close()
    print(f"{'':34} CPU-ms  wall-ms   ({os.cpu_count()} cores, {count} each)")
    for label, (cpu, wall) in rows.items():
        print(f"{label:34} {cpu:6.2f}  {wall:7.2f}")
    print(f"32 rollouts at once: {rate:.0f} rollouts/s")
    value = round(rows["rollout (create r w t w t grade)"][0], 2)
    figures = {f"{label.split(' (')[0].replace(' ', '_')}_cpu_ms": round(cpu, 2) for label, (cpu, _) in rows.items()}
    figures["rollouts_per_s"] = round(rate, 1)
    targets = {"rollout_cpu_ms": [value, "<=", ROLLOUT_CPU_MS_MAX, value <= ROLLOUT_CPU_MS_MAX]}
    print(json.dumps({"name": "sandbox", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100))
