"""A trainer of two ranks on a real bus, started by torchrun itself or by `headway trainer`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headway.bus.ledger import LedgerReader
from headway.bus.topology import Topology
from headway.deploy.settings import to_toml
from headway.schemas.errors import FencedOut
from headway.schemas.version import Version
from headway.trainer.audit import audit

STEPS = 4
TORCHRUN = ["-P", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "headway.deploy.cli.main"]
HEADWAY = ["-P", "-m", "headway.deploy.cli.main"]


async def steps_of(run: Any) -> list[Any]:
    bodies = [link.record.body async for link in LedgerReader(run.bus).links()]
    return [
        (str(b.version), b.root, b.checkpoint, b.consumed, b.drops, b.metrics, b.micro_batches)
        for b in bodies
        if b.kind == "step"
    ]


@contextlib.asynccontextmanager
async def ranks(run: Any, nats: Any, log: Path, *command: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A trainer as processes, on the run's bus and store."""
    (run.folder / "run.toml").write_text(to_toml(run.config))
    env = os.environ | {
        "HEADWAY_NATS_URL": nats.settings.url,
        "HEADWAY_NATS_TOKEN": nats.settings.token,
        "HEADWAY_RUN_DIR": str(run.folder),
        "HEADWAY_STORE_URL": str(run.folder / "store"),
        "HEADWAY_RANK_PATIENCE_S": "60",
    }
    command = (sys.executable, *command, "trainer", "--config", str(run.folder / "run.toml"))
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)  # noqa: ASYNC220
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        await asyncio.to_thread(process.wait, 90)


@pytest.mark.parametrize(
    ("command", "code"),
    [(TORCHRUN, 1), (HEADWAY, FencedOut.exit_code)],
    ids=["torchrun", "headway"],
)
async def test_ranks_take_the_steps_of_one_and_end_when_fenced_out(
    make_run: Callable[..., Any], nats_process: Any, bus: Any, tmp_path: Path, command: list[str], code: int
) -> None:
    """One rank first, then two on the same rollouts; at last another trainer opens a term of its own."""
    extra = "[staleness]\nmax_lag = 80\nswap_slack = 0\n[trainer]\nranks = 2\n"
    run = make_run(steps=STEPS, extra=extra)

    def answer(task: Any, head: Version) -> Any:
        return run.graded(task, float(task.sampling_seed % 2), Version(0, 0))

    async with run.dispatcher(), run.agent(answer), run.trainer():
        await run.wait_for_step(STEPS)
    alone = await steps_of(run)
    assert len({step[1] for step in alone}) == STEPS, "the weights stood still"
    for suffix in ("LEDGER", "WEIGHTS"):
        await bus.js.delete_stream(bus.subjects.stream(suffix))
    await Topology(run="test").apply(bus.js)
    log = tmp_path / "ranks.log"
    async with ranks(run, nats_process, log, *command) as process:
        await run.wait_for_step(STEPS, 90)
        assert await steps_of(run) == alone
        async with run.trainer():
            assert await asyncio.to_thread(process.wait, 60) == code, log.read_text()[-4000:]
    assert "FencedOut" in log.read_text()
    parts = list((run.folder / "store").rglob("*.part"))
    assert len(parts) == 3 * (STEPS + 1), "two parts of each version, and who sealed them"
    assert (await audit(run.bus)).violations == []
