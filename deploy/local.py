"""`headway up`: a whole run on one machine, from an empty folder to the summary.

Order: lock the run folder; nats-server; streams; task set; base model; services. Then follow the
events until `run_finished`; drain everything but the bus; audit and summarise; drain the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus, StoredMessage
from headway.bus.reader import follow, read_all
from headway.bus.server import ServerSettings, free_port, wait_listening
from headway.bus.topology import Topology
from headway.deploy import drift
from headway.deploy.children import Children, Rank
from headway.deploy.fleet import Fleet
from headway.deploy.progress import Progress
from headway.deploy.roles import OPERATOR
from headway.deploy.run_folder import RunFolder
from headway.deploy.supervisor import Supervisor
from headway.deploy.watchdog import Watchdog
from headway.schemas.config import Config
from headway.schemas.errors import UnavailableError, WireError
from headway.schemas.messages import Event

RUN_FINISHED = "run_finished"
WATCH_POLL_S = 0.2
CANCEL_S = 0.2
Say = Callable[[str], None]
Finish = Callable[[Bus, float], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class LocalRun:
    """One `headway up`. `supervisor` exists once the run has begun: tests reach its children through it.

    `finish(bus, wall_s)` is awaited when the run is done and only the bus is still up.
    """

    config: Config
    folder: RunFolder
    say: Say
    finish: Finish
    supervisor: Supervisor | None = None

    def kill(self) -> None:
        """End every process of the run at once."""
        if self.supervisor is not None:
            self.supervisor.kill_all()

    async def run(self, stop: asyncio.Event) -> bool:
        """Run to the end, or until `stop`; whether the end was reached.

        Raises, in an exception group, ChildFailed when a process ended for good, ConfigError and
        UnavailableError for the set-up.
        """
        began_s = time.monotonic()
        with self.folder.locked():
            self.folder.prepare(self.config)
            async with asyncio.TaskGroup() as tasks, embedded_bus(self.config, self.folder, tasks, self.say) as hosted:
                self.supervisor, children, bus = hosted
                self.say(f"run {self.config.run.name} in {self.folder.path}, bus {children.nats_url}")
                await drift.apply(bus, topology(self.config))
                ended = await self._work(self.supervisor, children, bus, stop)
                wall_s = self.folder.spend(time.monotonic() - began_s)
                if not ended:
                    self.say(f"stopped; the same command goes on with run {self.config.run.name}")
                    return False
                await self.finish(bus, wall_s)
                return True

    async def _work(self, supervisor: Supervisor, children: Children, bus: Bus, stop: asyncio.Event) -> bool:
        """Run the services until the end or `stop`, then drain them; whether it was the end."""
        work = asyncio.create_task(self._to_the_end(supervisor, children, bus))
        stopped = asyncio.create_task(stop.wait())
        try:
            waiting: set[asyncio.Future[Any]] = {work, stopped, supervisor.failure}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if stopped.done() and not work.done():
                self.say("stopping: what was sampled is kept; a second signal ends at once")
        finally:
            ended = work.done()
            await cancel(work, stopped)
            await supervisor.drain(below_rank=Rank.NATS)
        if supervisor.failure.done():
            raise supervisor.failure.result()
        if ended:
            work.result()
        return ended

    async def _to_the_end(self, supervisor: Supervisor, children: Children, bus: Bus) -> None:
        """Everything from the task set to the run's end. A finished run starts nothing again."""
        with (self.folder.path / "metrics.jsonl").open("w", buffering=1) as metrics:  # made whole from EVENTS
            progress = Progress(
                say=self.say, steps=self.config.run.steps, max_lag=self.config.staleness.max_lag, metrics=metrics
            )
            seq, ended = 0, False
            async for stored in read_all(bus, "EVENTS"):
                seq = stored.seq
                ended = await self._is_end(bus, stored, progress, shown=False) or ended
            if ended and not await self._rolled_back(bus):
                self.say(f"run {self.config.run.name} has finished before; another seed and name start a new one")
                return
            progress.resumed()
            await self._serve(supervisor, children, bus, progress, seq)

    async def _rolled_back(self, bus: Bus) -> bool:
        """Whether the ledger's head is short of the last step."""
        stored = await bus.last("LEDGER")
        return stored is not None and int(bus.subjects.parse(stored.subject)[2]) < self.config.run.steps

    async def _serve(self, supervisor: Supervisor, children: Children, bus: Bus, progress: Progress, seq: int) -> None:
        """Start everything; follow EVENTS after `seq` to the run's end."""
        if not has_tasks(self.config, self.folder):
            await supervisor.run_once(children.tasks())
        if not self.config.model.base and not self.folder.base.exists():
            await supervisor.run_once(children.midtrain())
        fleet = Fleet(clock=asyncio.get_running_loop().time)
        await fleet.hear(bus)
        beating = []
        for spec in children.services():
            supervisor.start(spec)
            beating += [spec.name] * (spec.rank != Rank.ENGINE)
        dog = Watchdog(fleet=fleet, stall_s=self.config.bus.stall_warning_s, say=self.say, expected=beating)
        watching = asyncio.create_task(dog.run())
        try:
            async for stored in follow(bus, "EVENTS", seq + 1, poll_s=WATCH_POLL_S):
                if await self._is_end(bus, stored, progress, shown=True):
                    return
        finally:
            await cancel(watching)

    async def _is_end(self, bus: Bus, stored: StoredMessage, progress: Progress, *, shown: bool) -> bool:
        if bus.subjects.parse(stored.subject)[0] != "event":
            return False
        try:
            event = await bus.open(Event, stored)
        except WireError:
            return False  # events are for people; nothing but the end hangs on them
        progress.add(event, shown=shown)
        return event.name == RUN_FINISHED


