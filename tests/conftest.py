"""Shared fixtures: a real nats-server on a free loopback port, and a run's bus on it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.server import ServerSettings, free_port, wait_listening
from headway.bus.topology import Topology


class NatsProcess:
    """A nats-server that a test may kill and restart on the same port and folder."""

    def __init__(self, folder: Path) -> None:
        self.settings = ServerSettings(folder=folder, port=free_port(), token=secrets.token_hex(8))
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._process = subprocess.Popen(self.settings.command(), stdin=subprocess.DEVNULL)  # noqa: ASYNC220
        await wait_listening(self.settings.port)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(10)
            self._process = None


@pytest.fixture
async def nats_process(tmp_path: Path) -> AsyncIterator[NatsProcess]:
    process = NatsProcess(tmp_path / "nats")
    await process.start()
    yield process
    process.stop()


@pytest.fixture
async def bus(nats_process: NatsProcess, tmp_path: Path) -> AsyncIterator[Bus]:
    """A connected bus of run `test` with its streams and a local store."""
    settings = nats_process.settings
    store = ObstoreBlobs.open(str(tmp_path / "store"))
    async with await Bus.connect(settings.url, "test", token=settings.token, store=store) as bus:
        await Topology(run="test", ack_wait_s=1.0).apply(bus.js)
        yield bus
    await asyncio.sleep(0)


REAL = ("broker", "chaos", "engine")
"""Folders whose tests run real processes against real time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where a busy machine can starve a process past a deadline, two failures in a row count; the summary names one."""
    if config.getoption("--crash-matrix"):
        return
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in REAL:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seed", type=int, help="run one seed of tests/sim alone")
    group.addoption("--crash-matrix", action="store_true", help="kill real processes at every fail point")
    group.addoption("--seeds", type=int, default=1000, help="how many seeds tests/sim runs")
