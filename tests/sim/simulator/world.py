"""A simulated run: its processes, their lives, and what is checked while they live."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from headway.bus import failpoints
from headway.bus.connection import Bus
from headway.bus.service import Service, Settings, first_error
from headway.rollout_agent import attempts
from headway.rollout_agent import service as agent_service
from headway.schemas import ids, signing
from headway.schemas.errors import FencedOut, HeadwayError, UnavailableError
from headway.trainer import dispatcher
from headway.trainer import service as trainer_service
from headway.trainer.audit import Report, audit
from simulator.client import Client
from simulator.engines import Engine, EngineClient
from simulator.faults import Faults
from simulator.loop import LIFE, Life, SimLoop, quiet
from simulator.models import Host, Learner, Nonces, Store
from simulator.oracle import Oracle
from simulator.plan import ACK_WAIT_S, CALM_S, ENGINE_URLS, RUN, Plan, draw
from simulator.server import Server

END_S_MAX = 600.0
DRAIN_S_MAX = 30.0
MAINS = {"dispatcher": dispatcher.main, "trainer": trainer_service.main, "agent": agent_service.serve}


@dataclass(eq=False)
class Process:
    """A process that something supervises."""

    kind: str
    name: str
    region: str
    life: Life | None = None
    service: Service | None = None
    starts: int = 0
    down: bool = False
    host: Host | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a simulated run ended."""

    report: Report
    oracle: Oracle
    events: int
    callbacks: int
    virtual_s: float
    struck: tuple[str, ...]
    passed: dict[str, int]

    @property
    def digest(self) -> str:
        return str(self.oracle.digest.hexdigest())


