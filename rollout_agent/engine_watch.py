"""Looking at an engine: whether it answers, what it serves, how full it is. Changes nothing there."""

from __future__ import annotations

import asyncio
import contextlib

from headway.rollout_agent.client import EngineTrouble
from headway.rollout_agent.rotation import Place, Rotation
from headway.schemas.errors import InputError, WireError

HEALTH_EVERY_S = 1.0
RETRY_S = 0.2


async def watch(rotation: Rotation, place: Place, woken: asyncio.Event) -> None:
    """Look at intervals, and at once when asked to, until cancelled. `woken` is set after each look."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_EVERY_S if place.answers else RETRY_S):
                await place.look.wait()
        place.look.clear()
        await look(rotation, place)
        woken.set()


async def look(rotation: Rotation, place: Place) -> None:
    """Write down what an engine says; one that does not answer, or was started anew, leaves the rotation."""
    if place.asleep:
        return
    writes, before, asked = place.writes, place.load, place.asked
    try:
        version, load = await place.engine.served(), await place.engine.load()
    except (EngineTrouble, WireError) as error:
        _lose(rotation, place, str(error))
        return
    if place.probe and version is not None and writes % 2 == 0:
        try:
            await place.engine.probe()
        except (EngineTrouble, InputError) as error:
            if writes == place.writes:
                _lose(rotation, place, str(error))
            return
    if writes != place.writes or writes % 2:
        return  # its weights were being written
    place.answers, place.version, place.probe = True, version, False
    place.gone = False
    place.read(load, max(asked, place.asked))
    if before is not None and load is not None and load.prefilled_tokens < before.prefilled_tokens:
        rotation.fail(place, "it was started anew")


def _lose(rotation: Rotation, place: Place, why: str) -> None:
    place.lose(why)
    rotation.take_out(place, why)  # it was just looked at: to ask for another look at once would never pause
