"""Nobody looks for the reason of a stand-still: one line names the service and phase everything waits for."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from functools import partial
from typing import Any

import pytest

from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.deploy.local import with_bus
from headway.rollout_agent.tools import BusSandbox
from headway.schemas.messages import Task

STEPS = 6
STALL_S = 3.0


@pytest.mark.parametrize(
    ("victims", "named"),
    [
        (["east-engine-0", "west-engine-0"], r"-engine|engine"),
        (["east-sandbox-0", "west-sandbox-0"], r"sandbox"),
        (["dispatcher"], r"no heartbeat of dispatcher"),
        (["trainer"], r"no heartbeat of trainer"),
    ],
)
def test_a_hanging_service_is_named_and_the_run_goes_on_after_it(launch: Any, victims: list[str], named: str) -> None:
    run = launch(STEPS, {"bus.stall_warning_s": STALL_S})
    run.until_step(2)
    pids = [run.pids()[name] for name in victims]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    stall = rf"no step, rollout or swap for {STALL_S:g} s: .*({named})"
    run.until_said(stall)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    run.end().assert_promises(STEPS)


def test_sandboxes_that_refuse_are_named_and_the_run_goes_on_after_it(launch: Any) -> None:
    steps = 30
    run = launch(steps, {"bus.stall_warning_s": STALL_S, "sandbox.max_boxes": 2})
    run.until_step(1)

    config, folder = run.folder.config(), run.folder
    login = folder.environment("agent", config)

    async def hoard(bus: Bus) -> None:
        """Take the boxes of all hosts, as sessions of an agent that never end would."""
        task = await bus.open(Task, await anext(read_all(bus, "TASKS")))
        dispatcher = partial(bus.subjects.ctl, "dispatcher", "dispatcher")
        await bus.request(dispatcher("pause"), {}, timeout_s=5.0)
        user, password = login["HEADWAY_NATS_USER"], login["HEADWAY_NATS_PASSWORD"]
        async with await Bus.connect(folder.url_file.read_text(), bus.run, user=user, password=password) as agent:
            regions = [BusSandbox(bus=agent, region=name, command_timeout_s=60.0) for name in ("east", "west")]
            boxes = await asyncio.gather(*(region.create(task, f"hoard{n}") for region in regions for n in range(2)))
            await bus.request(dispatcher("resume"), {}, timeout_s=5.0)
            await asyncio.to_thread(run.until_said, rf"no step, rollout or swap for {STALL_S:g} s: .*for a sandbox")
            for box in boxes:
                await box.destroy()

    async def within_a_minute() -> None:
        async with asyncio.timeout(60):
            await with_bus(config, folder, hoard)

    asyncio.run(within_a_minute())
    run.end().assert_promises(steps)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a read-only store needs root")
def test_a_store_that_turns_read_only_ends_the_run_by_name_and_the_next_start_goes_on(launch: Any) -> None:
    run = launch(STEPS)
    run.until_step(2)
    store = str(run.folder.path / "store")
    subprocess.run(["mount", "--bind", store, store], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", store], check=True)
        assert run.up.wait(120) == 69
    finally:
        subprocess.run(["umount", store], check=True)
    assert re.search(r"headway: trainer ended .*\n +why: put run/.*Read-only", run.output)
    run.start()
    run.end().assert_promises(STEPS)