def has_tasks(config: Config, folder: RunFolder) -> bool:
    """Whether the run's folder holds the task set that the config asks for."""
    wanted = config.tasks
    try:
        summary = json.loads((folder.tasks / "summary.json").read_text())
    except (OSError, ValueError):
        return False
    return bool((summary.get("seed"), summary.get("sessions")) == (wanted.seed, wanted.demonstrations))


def topology(config: Config) -> Topology:
    """The streams of a run, with room for every session that its fleet can hold."""
    sessions = sum(region.agents for region in config.regions.values()) * config.agent.max_sessions
    return Topology(
        run=config.run.name,
        ack_wait_s=config.dispatch.ack_wait_s,
        max_ack_pending=max(sessions, config.dispatch.max_in_flight),
        max_stream_bytes=config.bus.max_stream_bytes,
    )


@contextlib.asynccontextmanager
async def embedded_bus(
    config: Config, folder: RunFolder, tasks: asyncio.TaskGroup, say: Say
) -> AsyncIterator[tuple[Supervisor, Children, Bus]]:
    """A connected bus: bus.url's, else of an embedded nats-server. Drains every child at the end."""
    supervisor = Supervisor(tasks, say)
    server = ServerSettings(
        folder=folder.nats,
        port=0 if config.bus.url else free_port(),
        token=folder.token(),
        auth="" if config.bus.url else folder.auth_block(config.run.name),
        sync_always=config.bus.sync_always,
    )
    children = Children(config=config, folder=folder, nats_url=config.bus.url or server.url)
    try:
        if not config.bus.url:
            supervisor.start(children.nats(server))
            await supervisor.while_up(wait_listening(server.port))
            folder.url_file.write_text(server.url)
        async with await supervisor.while_up(connect(config, folder, children.nats_url)) as bus:
            yield supervisor, children, bus
    finally:
        folder.url_file.unlink(missing_ok=True)
        await supervisor.drain()


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """End tasks. Python 3.11's wait_for can swallow a cancellation that meets its result, so insist."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=CANCEL_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def connect(config: Config, folder: RunFolder, url: str, wait_s: float | None = None) -> Bus:
    store = ObstoreBlobs.open(folder.store_url(config), attempts=config.store.put_attempts)
    login = folder.environment(OPERATOR, config)
    return await Bus.connect(
        url,
        config.run.name,
        token=login.get("HEADWAY_NATS_TOKEN", ""),
        user=login.get("HEADWAY_NATS_USER", ""),
        password=login.get("HEADWAY_NATS_PASSWORD", ""),
        name="headway-cli",
        store=store,
        wait_s=wait_s,
    )


async def with_bus(config: Config, folder: RunFolder, read: Callable[[Bus], Coroutine[Any, Any, Any]]) -> Any:
    """What `read(bus)` returns on the bus of a run, whether the run is up or not."""
    if url := os.environ.get("HEADWAY_NATS_URL") or config.bus.url:
        async with await connect(config, folder, url) as bus:
            return await read(bus)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(folder.locked())
        except UnavailableError:
            if not folder.url_file.exists():
                raise
            async with await connect(config, folder, folder.url_file.read_text()) as bus:
                return await read(bus)
        async with asyncio.TaskGroup() as tasks, embedded_bus(config, folder, tasks, lambda line: None) as hosted:
            return await read(hosted[2])
