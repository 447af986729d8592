"""`headway record --follow` and `headway audit --rebuild` as commands, on a run that goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.bus.recording import Recording
from headway.deploy.settings import to_toml
from headway.schemas.errors import InputError

from ..conftest import NatsProcess
from .recorded import answer_of

Make = Callable[..., Any]
STEPS = 8
COMMAND_S_MAX = 60.0


class Commands:
    """`headway …` in processes of their own, beside a run that this process drives."""

    def __init__(self, nats: NatsProcess, run: Any) -> None:
        self.folder = run.folder
        (run.folder / "run.toml").write_text(to_toml(run.config))
        store, token = str(run.folder / "store"), nats.settings.token
        given = {"HEADWAY_NATS_URL": nats.settings.url, "HEADWAY_NATS_TOKEN": token, "HEADWAY_STORE_URL": store}
        self._env = {**os.environ, **given}

    async def start(self, *words: object) -> asyncio.subprocess.Process:
        command = [sys.executable, "-P", "-m", "headway.deploy.cli.main", *map(str, words)]
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*command, env=self._env, stdout=pipe, stderr=pipe)

    async def output(self, process: asyncio.subprocess.Process) -> tuple[int, str]:
        """(exit code, what it wrote to either stream)"""
        out, err = await asyncio.wait_for(process.communicate(), COMMAND_S_MAX)
        assert process.returncode is not None
        return process.returncode, (out + err).decode()

    async def audit(self, *words: object) -> Any:
        code, text = await self.output(await self.start("audit", *words))
        assert code == 0, text
        return json.JSONDecoder().raw_decode(text[text.index("{") :])[0]


@pytest.fixture
def run(make_run: Make) -> Any:
    return make_run(steps=STEPS)


@pytest.fixture
def commands(nats_process: NatsProcess, run: Any) -> Commands:
    return Commands(nats_process, run)


def recorded(path: Path) -> int:
    """How many steps the file holds."""
    if not path.exists():
        return 0
    try:
        with Recording(path) as recording:
            return sum(m.headers.get("Headway-Record") == "step" for m in recording.batch("LEDGER", 1))
    except InputError:  # begun, and nothing committed to it yet
        return 0


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(COMMAND_S_MAX):
        while not true():
            await asyncio.sleep(0.05)


async def test_a_recorder_that_is_killed_goes_on_and_a_lost_ledger_is_put_back(run: Any, commands: Commands) -> None:
    path = run.folder / "run.hwr"
    follow = ("record", run.folder, "--follow", "--out", path)
    async with run.dispatcher(), run.trainer(), run.agent(answer_of(run)):
        first = await commands.start(*follow)
        await run.wait_for_step(2)
        await until(lambda: recorded(path))
        assert first.returncode is None
        first.kill()
        await first.wait()
        second = await commands.start(*follow)
        await run.wait_for_step(STEPS, COMMAND_S_MAX)
        code, said = await commands.output(second)
        assert code == 0, said
    code, said = await commands.output(await commands.start("record", run.folder, "--out", path))
    assert code == 0, said

    live = await commands.audit(run.folder)
    assert live["violations"] == []
    assert live["issued"] == live["trained"] + sum(live["dropped"].values()) > 0
    assert await commands.audit("--from", path) == live

    await run.bus.js.delete_stream(run.bus.subjects.stream("LEDGER"))
    code, said = await commands.output(await commands.start("audit", run.folder))
    assert code != 0, said
    assert await commands.audit(run.folder, "--rebuild") == live
    assert await commands.audit(run.folder) == live
