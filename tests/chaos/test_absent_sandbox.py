"""A sandbox that is away costs a session time and no attempt: nothing has been sampled yet."""

from __future__ import annotations

import asyncio

import pytest

from headway.bus import rpc
from headway.bus.connection import Bus
from headway.rollout_agent import tools
from headway.rollout_agent.tools import BusSandbox, SandboxTrouble
from headway.schemas import expr_protocol as p
from headway.schemas.ids import sampling_seed, train_rollout_id
from headway.schemas.messages import Task

ROLLOUT = train_rollout_id(0, 0)
TASK = Task(
    rollout_id=ROLLOUT,
    purpose="train",
    env="expr",
    task_set="0" * 64,
    task_id="t",
    group=0,
    sample=0,
    temperature=1.0,
    sampling_seed=sampling_seed(0, ROLLOUT),
    pinned=None,
    groups_issued=1,
    eval_blocks_issued=0,
    last_of_unit=True,
)


async def test_a_session_waits_for_a_sandbox_to_appear(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "BUSY_WAIT_S", 0.01)
    sandbox = BusSandbox(bus=bus, region="east", command_timeout_s=1.0)
    waiting = asyncio.create_task(sandbox.create(TASK, "a"))
    await asyncio.sleep(0.02 * tools.ASK_AGAIN_MAX + 0.2)
    assert not waiting.done()
    assert sandbox.waiting == 1, "the agent would take more tasks"

    async def create(fields: dict[str, object]) -> dict[str, object]:
        return p.CreateReply(host="h", box="b").model_dump()

    async with asyncio.TaskGroup() as tasks:
        await rpc.serve(bus.client, bus.subjects.sandbox_create("east"), create, tasks=tasks)
        box = await asyncio.wait_for(waiting, 5)
    assert sandbox.waiting == 0
    with pytest.raises(SandboxTrouble):  # its host is not there: the box is gone, and no other will do
        await box.tool("r", "")
    assert sandbox.waiting == 0
