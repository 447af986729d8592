"""Processes, their lives, and the faults that a seed draws for them."""

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
from headway.schemas.config import Config
from headway.schemas.errors import FencedOut, HeadwayError, InputError, UnavailableError
from headway.schemas.version import Version
from headway.trainer import dispatcher
from headway.trainer import service as trainer_service
from headway.trainer.audit import Report, audit
from headway.trainer.rollback import rollback
from simulator.loop import LIFE, Killed, Life, SimLoop, quiet
from simulator.models import DISK, Engine, EngineClient, Host, Learner, Nonces, Store
from simulator.net import Client, Rates, Server
from simulator.oracle import Oracle

RUN = "sim"
ENGINE_URLS = {"east": "http://127.0.0.1:1", "west": "http://127.0.0.1:2"}
ACK_WAIT_S = 1.5
CALM_S = 25.0
"""No fault begins later."""
END_S_MAX = 600.0
DRAIN_S_MAX = 30.0
TROUBLE_S_MAX = 6.0
MAINS = {"dispatcher": dispatcher.main, "trainer": trainer_service.main, "agent": agent_service.serve}
OUTSIDE = (
    "midtrain", "export", "config", "checkpoint", "publish.again", "put.blobs", "put.sessions", "put.leases", "purge",
    "relay", "recording", "publish.replayed",
)  # fmt: skip
"""Fail points that no service passes in a simulated run."""
POINTS_IN_RUN = frozenset(point for point in failpoints.POINTS if not point.startswith(OUTSIDE))
FAULTS = (
    "kill", "fuse", "freeze", "drain", "server", "partition", "store_full", "store_broken", "stream_full",
    "rival", "rollback", "disk_full", "point",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a seed decided: the run, the rates per message, and the faults with their times."""

    config: Config
    rates: Rates
    faults: tuple[tuple[float, str], ...]
    compute_s: float
    turn_s: float
    skew: bool
    forget_ids: bool
    lost_put_reply: float
    described: str

    def undisturbed(self) -> Plan:
        return Plan(
            config=self.config, rates=Rates(), faults=(), compute_s=self.compute_s, turn_s=self.turn_s, skew=False,
            forget_ids=False, lost_put_reply=0.0, described="undisturbed",
        )  # fmt: skip


def draw(seed: int) -> Plan:
    """The plan of a seed. Each kind of fault is there or not (swarm testing), at a rate of its own."""
    rng = random.Random(f"plan {seed}")
    lockstep = rng.random() < 0.15
    max_lag = 0 if lockstep else rng.randint(0, 2)
    config = Config.model_validate(
        {
            "run": {"name": RUN, "steps": rng.randint(2, 4), "seed": seed, "lockstep": lockstep},
            "grpo": {
                "groups_per_step": 2,
                "samples_per_group": (samples := rng.randint(2, 3)),
                "min_graded": rng.randint(2, samples),
                "retain_steps": rng.randint(1, 3),
            },
            "staleness": {
                "max_lag": max_lag,
                "swap_slack": rng.randint(0, max_lag),
                "stale_policy": rng.choice(["mask", "drop"]),
                "swap_mode": rng.choice(["retract", "finish"] if lockstep else ["retract", "finish", "in_place"]),
            },
            "dispatch": {
                "ack_wait_s": ACK_WAIT_S,
                "max_attempts": rng.choice([2, 4, 6]),
                "max_in_flight": rng.choice([4, 12]),
            },
            "agent": {"max_sessions": rng.randint(1, 3), "turn_timeout_s": 3.0, "session_timeout_s": 8.0},
            "sandbox": {"command_timeout_s": 0.5},
            "eval": {"at": rng.choice([[], [], ["end"]]), "programs": 1, "samples": 2, "greedy": False},
            "regions": {
                region: {"engine_urls": [ENGINE_URLS[region]]}
                for region in (["east", "west"] if rng.random() < 0.7 else ["east"])
            },
            "engine": {"numerics": "bitwise"},
        }
    )

    def rate(most: float) -> float:
        return rng.random() ** 2 * most if rng.random() < 0.4 else 0.0

    rates = Rates(
        lost_request=rate(0.05), lost_reply=rate(0.08), lost_delivery=rate(0.2), twice=rate(0.2), slow=rate(0.2),
        slow_s=rng.choice([0.1, 0.5, 2.5]), delay_s=rng.choice([0.001, 0.005, 0.02]),
    )  # fmt: skip
    kinds = [kind for kind in FAULTS if rng.random() < 0.35]
    faults = (
        [(rng.random() ** 1.5 * CALM_S * 0.5, rng.choice(kinds)) for _ in range(rng.randint(0, 7))] if kinds else []
    )
    plan = Plan(
        config=config, rates=rates, faults=tuple(sorted(faults)), compute_s=rng.choice([0.02, 0.2, 0.6]),
        turn_s=rng.choice([0.05, 0.2, 0.5]), skew=rng.random() < 0.3, forget_ids=rng.random() < 0.3,
        lost_put_reply=rate(0.1), described=f"{kinds} {rates}",
    )  # fmt: skip
    return plan


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
    """One run. `point` kills the process that passes a fail point for the given time: (name, hit)."""

    def __init__(self, seed: int, plan: Plan, folder: Path, shared: Path, point: tuple[str, int] | None = None) -> None:
        self.plan, self.folder, self.shared, self._point = plan, folder, shared, point
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
        self.struck: list[str] = []
        self.passed: dict[str, int] = {}
        self.failures: list[str] = []
        self.calm = False
        self._due = ""
        self._operating = 0

    # Running

    def run(self) -> Ended:
        """Run to the end. Raises AssertionError naming what broke."""
        nonces = Nonces()
        before = failpoints.install(self._pass)
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
            virtual_s=self.loop.now, struck=tuple(self.struck), passed=self.passed,
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
            self.loop.at(when, self._strike, kind)
        self.loop.at(CALM_S, self._calm)
        while not self._finished():
            self._check()
            if self.loop.now > END_S_MAX:
                raise AssertionError(f"P6: the run stands still at {self.oracle.head}: {self._phases()}")
            await asyncio.sleep(0.25)
        self._calm()
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
        quiet = not self._operating and self.server.counts() == (0, 0)
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

    # Faults

    def _calm(self) -> None:
        self.calm, self._due = True, ""
        rates = self.server.rates
        rates.lost_request = rates.lost_reply = rates.lost_delivery = rates.twice = rates.slow = 0.0
        self.store.full = self.store.broken = DISK.full = False
        self.store.lost_reply = 0.0
        self.server.cut.clear()
        for stream in self.server.streams.values():
            stream.full = False

    def _pick(self, *kinds: str) -> Process:
        """A process, the trainer as often as all others together."""
        if not kinds and self.rng.random() < 0.4:
            return self.processes["trainer"]
        return self.rng.choice([p for p in self.processes.values() if not kinds or p.kind in kinds])

    def _for_a_while(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Often somebody dies while it lasts."""
        begin()
        seconds = self.rng.random() * TROUBLE_S_MAX
        self.loop.after(seconds, end)
        if self.rng.random() < 0.5:
            self.loop.after(self.rng.random() * seconds, self._strike, "kill")

    def _strike(self, kind: str) -> None:
        if not self.calm:
            self.struck.append(kind)
            kind, _, name = kind.partition(":")
            getattr(self, f"_fault_{kind}")(*filter(None, [name]))

    def _fault_kill(self, name: str = "") -> None:
        life = (self.processes[name] if name else self._pick()).life
        if life is not None:
            life.die()

    def _fault_fuse(self) -> None:
        life = self._pick().life
        if life is not None and life.alive:
            life.fuse = self.rng.randint(1, 200)

    def _fault_freeze(self) -> None:
        life = self._pick().life
        if life is not None and life.alive and life.frozen is None:
            life.frozen = []
            self.loop.after(self.rng.random() * 6, self.loop.thaw, life)

    def _fault_drain(self) -> None:
        process = self._pick("dispatcher", "agent", "trainer", "sandbox")
        self._sigterm(process)

    def _fault_server(self) -> None:
        self.server.kill(0.1 + self.rng.random() * 3, forget_ids=self.plan.forget_ids)

    def _fault_partition(self) -> None:
        region = self.rng.choice([*self.plan.config.regions, "hub"])
        self._for_a_while(lambda: self.server.cut.add(region), lambda: self.server.cut.discard(region))

    def _fault_store_full(self) -> None:
        self._for_a_while(lambda: setattr(self.store, "full", True), lambda: setattr(self.store, "full", False))

    def _fault_store_broken(self) -> None:
        self._for_a_while(lambda: setattr(self.store, "broken", True), lambda: setattr(self.store, "broken", False))

    def _fault_stream_full(self) -> None:
        stream = self.server.streams[self.rng.choice(["TASKS", "ROLLOUTS"])]
        self._for_a_while(lambda: setattr(stream, "full", True), lambda: setattr(stream, "full", False))

    def _fault_rival(self) -> None:
        """The process hangs, somebody starts a second one, and then it wakes up."""
        process = self._pick("trainer", "dispatcher")
        first = process.life
        if first is None or not first.alive or first.frozen is not None:
            return
        first.frozen = []
        first.on_death = lambda life: None
        self.loop.after(1 + self.rng.random() * 3, self.loop.thaw, first)
        self.loop.after(1 + self.rng.random() * 8, first.die)
        process.life = None
        self.start(process)

    def _fault_rollback(self) -> None:
        at = [v for v in self.oracle.checkpoints if v.n < self.oracle.head.n]
        if not at:
            return
        life = Life("operator", "hub")
        self.lives.append(life)
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        self.loop.create_task(self._roll_back(self.rng.choice(at)), context=context)

    async def _roll_back(self, base: Version) -> None:
        bus = Bus(Client(self.server), RUN, self.store)  # type: ignore[arg-type]
        self._operating += 1
        with contextlib.suppress(InputError, UnavailableError, FencedOut):
            await rollback(bus, signing.load_key(self.shared / "keys" / "trainer.key"), base)
        self._operating -= 1

    def _fault_disk_full(self) -> None:
        """Agents' disks take no file for a while."""
        self._for_a_while(lambda: setattr(DISK, "full", True), lambda: setattr(DISK, "full", False))

    def _pass(self, name: str) -> None:
        self.passed[name] = self.passed.get(name, 0) + 1
        life = LIFE.get()
        if life is not None and (self._point == (name, self.passed[name]) or self._due == name):
            self.struck.append(f"{name}:{self.passed[name]}")
            self._due = ""
            life.die()
            raise Killed(name)

    def _fault_point(self) -> None:
        """Whoever passes one of the fail points next is killed there."""
        self._due = self.rng.choice(sorted(POINTS_IN_RUN))

    # Draining

    def _sigterm(self, process: Process) -> None:
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
