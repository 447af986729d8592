"""An engine that hangs, dies, or returns with other weights is out of rotation until it has proven the right ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from torch import Tensor

from headway.bus.server import free_port
from headway.deploy import sglang_server
from headway.kernels.hf import save_folder
from headway.kernels.weights import init_weights
from headway.rollout_agent import client as clients
from headway.rollout_agent.client import EngineClient, Sampling
from headway.rollout_agent.engine.service import model_config
from headway.rollout_agent.engine_writer import EngineWriter
from headway.rollout_agent.model_shape import ModelShape, hf_config
from headway.rollout_agent.weights import WeightKeeper
from headway.schemas.errors import ConfigError

from .servers import Trainer, kill, running, small

NOTICED_S_MAX = 20.0
BACK_S_MAX = 60.0
SAMPLING = Sampling(max_new_tokens=4, temperature=1.0, seed=1, stop_ids=())


def weights(seed: int) -> dict[str, Tensor]:
    return {name: w.bfloat16() for name, w in init_weights(model_config(small("local")), seed).items()}


@dataclass
class World:
    """An engine that serves version 0.0 of `trainer`, and the keeper that watches it."""

    kind: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes]
    trainer: Trainer
    keeper: WeightKeeper
    keeping: asyncio.Task[None]

    @property
    def writer(self) -> EngineWriter:
        return self.keeper.writers[0]

    async def sample(self) -> int:
        return len((await self.writer.engine.generate([256, 65], SAMPLING, rid="r", timeout_s=20)).token_ids)

    def model_pid(self) -> int:
        """The process that computes: SGLang's scheduler, the local engine itself."""
        if self.kind == "local":
            return self.process.pid
        group = subprocess.run(["ps", "-o", "pid=,args=", "-g", str(self.process.pid)], capture_output=True, text=True)
        return next(int(line.split()[0]) for line in group.stdout.splitlines() if "sglang::scheduler" in line)

    async def until_out_of_rotation(self) -> None:
        async with asyncio.timeout(NOTICED_S_MAX):
            while self.keeper.may_start():
                await asyncio.sleep(0.05)

    async def until_back(self) -> None:
        async with asyncio.timeout(BACK_S_MAX):
            while not self.keeper.may_start():
                assert not self.keeping.done(), self.keeping
                await asyncio.sleep(0.05)
        assert self.writer.holds == self.trainer.mirror.root
        assert await self.sample()


@contextlib.asynccontextmanager
async def world(kind: str, folder: Path, http: aiohttp.ClientSession) -> AsyncIterator[World]:
    config, port = small(kind), free_port()
    model, trainer = hf_config(config.model), Trainer(folder / "mirror")
    with running(config, folder / "run", port) as (url, process):
        engine = EngineClient(http, url, ModelShape.from_hf(model))
        writer = EngineWriter(engine=engine, model_config=model, scratch=folder / "staged", clock=time.perf_counter)
        keeper = WeightKeeper(
            bus=SimpleNamespace(),  # type: ignore[arg-type]
            config=config,
            region="r",
            agent="a",
            tracker=SimpleNamespace(lag_of=lambda version: 0, changed=asyncio.Event(), head=None),  # type: ignore[arg-type]
            fetcher=SimpleNamespace(),  # type: ignore[arg-type]
            mirror=trainer.mirror,
            writers=[writer],
            clock=time.perf_counter,
        )
        staged = trainer.stage(weights(0))
        await writer.write(await writer.prepare(trainer.mirror, staged))
        trainer.mirror.commit(staged)
        keeper.served = staged.manifest.version
        await keeper.rotation.admit(keeper.rotation.places[0])
        keeping = asyncio.create_task(keeper.run())
        yield World(kind, port, folder, process, trainer, keeper, keeping)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.parametrize("kind", ["local", "sglang"])
async def test_a_hung_dead_or_swapped_engine_is_noticed_and_proven_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "sglang":
        try:
            sglang_server.find()
        except ConfigError as error:
            pytest.skip(f"SGLang's environment is missing: {error.hint}")
    for name in ("PROBE_TIMEOUT_S", "CONTROL_TIMEOUT_S", "HEALTH_TIMEOUT_S"):
        monkeypatch.setattr(clients, name, 3.0)
    async with aiohttp.ClientSession() as http, world(kind, tmp_path, http) as here:
        keeper, place = here.keeper, here.keeper.rotation.places[0]

        os.kill(here.model_pid(), signal.SIGSTOP)  # hung: SGLang's server still answers questions
        if kind == "sglang":
            keeper.rotation.fail(place, "a request took too long")
        await here.until_out_of_rotation()
        await asyncio.sleep(2.0)
        assert not keeper.may_start()
        os.kill(here.model_pid(), signal.SIGCONT)
        await here.until_back()

        kill(here.process)
        await here.until_out_of_rotation()
        with running(small(kind), tmp_path / "again", here.port):
            await here.until_back()
            save_folder(tmp_path / "old", model_config(small("local")), weights(9))
            lie = {"model_path": str(tmp_path / "old"), "weight_version": str(keeper.served), "load_format": "auto"}
            async with http.post(f"{here.writer.engine.url}/update_weights_from_disk", json=lie) as reply:
                assert reply.status == 200  # the version's name over other weights: only checksums tell
            keeper.rotation.fail(place, "a request failed")
            assert not keeper.may_start()
            await here.until_back()
            assert await here.writer.adopt(here.trainer.mirror), "it does not hold what it is said to hold"
