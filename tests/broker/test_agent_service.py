"""The agent against a real nats-server and a real engine, with a scripted sandbox and ledger."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import StreamConfig

from headway.bus.leases import Lease
from headway.bus.service import Service
from headway.kernels.config import ModelConfig
from headway.rollout_agent.engine import server as engine_server
from headway.rollout_agent.engine.requests import BadRequest
from headway.rollout_agent.engine.service import model_config
from headway.rollout_agent.model_shape import ModelShape, hf_config
from headway.rollout_agent.outcomes import Outcomes
from headway.schemas import expr_protocol as p
from headway.schemas import signing
from headway.schemas.config import Config
from headway.schemas.errors import UnavailableError
from headway.schemas.ledger import DISAGREED_MAX, Counters, Drops
from headway.schemas.messages import Dead, Stamp
from headway.schemas.version import Version
from headway.trainer.rollback import rollback
from headway.weight_sync import torch_apply

from .agent_stand import in_phase
from .stand_ins import ZERO


async def test_every_task_becomes_one_graded_rollout_that_replays(make_stand: Any) -> None:
    stand = await make_stand()
    await stand.tasks(12)
    async with stand.agent():
        rollouts = await stand.until_rollouts(12)
        await stand.until_all_acked()
        stamps = await stand.read("STAMPS", Stamp)
    assert sorted(r.rollout_id for r in rollouts) == sorted(f"r{i}" for i in range(12))
    for rollout in rollouts:
        assert rollout.outcome == "ok"
        verdict = rollout.verdict.open_verdict(signing.public_key(stand.sandbox_key))
        assert (verdict.rollout_id, verdict.attempt) == (rollout.rollout_id, rollout.attempt)
        assert verdict.reward == rollout.reward
        assert rollout.trajectory.token_ids[: 1 + len(p.PROMPT)].tolist() == [256, *p.PROMPT]
        stand.assert_replays(rollout.trajectory)
    assert {s.rollout_id for s in stamps} == {r.rollout_id for r in rollouts}
    assert max(r.trajectory.turns for r in rollouts) > 1, "no session had several turns"
    assert len({r.trajectory.stop_reason for r in rollouts}) > 1
    assert not stand.sandbox.open, "a box was left behind"


@pytest.mark.parametrize("mode", ["retract", "finish"])
async def test_sessions_across_swaps_replay_under_the_versions_they_name(make_stand: Any, mode: str) -> None:
    stand = await make_stand(f'[staleness]\nswap_mode = "{mode}"\n')
    stand.sandbox.tool_s = 0.03
    async with stand.agent():
        await stand.until_served(0)
        await stand.tasks(60)
        for n in range(1, 6):
            await asyncio.sleep(0.1)
            await stand.step(n)
        rollouts = await stand.until_rollouts(60, 40)
        await stand.until_served(5)
        applied = await stand.applied()
    for rollout in rollouts:
        stand.assert_replays(rollout.trajectory)
        assert len(rollout.trajectory.route_spans) == 1, "prefix rows kept an older version's routes"
    mixed = [r for r in rollouts if len({s.version for s in r.trajectory.spans}) > 1]
    assert mixed, "no session spanned a swap"
    assert [a.version for a in applied] == sorted({a.version for a in applied})


async def test_an_agent_that_the_ledger_refuses_takes_no_task_and_another_does(make_stand: Any) -> None:
    stand = await make_stand()
    refused = Counters(disagreed={"east/one": DISAGREED_MAX + 1})
    await stand.writer.append(Drops(drops=[], cursor=0, pool=[], counters=refused), Version(0, 0))
    await stand.tasks(4)
    async with stand.agent() as service:

        async def told() -> bool:
            return service.status.get("phase") == "refused by the trainer (P7)"

        await stand.until(told)
        await asyncio.sleep(0.6)
        assert not await stand.rollouts()
    async with stand.agent("two"):
        await stand.until_rollouts(4)


async def test_an_agent_reports_only_what_the_engine_proved(make_stand: Any) -> None:
    stand = await make_stand()
    async with stand.agent():
        await stand.until_served(0)
        await stand.step(1)
        await stand.until_served(1)
        first, second = await stand.applied()
    assert second.root == stand.published.manifest.root
    assert second.fetched_bytes < first.fetched_bytes or second.fetched_bytes > 0
    assert stand.engine.core.weights.version == "0.1"


async def test_an_engine_that_loaded_other_bytes_is_loaded_again_before_it_serves(
    make_stand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await make_stand()
    real, seen = engine_server.load_weights, []

    def load(folder: Path, version: str, *rest: Any) -> Any:
        weights, count = real(folder, version, *rest)
        seen.append((version, count))
        if [v for v, _ in seen].count("0.1") == 1:
            tensors = {**weights.tensors, "model.norm.weight": weights.tensors["model.norm.weight"] * 2}
            return dataclasses.replace(weights, tensors=tensors), count
        return weights, count

    async with stand.agent():
        await stand.until_served(0)
        monkeypatch.setattr(engine_server, "load_weights", load)
        await stand.step(1)
        await stand.until_served(1)
        await stand.tasks(4)
        rollouts = await stand.until_rollouts(4)
    assert [version for version, _ in seen] == ["0.1", "0.1"]
    assert seen[1][1] == len(stand.weights[Version(0, 1)]), "the second load was not a full one"
    assert [a.version for a in await stand.applied()] == [Version(0, 0), Version(0, 1)]
    for rollout in rollouts:
        stand.assert_replays(rollout.trajectory)


async def test_a_lost_announcement_only_delays(make_stand: Any) -> None:
    stand = await make_stand()
    async with stand.agent():
        await stand.until_served(0)
        await stand.step(1, announce=False)
        await stand.until_served(1)


async def test_an_announcement_without_a_ledger_record_changes_nothing(make_stand: Any) -> None:
    stand = await make_stand()
    async with stand.agent():
        await stand.until_served(0)
        forged = await stand.publish(7)
        await stand.announce(7, forged.digest)
        await asyncio.sleep(1.5)
        assert [a.version for a in await stand.applied()] == [Version(0, 0)]
        assert stand.engine.core.weights.version == "0.0"


async def test_announcements_twice_out_of_order_garbled_or_of_an_abandoned_line_change_nothing(make_stand: Any) -> None:
    """And an agent that is beyond the point of a rollback follows the fork without a restart."""
    stand = await make_stand()
    async with stand.agent() as agent:
        await stand.until_served(0)
        manifests = []
        for n in (1, 2, 3):
            await stand.step(n, announce=False)
            manifests.append(stand.published.digest)
        for n in (3, 1, 2, 3, 1):
            await stand.announce(n, manifests[n - 1])
            await stand.bus.client.publish(stand.bus.subjects.weights(Version(0, n)), b"garbage")
        await stand.until_served(3)
        await stand.bus.store.put(stand.bus.keys.checkpoint(ZERO), b"")
        fork = await rollback(stand.bus, stand.trainer_key, Version(0, 1))

        async def followed() -> bool:
            return bool((await stand.applied())[-1].version == fork.version)

        await stand.until(followed)
        for n in (2, 3):  # by a trainer that does not know yet that it was fenced out
            await stand.announce(n, manifests[n - 1])
            await stand.bus.client.publish(stand.bus.subjects.weights(Version(0, n)), b"garbage")
        await asyncio.sleep(1.5)
        applied = await stand.applied()
        assert applied[-1].version == fork.version == Version(1, 1)
        assert [a.version for a in applied] == sorted({a.version for a in applied})  # each once, never back
        assert applied[-1].root == torch_apply.root(stand.weights[Version(0, 1)])
        assert stand.engine.core.weights.version == "1.1"
        assert not stand.has_ended(agent)


async def test_a_restarted_engine_is_reloaded_and_its_sessions_go_on(make_stand: Any) -> None:
    stand = await make_stand()
    stand.sandbox.tool_s = 0.3
    async with stand.agent():
        await stand.until_served(0)
        await stand.step(1)
        await stand.until_served(1)
        await stand.tasks(8)
        await stand.until(stand.sandbox.is_working)
        killed = stand.engine.core
        await stand.engine.kill()
        await stand.engine.start()
        done = await stand.until(lambda: stand.all_ended(8))
    assert stand.engine.core.weights.version == "0.1"
    assert killed.counters.sampled_tokens
    assert stand.engine.core.counters.sampled_tokens, "the kill hit nothing"
    for rollout in done:
        assert rollout.outcome == "ok"
        stand.assert_replays(rollout.trajectory)


async def test_trouble_in_the_sandbox_is_never_a_reward_and_ends_in_dead(make_stand: Any) -> None:
    stand = await make_stand()
    stand.sandbox.refuse["grade"] = "infra"
    await stand.tasks(1)
    async with stand.agent():
        rollouts = await stand.until_rollouts(3)
        await stand.until_all_acked()
        dead = await stand.read("EVENTS", Dead, stand.bus.subjects.dead("too_many_attempts"))
    assert [(r.outcome, r.terminal, r.delivery) for r in rollouts] == [
        ("infra_failed", False, 1),
        ("infra_failed", False, 2),
        ("infra_failed", True, 3),
    ]
    assert all(r.reward is None and r.trajectory is None for r in rollouts)
    assert len({r.attempt for r in rollouts}) == 3
    assert "scripted" in rollouts[0].reason
    assert len(dead) == 1
    assert dead[0].stream_seq == rollouts[0].task_seq


async def test_a_busy_sandbox_is_waited_for(make_stand: Any) -> None:
    stand = await make_stand()
    stand.sandbox.refuse["create"] = "busy"
    await stand.tasks(1)
    async with stand.agent():
        await asyncio.sleep(1.0)
        assert not await stand.rollouts()
        stand.sandbox.refuse.clear()
        (rollout,) = await stand.until_rollouts(1)
    assert rollout.outcome == "ok"


async def test_a_new_session_starts_on_the_newest_version_the_agent_has_while_older_ones_are_open(
    make_stand: Any,
) -> None:
    stand = await make_stand()
    stand.sandbox.tool_s = 0.4
    async with stand.agent():
        await stand.until_served(0)
        for n in range(4):
            if n:
                await stand.step(n)
                await stand.until_served(n)
            await stand.tasks(4, first=4 * n)
            await stand.until(stand.sandbox.is_working)
        rollouts = await stand.until(lambda: stand.all_ended(16))
    for rollout in rollouts:
        assert rollout.trajectory.spans[0].version.n >= int(rollout.rollout_id[1:]) // 4
    assert any(len(r.trajectory.spans) > 1 for r in rollouts), "no older session was open"


async def test_no_session_starts_while_the_agent_is_too_far_behind(make_stand: Any) -> None:
    stand = await make_stand()
    async with stand.agent() as service:
        await stand.until_served(0)
        await stand.step(1, lost=True)
        await stand.tasks(2)
        assert len(await stand.until_rollouts(2)) == 2, "one step behind is within swap_slack"
        await stand.step(2, lost=True)
        await stand.until(lambda: in_phase(service, "waiting for weights"))
        await stand.tasks(2, first=2)
        await asyncio.sleep(1.0)
        assert len(await stand.rollouts()) == 2
        stand.published = None
        await stand.step(3)
        await stand.until_rollouts(4)


async def test_an_evaluation_runs_under_exactly_its_version(make_stand: Any) -> None:
    stand = await make_stand()
    stand.sandbox.tool_s = 0.05
    async with stand.agent():
        await stand.until_served(0)
        await stand.tasks(6, purpose="eval", pinned=Version(0, 1), temperature=0.0)
        await asyncio.sleep(0.7)
        assert not await stand.rollouts(), "an evaluation ran under an older version"
        await stand.step(1)
        await stand.step(2)
        rollouts = await stand.until_rollouts(6)
        await stand.until_served(2)
        await stand.tasks(1, first=6, purpose="eval", pinned=Version(0, 1))
        late = (await stand.until_rollouts(7))[-1]
        await stand.until_all_acked()
    ok = [r for r in rollouts if r.outcome == "ok"]
    assert all({s.version for s in r.trajectory.spans} == {Version(0, 1)} for r in ok)
    assert all(r.reason.startswith("version_unavailable") and r.terminal for r in rollouts if r.outcome != "ok")
    assert (late.outcome, late.terminal) == ("infra_failed", True)
    assert late.reason.startswith("version_unavailable")


async def test_a_task_that_comes_again_to_the_agent_that_holds_it_is_not_begun_again(
    make_stand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await make_stand(dispatch__max_attempts=8)
    stand.sandbox.tool_s = 1.5

    async def lost(lease: Lease) -> None:
        """A renewal that does not arrive, as after a cut, or while the process was stopped."""

    monkeypatch.setattr(Lease, "renew", lost)
    await stand.tasks(4)
    async with stand.agent():
        rollouts = await stand.until(lambda: stand.all_ended(4))
        await stand.until_all_acked()
    assert len(rollouts) == 4
    assert stand.sampled_once(rollouts)


async def test_a_full_stream_pushes_back_and_nothing_is_lost(make_stand: Any) -> None:
    stand = await make_stand()
    stream = stand.bus.subjects.stream("ROLLOUTS")
    config: StreamConfig = (await stand.bus.js.stream_info(stream)).config
    await stand.bus.js.update_stream(config.evolve(max_msgs=2))
    await stand.tasks(20)
    async with stand.agent() as service:
        await stand.until(lambda: _pushed_back(service))
        assert len(await stand.rollouts()) == 2
        await stand.bus.js.update_stream(config.evolve(max_msgs=-1))
        rollouts = await stand.until_rollouts(20)
        await stand.until_all_acked()
    assert {r.outcome for r in rollouts} == {"ok"}
    assert len({r.rollout_id for r in rollouts}) == 20
    assert stand.sandbox.graded < 20 + 8


async def test_a_session_whose_rollout_is_being_stored_makes_room_for_one_more(
    make_stand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await make_stand(agent__max_sessions=1)
    stored, finished = asyncio.Event(), Outcomes.finished

    async def late(self: Outcomes, *args: Any) -> None:
        await stored.wait()
        await finished(self, *args)

    async def two_graded() -> bool:
        return bool(stand.sandbox.graded == 2)

    monkeypatch.setattr(Outcomes, "finished", late)
    async with stand.agent():
        await stand.until_served(0)
        await stand.tasks(3)
        await stand.until(two_graded)
        await asyncio.sleep(0.3)
        assert stand.sandbox.graded == 2, "nor more than one"
        stored.set()
        assert {r.outcome for r in await stand.until_rollouts(3)} == {"ok"}


async def _pushed_back(service: Service) -> bool:
    return service.status.get("pushed_back") is True


async def test_an_engine_that_cannot_be_written_takes_the_agent_down(
    make_stand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = await make_stand()

    async def until_it_ends() -> None:
        async with stand.agent() as service:
            await stand.until_served(0)
            monkeypatch.setattr(type(stand.engine.core), "swap", _refuse)
            await stand.step(1)
            await stand.ended(service)

    with pytest.raises(BaseExceptionGroup) as caught:
        await until_it_ends()
    assert caught.group_contains(UnavailableError, match="out of rotation")


def _refuse(*args: Any) -> None:
    raise BadRequest("scripted")


async def test_a_restarted_agent_takes_over_a_serving_engine(make_stand: Any) -> None:
    stand = await make_stand()
    async with stand.agent():
        await stand.until_served(0)
        await stand.step(1)
        await stand.until_served(1)
        await asyncio.sleep(0.2)
    swaps = stand.engine.core.counters.swaps
    stand.engine.core.call(lambda: stand.engine.core.pause("retract")).result()  # as a killed agent may leave it
    await stand.tasks(2)
    async with stand.agent():
        await stand.until_rollouts(2)
    assert stand.engine.core.counters.swaps == swaps, "the engine was loaded again without need"


def test_the_agent_describes_the_model_as_the_engine_reads_it() -> None:
    config = Config()
    assert ModelConfig.from_hf(json.loads(hf_config(config.model))) == model_config(config)
    shape = ModelShape.from_hf(hf_config(config.model))
    assert (shape.layers, shape.layer_map, shape.experts, shape.top_k) == (3, (0, 1, 2), 8, 2)
