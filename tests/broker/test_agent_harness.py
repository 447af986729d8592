"""Sessions that a harness drives by OpenAI's client, through a real agent, engine and nats-server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from headway.rollout_agent import harness as harnesses
from headway.rollout_agent.harness import HarnessTask
from headway.schemas.version import Version


async def two_turns(task: HarnessTask) -> None:
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": "Hello <|eos|>"}]
        for _ in range(2):
            found = await client.chat.completions.create(model=task.model, messages=messages)
            messages += [found.choices[0].message.to_dict(), {"role": "user", "content": "Go on."}]
            await asyncio.sleep(0.1)


async def test_sessions_of_a_harness_are_recorded_across_a_swap_and_replay_bit_for_bit(
    make_stand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harnesses, "load", lambda spec, key: two_turns)
    stand = await make_stand(agent__harness="mine:two_turns")
    async with stand.agent():
        await stand.until_served(0)
        await stand.tasks(24)
        await stand.until(lambda: _sampled(stand))
        await stand.step(1)
        rollouts = await stand.until_rollouts(24, 40)
        await stand.until_all_acked()
    for rollout in rollouts:
        assert rollout.outcome == "ok", rollout.reason
        assert rollout.trajectory.turns == 2
        assert rollout.trajectory.stop_reason == "submitted"
        stand.assert_replays(rollout.trajectory)
    versions = {span.version for rollout in rollouts for span in rollout.trajectory.spans}
    assert versions == {Version(0, 0), Version(0, 1)}


async def _sampled(stand: Any) -> bool:
    return bool(stand.engine.core.counters.sampled_tokens > 60)
