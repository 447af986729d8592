"""Says what a run waits for when nothing moves: one line a stall, naming a service and its phase."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from headway.deploy.fleet import LISTEN_S, Beat, Fleet
from headway.deploy.progress import escape

EVERY_S = 1.0
PROGRESS = ("head", "served", "swaps", "ok")
"""Numbers of heartbeats that only a step, a swap or a rollout changes."""


def progress_of(beats: Iterable[Beat]) -> frozenset[tuple[str, ...]]:
    """Equal as long as no step, rollout or swap is heard of."""
    return frozenset((beat.instance, *(beat.text(key) for key in PROGRESS)) for beat in beats)


def blame(expected: Collection[str], beats: Collection[Beat], now_s: float) -> str:
    """Who everything waits for: the missing first, then from where work begins to where it ends."""
    heard = {beat.instance: beat for beat in beats}
    missing = [name for name in expected if name not in heard or now_s - heard[name].heard_s > LISTEN_S]
    if missing:
        name = missing[0]
        last = f", last phase {heard[name].text('phase')!r}" if name in heard else ""
        more = f", nor of {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"no heartbeat of {name}{last}{more}"
    by_service: dict[str, list[Beat]] = {}
    for beat in beats:
        by_service.setdefault(beat.service, []).append(beat)
    trainers, dispatchers = by_service.get("trainer", []), by_service.get("dispatcher", [])
    agents = by_service.get("agent", [])
    for beat in dispatchers:
        if beat.text("phase") == "paused":
            return f"{beat.instance} is paused: `headway resume` lets it issue again"
    for beat in trainers:
        if not beat.text("phase").startswith("waiting for rollouts"):
            return _say(beat)
    busy = [beat for beat in agents if beat.text("phase") not in ("", "waiting for tasks")]
    stuck = [beat for beat in busy if beat.text("phase") != "rolling out"] or busy
    if stuck:
        return _say(stuck[0]) + (f" with {stuck[0].number('sessions'):g} sessions" if stuck[0] in busy else "")
    return next((_say(beat) for beat in (*dispatchers, *trainers, *agents)), "no service is heard")


def _say(beat: Beat) -> str:
    return f"{beat.service} {beat.instance} is {beat.text('phase') or 'silent about its phase'!r}"


@dataclass(slots=True, kw_only=True)
class Watchdog:
    """`look` it every second; `say` gets one line when nothing moved for `stall_s`, and again after each such time."""

    fleet: Fleet
    stall_s: float
    say: Callable[[str], None]
    expected: Collection[str] = ()
    _seen: frozenset[tuple[str, ...]] = frozenset()
    _moved_s: float | None = field(default=None)

    def look(self) -> None:
        now_s, seen = self.fleet.clock(), progress_of(self.fleet.beats.values())
        if self._moved_s is None or seen != self._seen:
            self._seen, self._moved_s = seen, now_s
        elif now_s - self._moved_s >= self.stall_s:
            why = blame(self.expected, list(self.fleet.beats.values()), now_s)
            self.say(f"no step, rollout or swap for {self.stall_s:g} s: {escape(why)}")
            self._moved_s = now_s

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(EVERY_S)