class World:
    """One run, struck by `Faults`."""

    def __init__(self, seed: int, plan: Plan, folder: Path, shared: Path, point: tuple[str, int] | None = None) -> None:
        self.plan, self.folder, self.shared = plan, folder, shared
        self.rng = random.Random(f"world {seed}")
        self.loop = SimLoop(self._compute_s)
        self.server = Server(self.loop, self.rng, replace(plan.rates), RUN, ACK_WAIT_S)
        self.store = Store(self.loop, self.rng)
        self.store.lost_reply = plan.lost_put_reply
        self.oracle = Oracle(config=plan.config, store=self.store, run=RUN)
        self.server.on_stored = self.oracle.on_stored
        self.processes: dict[str, Process] = {}
        self.lives: list[Life] = []
        self.engines: dict[str, Engine] = {}
        self.failures: list[str] = []
        self.faults = Faults(self, point)

    # Running

    def run(self) -> Ended:
        """Run to the end. Raises AssertionError naming what broke."""
        nonces = Nonces()
        before = failpoints.install(self.faults.pass_point)
        asyncio.set_event_loop(self.loop)
        try:
            with (
                mock.patch.object(EngineClient, "engines", self.engines),
                mock.patch.object(attempts, "attempt_nonce", nonces),
                mock.patch.object(ids, "attempt_nonce", nonces),
            ):
                report = self.loop.run_until_complete(self._main())
        finally:
            failpoints.install(before)
            with quiet():
                self.loop.bury(self.lives)
                leftovers = asyncio.all_tasks(self.loop)
                for task in leftovers:
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                del leftovers
                self.loop.close()
            asyncio.set_event_loop(None)
        return Ended(
            report=report, oracle=self.oracle, events=self.oracle.events, callbacks=self.loop.callbacks,
            virtual_s=self.loop.now, struck=tuple(self.faults.struck), passed=self.faults.passed,
        )  # fmt: skip

    async def _main(self) -> Report:
        for region in self.plan.config.regions:
            self._add("engine", f"{region}-engine", region)
            self._add("sandbox", f"{region}-sandbox", region)
            self._add("agent", f"{region}-agent", region)
        self._add("trainer", "trainer", "hub")
        self._add("dispatcher", "dispatcher", "hub")
        for process in list(self.processes.values()):
            self.start(process)
        for when, kind in self.plan.faults:
            self.loop.at(when, self.faults.strike, kind)
        self.loop.at(CALM_S, self.faults.calm)
        while not self._finished():
            self._check()
            if self.loop.now > END_S_MAX:
                raise AssertionError(f"P6: the run stands still at {self.oracle.head}: {self._phases()}")
            await asyncio.sleep(0.25)
        self.faults.calm()
        await self._drain_all()
        self._check()
        report = await self._audit()
        self.oracle.assert_finished()
        assert report.violations == [], report.violations
        assert (report.lost, report.trained_twice, report.pending) == (0, 0, 0), report
        return report

    def _finished(self) -> bool:
        stream = self.server.streams["EVENTS"]
        done = any(m.subject.endswith(".run_finished") for m in stream.messages[-40:])
        quiet = not self.faults.operating and self.server.counts() == (0, 0)
        return done and quiet and self.oracle.head.n >= self.plan.config.run.steps

    def _phases(self) -> str:
        return json.dumps({n: dict(p.service.status) if p.service else "down" for n, p in self.processes.items()})

    def _compute_s(self, called: Any) -> float:
        """How long a thread works on something: a step takes its time, all else is done at once."""
        return self.plan.compute_s if isinstance(getattr(called, "__self__", None), Learner) else 0.0

    def _check(self) -> None:
        assert not self.oracle.violation, self.oracle.violation
        assert not self.failures, self.failures[0]
        assert not self.loop.failures, self.loop.failures[0]
        self._check_bounds()

    def _check_bounds(self) -> None:
        """P8."""
        limit = self.plan.config.dispatch.max_in_flight + self.plan.config.grpo.samples_per_group
        in_flight = sum(self.server.counts())
        assert in_flight <= limit + 2 or self.plan.faults, f"P8: {in_flight} tasks in flight"
        for process in self.processes.values():
            life = process.life
            if life is not None and life.alive:
                life.tasks = [task for task in life.tasks if not task.done()]
                assert len(life.tasks) < 200, f"P8: {process.name} has {len(life.tasks)} tasks"
        self.server.forget_the_dead()
        assert len(self.server.subscriptions) < 200, "P8: subscriptions leak"

    async def _audit(self) -> Report:
        life = Life("auditor", "hub")
        self.lives.append(life)
        return await self._inside(life, self._read_audit)

    async def _inside(self, life: Life, work: Callable[[], Any]) -> Any:
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        return await self.loop.create_task(work(), context=context)

    async def _read_audit(self) -> Report:
        return await audit(Bus(Client(self.server), RUN, self.store))  # type: ignore[arg-type]

    # Processes

    def _add(self, kind: str, name: str, region: str) -> None:
        self.processes[name] = Process(kind, name, region)

    def start(self, process: Process) -> None:
        """Begin a life. A process is started again whenever it ends."""
        if process.life is not None and process.life.alive:
            return
        process.starts += 1
        rng, skew = self.rng, self.plan.skew
        process.life = life = Life(
            f"{process.name}-{process.starts}",
            process.region,
            offset_s=rng.random() * 1e4 if skew else 0.0,
            rate=1.0 + (rng.random() - 0.5) * 0.2 if skew else 1.0,
        )
        life.on_death = lambda life: self._died(process, life)
        self.lives.append(life)
        if process.kind == "engine":
            url = ENGINE_URLS[process.region]
            self.engines[url] = Engine(url, life, rng, self.plan.turn_s)
            return
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        task = self.loop.create_task(self._serve(process, life), context=context)
        task.add_done_callback(lambda task: self._ended(process, life, task), context=contextvars.Context())

    async def _serve(self, process: Process, life: Life) -> None:
        bus = Bus(Client(self.server), RUN, self.store)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            process.service = service = Service(
                name=process.kind,
                config=self.plan.config,
                settings=Settings(
                    nats_url="",
                    run_dir=self.folder,
                    keys_dir=self.shared / "keys",
                    store_url="",
                    region=process.region if process.region != "hub" else "east",
                    instance=process.name,
                ),
                bus=bus,
                store=self.store,
                tasks=tasks,
                stop=asyncio.Event(),
            )
            life.stop = service.stop
            if process.kind == "sandbox":
                process.host = Host(service, self.rng)
                await process.host.serve()
            else:
                await MAINS[process.kind](service)
        await bus.close()

    def _died(self, process: Process, life: Life) -> None:
        process.service = None
        if not process.down:
            self.loop.after(0.1 + self.rng.random(), self.start, process)

    def _ended(self, process: Process, life: Life, task: asyncio.Task[None]) -> None:
        """A process ended by itself."""
        if not life.alive:
            if not task.cancelled():
                task.exception()
            return
        if task.cancelled():
            self.failures.append(f"{process.name} was cancelled")
            return
        error = task.exception()
        if isinstance(error, BaseExceptionGroup):
            error = first_error(error)
        if error is not None and not self._may_end_so(error):
            self.failures.append(f"{process.name} ended by {type(error).__name__}: {error}")
            if not isinstance(error, HeadwayError):
                import traceback

                self.failures[-1] += "\n" + "".join(traceback.format_exception(error))
        if error is None and not (life.stop is not None and life.stop.is_set()):
            self.failures.append(f"{process.name} returned without being asked to")
        life.die()

    @staticmethod
    def _may_end_so(error: BaseException) -> bool:
        """69 and 75 are for whoever supervises; a disk that fills up ends an agent."""
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        return full or isinstance(error, UnavailableError | FencedOut)

    # Draining

    def sigterm(self, process: Process) -> None:
        """P10: a process that is asked to stop ends in time, and with 0."""
        life, service = process.life, process.service
        if service is None or life is None or not life.alive or life.frozen is not None:
            return
        service.stop.set()

        def late() -> None:
            if life.alive and life.frozen is None and not self.server.cut and self.server.up:
                self.failures.append(f"P10: {process.name} has not ended {DRAIN_S_MAX} s after SIGTERM")

        self.loop.after(DRAIN_S_MAX + 15, late)

    async def _drain_all(self) -> None:
        for kind in ("dispatcher", "agent", "trainer", "sandbox", "engine"):
            for process in [p for p in self.processes.values() if p.kind == kind]:
                process.down = True
                if process.life is not None and process.life.frozen is not None:
                    self.loop.thaw(process.life)
                end_s = self.loop.now + DRAIN_S_MAX
                while process.life is not None and process.life.alive:
                    if process.kind == "engine":
                        process.life.die()
                    elif process.service is not None:
                        process.service.stop.set()
                    assert self.loop.now < end_s, f"P10: {process.name} does not end"
                    await asyncio.sleep(0.1)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Keys, tasks and a base for all worlds, and room for their mirrors, in memory where the system has it."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="headway-sim-", dir=place) as name:
        folder = Path(name)
        (folder / "keys").mkdir()
        for owner in ("trainer", "sandbox"):
            (folder / "keys" / f"{owner}.key").write_bytes(owner.encode().ljust(signing.KEY_BYTES))
        (folder / "base").mkdir()
        (folder / "base" / "config.json").write_text("{}")
        (folder / "tasks").mkdir()
        for part in ("train", "heldout"):
            lines = "".join(json.dumps({"id": f"{part}{i}"}) + "\n" for i in range(4))
            (folder / "tasks" / f"{part}.jsonl").write_text(lines)
        yield folder


def simulate(seed: int, shared: Path, plan: Plan | None = None, point: tuple[str, int] | None = None) -> Ended:
    """The run of a seed. Raises AssertionError naming the promise that broke."""
    folder = shared / f"run-{seed}"
    folder.mkdir()
    for name in ("tasks", "base"):
        (folder / name).symlink_to(shared / name)
    try:
        return World(seed, plan or draw(seed), folder, shared, point).run()
    finally:
        shutil.rmtree(folder)
