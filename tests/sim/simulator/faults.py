"""The faults of a simulated run: each kind by its name, whom it strikes drawn by the world."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING

from headway.bus.connection import Bus
from headway.schemas import signing
from headway.schemas.errors import FencedOut, InputError, UnavailableError
from headway.schemas.version import Version
from headway.trainer.rollback import rollback
from simulator.client import Client
from simulator.loop import LIFE, Killed, Life
from simulator.models import DISK
from simulator.plan import POINTS_IN_RUN, RUN

if TYPE_CHECKING:
    from simulator.world import Process, World

TROUBLE_S_MAX = 6.0


class Faults:
    """What strikes a world. `point` kills the process that passes a fail point for the given time: (name, hit)."""

    def __init__(self, world: World, point: tuple[str, int] | None) -> None:
        self._world, self._point = world, point
        self.struck: list[str] = []
        self.passed: dict[str, int] = {}
        self.operating = 0
        """Operators at work."""
        self._is_calm = False
        self._due = ""

    def calm(self) -> None:
        self._is_calm, self._due = True, ""
        rates = self._world.server.rates
        rates.lost_request = rates.lost_reply = rates.lost_delivery = rates.twice = rates.slow = 0.0
        self._world.store.full = self._world.store.broken = DISK.full = False
        self._world.store.lost_reply = 0.0
        self._world.server.cut.clear()
        for stream in self._world.server.streams.values():
            stream.full = False

    def _pick(self, *kinds: str) -> Process:
        """A process, the trainer as often as all others together."""
        if not kinds and self._world.rng.random() < 0.4:
            return self._world.processes["trainer"]
        return self._world.rng.choice([p for p in self._world.processes.values() if not kinds or p.kind in kinds])

    def _for_a_while(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Often somebody dies while it lasts."""
        begin()
        seconds = self._world.rng.random() * TROUBLE_S_MAX
        self._world.loop.after(seconds, end)
        if self._world.rng.random() < 0.5:
            self._world.loop.after(self._world.rng.random() * seconds, self.strike, "kill")

    def strike(self, kind: str) -> None:
        if not self._is_calm:
            self.struck.append(kind)
            kind, _, name = kind.partition(":")
            getattr(self, f"_fault_{kind}")(*filter(None, [name]))

    def _fault_kill(self, name: str = "") -> None:
        life = (self._world.processes[name] if name else self._pick()).life
        if life is not None:
            life.die()

    def _fault_fuse(self) -> None:
        life = self._pick().life
        if life is not None and life.alive:
            life.fuse = self._world.rng.randint(1, 200)

    def _fault_freeze(self) -> None:
        life = self._pick().life
        if life is not None and life.alive and life.frozen is None:
            life.frozen = []
            self._world.loop.after(self._world.rng.random() * 6, self._world.loop.thaw, life)

    def _fault_drain(self) -> None:
        process = self._pick("dispatcher", "agent", "trainer", "sandbox")
        self._world.sigterm(process)

    def _fault_server(self) -> None:
        self._world.server.kill(0.1 + self._world.rng.random() * 3, forget_ids=self._world.plan.forget_ids)

    def _fault_partition(self) -> None:
        region = self._world.rng.choice([*self._world.plan.config.regions, "hub"])
        self._for_a_while(lambda: self._world.server.cut.add(region), lambda: self._world.server.cut.discard(region))

    def _fault_store_full(self) -> None:
        self._for_a_while(
            lambda: setattr(self._world.store, "full", True), lambda: setattr(self._world.store, "full", False)
        )

    def _fault_store_broken(self) -> None:
        self._for_a_while(
            lambda: setattr(self._world.store, "broken", True), lambda: setattr(self._world.store, "broken", False)
        )

    def _fault_stream_full(self) -> None:
        stream = self._world.server.streams[self._world.rng.choice(["TASKS", "ROLLOUTS"])]
        self._for_a_while(lambda: setattr(stream, "full", True), lambda: setattr(stream, "full", False))

    def _fault_rival(self) -> None:
        """The process hangs, somebody starts a second one, and then it wakes up."""
        process = self._pick("trainer", "dispatcher")
        first = process.life
        if first is None or not first.alive or first.frozen is not None:
            return
        first.frozen = []
        first.on_death = lambda life: None
        self._world.loop.after(1 + self._world.rng.random() * 3, self._world.loop.thaw, first)
        self._world.loop.after(1 + self._world.rng.random() * 8, first.die)
        process.life = None
        self._world.start(process)

    def _fault_rollback(self) -> None:
        at = [v for v in self._world.oracle.checkpoints if v.n < self._world.oracle.head.n]
        if not at:
            return
        life = Life("operator", "hub")
        self._world.lives.append(life)
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        self._world.loop.create_task(self._roll_back(self._world.rng.choice(at)), context=context)

    async def _roll_back(self, base: Version) -> None:
        bus = Bus(Client(self._world.server), RUN, self._world.store)  # type: ignore[arg-type]
        self.operating += 1
        with contextlib.suppress(InputError, UnavailableError, FencedOut):
            await rollback(bus, signing.load_key(self._world.shared / "keys" / "trainer.key"), base)
        self.operating -= 1

    def _fault_disk_full(self) -> None:
        """Agents' disks take no file for a while."""
        self._for_a_while(lambda: setattr(DISK, "full", True), lambda: setattr(DISK, "full", False))

    def pass_point(self, name: str) -> None:
        self.passed[name] = self.passed.get(name, 0) + 1
        life = LIFE.get()
        if life is not None and (self._point == (name, self.passed[name]) or self._due == name):
            self.struck.append(f"{name}:{self.passed[name]}")
            self._due = ""
            life.die()
            raise Killed(name)

    def _fault_point(self) -> None:
        """Whoever passes one of the fail points next is killed there."""
        self._due = self._world.rng.choice(sorted(POINTS_IN_RUN))
