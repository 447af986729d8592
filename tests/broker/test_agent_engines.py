"""An agent and its engines: all at the head, the others go on when one is lost, none is overfilled."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from headway.bus.service import Service
from headway.kernels.hf import save_folder
from headway.rollout_agent import client as clients
from headway.rollout_agent.engine import server as engine_server
from headway.rollout_agent.engine.core import Loads
from headway.rollout_agent.engine.service import model_config
from headway.schemas.version import Version
from headway.weight_sync import torch_apply

from .agent_stand import in_phase


async def test_an_agent_keeps_several_engines_at_the_head_and_busy(make_stand: Any) -> None:
    stand = await make_stand()
    stand.sandbox.tool_s = 0.02
    second = await stand.another_engine()
    async with stand.agent(engines=(stand.engine, second)):
        await stand.until_served(0)
        await stand.tasks(16)
        await stand.step(1)
        rollouts = await stand.until_rollouts(16)
        await stand.until_served(1)
    for rollout in rollouts:
        assert rollout.outcome == "ok"
        stand.assert_replays(rollout.trajectory)
    for engine in (stand.engine, second):
        assert engine.core.weights.version == "0.1"
        assert engine.core.counters.requests > 4


async def test_an_engine_that_comes_back_with_old_weights_serves_again_only_when_proven_and_others_go_on(
    make_stand: Any,
) -> None:
    stand = await make_stand()
    stand.sandbox.tool_s = 0.1
    second = await stand.another_engine()
    async with stand.agent(engines=(stand.engine, second)) as service:
        await stand.until_served(0)
        await stand.until(lambda: _engines(service, 2))
        await stand.tasks(12)
        await stand.until(stand.sandbox.is_working)
        await second.kill()
        await stand.until(lambda: _engines(service, 1))
        await stand.step(1)
        await stand.until_served(1)
        assert (await stand.until_rollouts(12))[-1].outcome == "ok", "the engine that stayed did not go on"
        await second.start()
        await _load_old_weights_as(second, stand, "0.1")
        await stand.until(lambda: _engines(service, 2))
        assert torch_apply.root(second.core.weights.tensors) == torch_apply.root(stand.weights[Version(0, 1)])
        await stand.tasks(12, first=12)
        rollouts = await stand.until_rollouts(24)
        assert second.core.counters.requests
    for rollout in rollouts:
        assert rollout.outcome == "ok"
        stand.assert_replays(rollout.trajectory)


async def test_sessions_at_an_engine_whose_model_hangs_go_on_at_another(
    make_stand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "PROBE_TIMEOUT_S", 1.0)
    stand = await make_stand(agent__turn_timeout_s=3.0, sandbox__command_timeout_s=2.0)
    stand.sandbox.tool_s = 0.1
    second = await stand.another_engine()
    async with stand.agent(engines=(stand.engine, second)) as service:
        await stand.until_served(0)
        await stand.until(lambda: _engines(service, 2))
        await stand.tasks(8)
        await stand.until(stand.sandbox.is_working)
        go_on = threading.Event()
        hung = second.core.call(lambda: go_on.wait(60))  # the server still answers questions
        try:
            await stand.until(lambda: _engines(service, 1))
            done = await stand.until(lambda: stand.all_ended(8))
        finally:
            go_on.set()
        await asyncio.wrap_future(hung)
        await stand.until(lambda: _engines(service, 2))
    assert {r.outcome for r in done if r.terminal} == {"ok"}
    assert any(not r.terminal for r in done), "no session was at the engine that hung"
    for rollout in (r for r in done if r.terminal):
        stand.assert_replays(rollout.trajectory)


async def _engines(service: Service, count: int) -> bool:
    return bool(service.status.get("engines") == count)


async def _load_old_weights_as(engine: Any, stand: Any, version: str) -> None:
    """As an operator's script might: the version's name over other weights."""
    folder = stand.folder / "old"
    save_folder(folder, model_config(stand.config), stand.weights[Version(0, 0)])
    old, _ = engine_server.load_weights(folder, version, None, torch.float32)
    engine.core.call(lambda: engine.core.swap(old, True)).result()


async def test_no_session_begins_while_the_engines_are_full(make_stand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = await make_stand()
    core = type(stand.engine.core)
    with monkeypatch.context() as patched:
        full = Loads(running=4, waiting=0, waiting_tokens=0, pages=100, pages_busy=91, paused="")
        patched.setattr(core, "loads", lambda self: full)
        async with stand.agent() as service:
            await stand.until(lambda: in_phase(service, "waiting for room in the engines"))
            await stand.tasks(4)
            await asyncio.sleep(1.5)
            assert service.status["sessions"] == 0
            patched.undo()
            rollouts = await stand.until_rollouts(4)
    assert {r.outcome for r in rollouts} == {"ok"}
