"""A region behind a nats-server of its own: an agent works through it, also across a cut, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from headway.bus.blobs import ObstoreBlobs
from headway.bus.server import free_port
from headway.bus.service import Service
from headway.deploy import control

from .agent_stand import Stand
from .region import Region
from .stand_ins import Cable, ScriptedSandbox


@contextlib.asynccontextmanager
async def regional_stand(region: Region, **overrides: Any) -> AsyncIterator[tuple[Stand, Callable[[], Any]]]:
    """A run at the hub with a sandbox in the region, and what makes an agent there."""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(region.up())
        store = ObstoreBlobs.open(str(region.folder / "store"))
        hub, far, sandbox = [
            await stack.enter_async_context(await region.bus(role, store)) for role in ("operator", "agent", "sandbox")
        ]
        stand = Stand(hub, region.folder, "", {k.replace("__", "."): v for k, v in overrides.items()})
        stand.sandbox = ScriptedSandbox(sandbox, stand.sandbox_key, regions=("west",))
        await stand.begin()
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        await stand.sandbox.start(tasks)
        try:
            yield stand, lambda: stand.agent("one", region="west", bus=far)
        finally:
            for engine in stand.engines:
                await engine.kill()


async def assert_finishes_pauses_and_goes_on(
    stand: Stand, agent: Callable[[], Any], cut: Callable[[], Any], heal: Callable[[], Any], cut_s: float
) -> None:
    """What a cut of the region from its hub does to an agent there."""
    stand.sandbox.tool_s = 0.3
    async with agent() as service:
        await stand.tasks(6)  # fewer than it has room for, so that it asks for more at once afterwards
        await stand.until(stand.sandbox.is_working)
        await cut()
        try:
            await stand.until(lambda: _holds_only_what_is_done(stand, service), timeout_s=60)
            sampled = stand.sampled_tokens()
            await stand.tasks(10, first=6)
            await asyncio.sleep(cut_s)
            assert stand.sampled_tokens() == sampled, "it began something that it cannot know to be fresh"
            assert not stand.has_ended(service)
        finally:
            await heal()
        stand.sandbox.tool_s = 0.0
        done = await stand.until(lambda: stand.all_ended(16), timeout_s=60)
        await stand.until_all_acked()
    assert {rollout.outcome for rollout in done} == {"ok"}
    assert stand.sampled_once(done), "tokens were lost or sampled again"


async def _holds_only_what_is_done(stand: Stand, service: Service) -> bool:
    """Whether the boxes of all that it held are gone, graded in the region while the hub was away."""
    return not stand.sandbox.open


async def test_an_agent_works_through_its_regions_server_and_is_steered_from_the_hub(tmp_path: Path) -> None:
    link, said = free_port(), list[str]()
    place = f"127.0.0.1:{link}"
    region = Region(
        folder=tmp_path, hub=f"127.0.0.1:{free_port()}", leaf=f"127.0.0.1:{free_port()}", link=place, dial=place
    )
    async with regional_stand(region) as (stand, agent), agent() as service:
        await stand.tasks(8)
        await stand.step(1)
        done = await stand.until(lambda: stand.all_ended(8))
        await stand.until_all_acked()
        assert {rollout.outcome for rollout in done} == {"ok"}
        await control.drain_agents(stand.bus, "one", 10.0, said.append)
        await stand.ended(service)
        assert "8 sessions finished, 0 handed back" in said[-1]


async def test_a_region_that_is_cut_off_finishes_what_it_holds_pauses_and_goes_on(tmp_path: Path) -> None:
    link = free_port()
    cable = Cable(link)
    await cable.heal()
    region = Region(
        folder=tmp_path,
        hub=f"127.0.0.1:{free_port()}",
        leaf=f"127.0.0.1:{free_port()}",
        link=f"127.0.0.1:{link}",
        dial=f"127.0.0.1:{cable.port}",
    )

    async def cut() -> None:
        cable.cut()

    try:
        async with regional_stand(region) as (stand, agent):
            await assert_finishes_pauses_and_goes_on(stand, agent, cut, cable.heal, cut_s=3.0)
    finally:
        cable.cut()
