"""The supervisor with tiny real children."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headway.deploy.supervisor import ChildFailed, ChildSpec, Supervisor

WAIT_S_MAX = 10.0
SLEEPER = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


class Stage:
    """A supervisor, what it said, and a way to describe children."""

    def __init__(self, folder: Path, tasks: asyncio.TaskGroup, restarts_max: int) -> None:
        self.said: list[str] = []
        self.folder = folder
        self.supervisor = Supervisor(tasks, self.said.append, restarts_max=restarts_max)

    def spec(self, name: str, code: str, *, rank: int = 1, once: bool = False, drain_s: float = 5.0) -> ChildSpec:
        return ChildSpec(
            name=name,
            argv=[sys.executable, "-S", "-E", "-c", code],
            env={},
            log=self.folder / f"{name}.log",
            rank=rank,
            once=once,
            drain_s=drain_s,
        )

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    async def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S_MAX
        while not true():
            assert time.monotonic() < end, (self.said, self.supervisor.pids())
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def stage(folder: Path, restarts_max: int = 6) -> AsyncIterator[Stage]:
    async with asyncio.TaskGroup() as tasks:
        made = Stage(folder, tasks, restarts_max)
        try:
            yield made
        finally:
            made.supervisor.kill_all()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.start(made.spec("a", SLEEPER))
        first = made.supervisor.pids()["a"]
        os.kill(first, signal.SIGKILL)
        await made.until(lambda: made.supervisor.pids().get("a", first) != first)
        assert "a was killed by SIGKILL" in made.said[0]


async def test_pauses_between_restarts_grow_and_the_limit_within_a_minute_ends_them(tmp_path: Path) -> None:
    async with stage(tmp_path, restarts_max=3) as made:
        made.supervisor.start(made.spec("a", "import sys; print('boom', flush=True); sys.exit(1)"))
        failure = await asyncio.wait_for(made.supervisor.failure, WAIT_S_MAX)
        assert failure.exit_code == 69
        assert "too often" in failure.what
        assert failure.why == "boom"
        assert [line.rpartition("in ")[2] for line in made.said] == ["0.2 s", "0.4 s", "0.8 s"]
        assert made.log("a") == "boom\n" * 4


@pytest.mark.parametrize("code", [64, 65, 70, 75])
async def test_a_final_exit_code_is_the_failure_of_the_whole_and_says_what_the_child_logged(
    tmp_path: Path, code: int
) -> None:
    line = '{"event": "service_failed", "what": "bad key", "why": "it is bad", "hint": "mend it"}'
    async with stage(tmp_path) as made:
        made.supervisor.start(made.spec("a", f"import sys; print('''{line}''', flush=True); sys.exit({code})"))
        failure = await asyncio.wait_for(made.supervisor.failure, WAIT_S_MAX)
        assert failure.exit_code == code
        assert failure.why == "bad key: it is bad"
        assert failure.hint.startswith("mend it")
        assert made.said == []


async def test_a_child_that_ends_by_itself_is_a_result_and_a_failing_one_is_an_error(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await made.supervisor.run_once(made.spec("good", "print('built')", once=True))
        assert made.log("good") == "built\n"
        with pytest.raises(ChildFailed) as caught:
            await made.supervisor.run_once(made.spec("bad", "raise SystemExit(64)", once=True))
        assert caught.value.exit_code == 64


async def test_children_are_drained_in_the_order_of_their_ranks(tmp_path: Path) -> None:
    order = tmp_path / "order"
    async with stage(tmp_path) as made:
        for name, rank in (("last", 3), ("first", 1), ("middle", 2)):
            on_term = f"open({str(order)!r}, 'a').write('{name} '); sys.exit(0)"
            body = f"signal.signal(15, lambda *_: (time.sleep(0.1), exec({on_term!r})))"
            code = f"import signal, sys, time\n{body}\nprint('ready', flush=True)\ntime.sleep(60)"
            made.supervisor.start(made.spec(name, code, rank=rank))
        await made.until(lambda: all("ready" in made.log(name) for name in ("first", "middle", "last")))
        await made.supervisor.drain(below_rank=3)
        assert order.read_text() == "first middle "
        assert list(made.supervisor.pids()) == ["last"]
        await made.supervisor.drain()
        assert order.read_text() == "first middle last "
        assert made.said == []


async def test_a_child_that_ignores_the_drain_is_killed_after_its_time(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.start(made.spec("a", STUBBORN, drain_s=0.2))
        await made.until(lambda: "ready" in made.log("a"))
        pid = made.supervisor.pids()["a"]
        await made.supervisor.drain()
        assert not alive(pid)
        assert made.said == ["a did not drain within 0.2 s; killed"]


async def test_a_child_is_still_restarted_while_others_drain(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        made.supervisor.start(made.spec("slow", STUBBORN, rank=1, drain_s=1.0))
        made.supervisor.start(made.spec("bus", SLEEPER, rank=2))
        await made.until(lambda: "ready" in made.log("slow"))
        draining = asyncio.create_task(made.supervisor.drain(below_rank=2))
        await asyncio.sleep(0.05)
        first = made.supervisor.pids()["bus"]
        os.kill(first, signal.SIGKILL)
        await draining
        assert made.supervisor.pids()["bus"] != first


async def test_nothing_of_a_childs_group_outlives_it(tmp_path: Path) -> None:
    code = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); "
    async with stage(tmp_path) as made:
        made.supervisor.start(made.spec("a", code + "print(p.pid, flush=True); time.sleep(60)"))
        await made.until(lambda: made.log("a"))
        grandchild = int(made.log("a"))
        assert alive(grandchild)
        os.kill(made.supervisor.pids()["a"], signal.SIGKILL)
        await made.until(lambda: not alive(grandchild))


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from headway.deploy.supervisor import ChildSpec, Supervisor

async def main():
    async with asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(tasks, print)
        supervisor.start(ChildSpec(name="a", argv=[sys.executable, "-c", {SLEEPER!r}], env={{}},
                                   log=Path({str(tmp_path / "a.log")!r}), rank=1))
        print(supervisor.pids()["a"], flush=True)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    end = time.monotonic() + WAIT_S_MAX
    while alive(child):
        assert time.monotonic() < end
        time.sleep(0.01)


async def test_a_second_signal_ends_everything_at_once_with_130(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from headway.deploy.commands import on_signals
from headway.deploy.supervisor import ChildSpec, Supervisor

async def main():
    async with asyncio.TaskGroup() as tasks:
        supervisor, stop = Supervisor(tasks, print), asyncio.Event()
        on_signals(stop, supervisor.kill_all)
        supervisor.start(ChildSpec(name="a", argv=[sys.executable, "-c", {STUBBORN!r}], env={{}},
                                   log=Path({str(tmp_path / "a.log")!r}), rank=1, drain_s=60.0))
        print(supervisor.pids()["a"], flush=True)
        await stop.wait()
        print("draining", flush=True)
        await supervisor.drain()

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    while "ready" not in (tmp_path / "a.log").read_text():
        await asyncio.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert await process.stdout.readline() == b"draining\n"
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), WAIT_S_MAX) == 130
    await asyncio.sleep(0.05)
    assert not alive(child)
    await process.communicate()
