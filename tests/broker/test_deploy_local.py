"""`headway up` with a real nats-server and stand-ins for the services."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headway.bus.connection import Bus
from headway.deploy.children import Children, Rank
from headway.deploy.local import LocalRun, connect, with_bus
from headway.deploy.run_folder import RunFolder
from headway.deploy.supervisor import ChildFailed, ChildSpec
from headway.schemas.config import Config, parse_config
from headway.schemas.errors import UnavailableError
from headway.schemas.ledger import CHAIN_START, Open, Record, seal_record
from headway.schemas.messages import Event
from headway.schemas.version import Version

WAIT_S_MAX = 20.0
FINISHER = """
import asyncio, os
from headway.bus.connection import Bus
from headway.schemas.messages import Event

async def main():
    user, password = os.environ["HEADWAY_NATS_USER"], os.environ["HEADWAY_NATS_PASSWORD"]
    bus = await Bus.connect(os.environ["HEADWAY_NATS_URL"], "r", user=user, password=password)
    async with bus:
        for name, fields in (("step", {"step": 1, "reward_mean": 0.5}), ("run_finished", {})):
            await bus.publish(bus.subjects.event("trainer", name), Event(
                service="trainer", instance="t", name=name, fields=fields))
    await asyncio.sleep(60)

asyncio.run(main())
"""
SLEEPER = "import time; time.sleep(60)"


class Here:
    """A run in `folder` whose services are the given programs."""

    def __init__(self, folder: Path, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.finished: list[str] = []
        self.config: Config = parse_config("", "t", {"run.name": "r", "model.base": str(folder)})
        self.folder = RunFolder(folder / "r")
        self.run = LocalRun(config=self.config, folder=self.folder, say=self.lines.append, finish=self._finish)
        self.stop = asyncio.Event()

        def services(children: Children) -> Iterator[ChildSpec]:
            for name, program in programs.items():
                spec = children._service(name, name, Rank.TRAINER)
                yield replace(spec, argv=[sys.executable, "-P", "-c", program])

        monkeypatch.setattr(Children, "services", services)
        monkeypatch.setattr(
            Children,
            "tasks",
            lambda children: replace(
                children._once("tasks", []),
                argv=[sys.executable, "-S", "-c", "print('tasks built')"],
                show_stdout=False,
            ),
        )

    async def _finish(self, bus: Bus, wall_s: float) -> None:
        assert self.run.supervisor is not None
        self.finished += list(self.run.supervisor.pids())

    def pids(self) -> dict[str, int]:
        return self.run.supervisor.pids() if self.run.supervisor else {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[bool]"]:
        task = asyncio.create_task(self.run.run(self.stop))
        try:
            yield task
        finally:
            self.stop.set()
            await asyncio.gather(task, return_exceptions=True)


async def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S_MAX
    while not true():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_a_run_ends_when_it_is_finished_with_only_the_bus_left_for_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(tmp_path, {"trainer": FINISHER, "agent": SLEEPER}, monkeypatch)
    assert await asyncio.wait_for(here.run.run(here.stop), WAIT_S_MAX)
    assert here.finished == ["nats"]
    assert here.pids() == {}
    assert any(line.startswith("step  1/70") for line in here.lines)
    assert not here.folder.url_file.exists()


async def test_a_finished_run_starts_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await Here(tmp_path, {"trainer": FINISHER}, monkeypatch).run.run(asyncio.Event())
    again = Here(tmp_path, {"trainer": "raise SystemExit(70)"}, monkeypatch)
    assert await asyncio.wait_for(again.run.run(again.stop), WAIT_S_MAX)
    assert again.finished == ["nats"]
    (line,) = (again.folder.path / "metrics.jsonl").read_text().splitlines()  # made anew from the stream, not appended
    assert json.loads(line) == {"step": 1, "reward_mean": 0.5}


async def test_a_finished_run_that_was_rolled_back_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(tmp_path, {"trainer": FINISHER}, monkeypatch)
    await here.run.run(asyncio.Event())

    async def fork(bus: Bus) -> int:
        opened = Record(prev=CHAIN_START, term=1, index=0, body=Open(instance="x", environment={}))
        entry = seal_record(opened, Version(1, 7), b"k" * 32)
        return await bus.publish(bus.subjects.ledger(Version(1, 7), "open"), entry)

    await with_bus(here.config, here.folder, fork)
    again = Here(tmp_path, {"trainer": "raise SystemExit(70)"}, monkeypatch)
    with pytest.raises(BaseExceptionGroup) as caught:
        await asyncio.wait_for(again.run.run(again.stop), WAIT_S_MAX)
    assert caught.group_contains(ChildFailed)


async def test_stopping_drains_everything_and_says_that_the_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(tmp_path, {"agent": SLEEPER}, monkeypatch)
    async with here.running() as task:
        await until(lambda: "agent" in here.pids())
        here.stop.set()
        assert await asyncio.wait_for(task, WAIT_S_MAX) is False
    assert here.pids() == {}
    assert here.finished == []
    assert here.lines[-1] == "stopped; the same command goes on with run r"


async def test_a_second_up_of_a_run_is_refused_and_reading_commands_use_its_bus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(tmp_path, {"agent": SLEEPER}, monkeypatch)
    async with here.running():
        await until(lambda: "agent" in here.pids())
        other = LocalRun(config=here.config, folder=here.folder, say=here.lines.append, finish=here._finish)
        with pytest.raises(UnavailableError, match="in use"):
            await other.run(asyncio.Event())

        async def publish(bus: Bus) -> int:
            event = Event(service="x", instance="x", name="seen")
            return await bus.publish(bus.subjects.event("x", "seen"), event)

        assert await with_bus(here.config, here.folder, publish) == 1
        here.stop.set()
    assert await with_bus(here.config, here.folder, publish) == 2  # the run is down: its bus is started to read


async def test_a_killed_nats_server_comes_back_at_its_address_with_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(tmp_path, {"agent": SLEEPER}, monkeypatch)
    async with here.running():
        await until(lambda: "agent" in here.pids())
        url, first = here.folder.url_file.read_text(), here.pids()["nats"]
        async with await connect(here.config, here.folder, url) as bus:
            await bus.publish(bus.subjects.event("x", "before"), Event(service="x", instance="x", name="before"))
            os.kill(first, signal.SIGKILL)
            seq = await bus.publish(bus.subjects.event("x", "after"), Event(service="x", instance="x", name="after"))
        assert seq == 2
        assert here.pids()["nats"] != first


async def test_a_final_exit_code_of_a_service_stops_the_whole_run_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(tmp_path, {"agent": SLEEPER, "trainer": "raise SystemExit(75)"}, monkeypatch)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(here.run.run(here.stop), WAIT_S_MAX)
    failure = caught.value.exceptions[0]
    assert isinstance(failure, ChildFailed)
    assert failure.exit_code == 75
    assert here.pids() == {}
