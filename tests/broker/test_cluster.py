"""P1 on three replicas: a server, then the leader, is killed during a run, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import nats.errors
import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.bus.server import find_nats_server, free_port, wait_listening
from headway.bus.topology import Topology
from headway.schemas.errors import UnavailableError
from headway.trainer.audit import audit
from headway.trainer.history import History

from .conftest import end

T = TypeVar("T")
NODES = 3
READY_S_MAX = 60.0
STEP_S_MAX = 90.0
STEPS = 8


class Cluster:
    """Three nats-servers on loopback that replicate to one another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, [free_port() for _ in range(NODES)]
        self._routes = [free_port() for _ in range(NODES)]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * NODES

    def start(self, node: int) -> None:
        folder = self.folder / f"n{node}"
        folder.mkdir(exist_ok=True, parents=True)
        routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in self._routes)
        text = f"""
            server_name: n{node}
            listen: "127.0.0.1:{self.ports[node]}"
            max_payload: {8 << 20}
            jetstream {{ store_dir: "{folder}", max_file_store: 100GB, sync_interval: "10s" }}
            cluster {{ name: c, listen: "127.0.0.1:{self._routes[node]}", routes: [{routes}] }}
        """
        (folder / "nats.conf").write_text(text)
        command = [find_nats_server(), "-c", str(folder / "nats.conf"), "-l", str(folder / "log")]
        self.processes[node] = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def kill(self, node: int) -> None:
        process = self.processes[node]
        assert process is not None
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        self.processes[node] = None

    def close(self) -> None:
        for node, process in enumerate(self.processes):
            if process is not None:
                self.kill(node)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path / "cluster")
    for node in range(NODES):
        made.start(node)
    try:
        for port in made.ports:
            await wait_listening(port)
        yield made
    finally:
        made.close()


async def connect(cluster: Cluster, store: ObstoreBlobs) -> Bus:
    return await Bus.connect(f"nats://127.0.0.1:{cluster.ports[0]}", "test", store=store)


async def replicated(bus: Bus) -> None:
    """The run's streams on all three, once the cluster has a leader that can make them."""
    topology = Topology(run="test", ack_wait_s=2.0, replicas=NODES, max_stream_bytes=64 << 20)
    end_s = asyncio.get_running_loop().time() + READY_S_MAX
    while True:
        try:
            await topology.apply(bus.js)
            return
        except (nats.errors.Error, TimeoutError, UnavailableError) as error:
            if asyncio.get_running_loop().time() > end_s:
                raise AssertionError(f"no cluster after {READY_S_MAX} s: {error!r}") from None
            await asyncio.sleep(0.3)


async def leader(bus: Bus, suffix: str) -> int:
    """The node that leads a stream."""
    while True:
        try:
            info = await bus.js.stream_info(bus.subjects.stream(suffix))
        except (nats.errors.Error, TimeoutError):
            await asyncio.sleep(0.2)
            continue
        if info.cluster is not None and info.cluster.leader:
            return int(info.cluster.leader.removeprefix("n"))
        await asyncio.sleep(0.2)


async def until_step(run: Any, n: int) -> History:
    """The history once step n is committed; servers may be away meanwhile."""
    async with asyncio.timeout(STEP_S_MAX):
        while True:
            with contextlib.suppress(UnavailableError):
                history: History = await run.history()
                if history.head.n >= n:
                    return history
            await asyncio.sleep(0.1)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What `call` returns once servers answer."""
    async with asyncio.timeout(STEP_S_MAX):
        while True:
            with contextlib.suppress(UnavailableError):
                return await call()
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def kept(start: Callable[[], Any]) -> AsyncIterator[None]:
    """A service that is started again when it finds the servers away, as whoever supervises it would."""

    async def keep() -> None:
        while True:
            try:
                async with start() as service:
                    await service.stop.wait()
            except* UnavailableError:
                await asyncio.sleep(0.2)

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        await end(keeping)


async def test_a_follower_and_then_a_leader_die_and_nothing_acknowledged_is_lost(
    cluster: Cluster, tmp_path: Path, run_on: Any
) -> None:
    store = ObstoreBlobs.open(str(tmp_path / "store"))
    async with await connect(cluster, store) as bus:
        await replicated(bus)
        run = run_on(bus, STEPS)
        acknowledged: dict[int, str] = {}
        publish = bus.publish

        async def remember(subject: str, message: Any, **named: Any) -> int:
            seq = await publish(subject, message, **named)
            if ".rollout." in subject:
                acknowledged[seq] = message.message_id()
            return seq

        bus.publish = remember  # type: ignore[method-assign]
        killed = []
        async with (
            kept(run.dispatcher),
            kept(run.trainer),
            run.agent(lambda task, head: run.graded(task, task.sample, head)),
        ):
            await until_step(run, 2)
            led = await leader(bus, "LEDGER")
            killed.append(next(node for node in range(NODES) if node != led))
            cluster.kill(killed[-1])
            await until_step(run, 4)
            cluster.start(killed[-1])
            await wait_listening(cluster.ports[killed[-1]])
            await until_step(run, 5)
            killed.append(await leader(bus, "LEDGER"))
            cluster.kill(killed[-1])
            history = await until_step(run, STEPS)
        assert killed[0] != killed[1] or await leader(bus, "LEDGER") != killed[1]
        report = await patiently(lambda: audit(bus))
        assert (report.violations, report.lost, report.trained_twice) == ([], 0, 0)
        assert report.trained == STEPS * 4
        assert history.head.n == STEPS

        async def rollouts() -> dict[int, str]:
            return {one.seq: one.headers["Nats-Msg-Id"] async for one in read_all(bus, "ROLLOUTS")}

        stored = await patiently(rollouts)
        assert acknowledged.items() <= stored.items()
        assert len(acknowledged) >= STEPS * 4
