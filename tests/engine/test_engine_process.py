"""`headway engine` as a process: it listens, drains on SIGTERM, and refuses numerics it cannot keep."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from headway.bus.server import free_port, wait_listening
from headway.kernels import selftest
from headway.kernels.hf import save_folder
from headway.kernels.weights import init_weights
from headway.rollout_agent.engine.service import core_settings, model_config
from headway.schemas.config import Config, parse_config
from headway.schemas.errors import ConfigError

SCRIPT = """
import sys
from headway.rollout_agent.engine.service import run_engine
from headway.schemas.config import Config
sys.exit(run_engine(Config(), port=int(sys.argv[1])))
"""


async def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    shape, port = model_config(Config()), free_port()
    save_folder(tmp_path / "base", shape, {n: w.bfloat16() for n, w in init_weights(shape, 0).items()})
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-P", "-c", SCRIPT, str(port)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        await wait_listening(port, 60)
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession() as http:

            async def post(path: str, body: dict[str, object]) -> tuple[int, dict[str, object]]:
                async with http.post(url + path, json=body) as response:
                    return response.status, await response.json()

            update = {"model_path": str(tmp_path / "base"), "weight_version": "0.0"}
            assert (await post("/update_weights_from_disk", update))[0] == 200
            body = {"input_ids": [256], "sampling_params": {"max_new_tokens": 180}}
            running = asyncio.create_task(post("/generate", body))
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            status, reply = await running
            assert status == 200
            assert len(reply["output_ids"]) == 180  # type: ignore[arg-type]
        assert await asyncio.to_thread(process.wait, 15) == 0
    finally:
        process.kill()
        process.wait()


def test_bitwise_numerics_are_refused_where_they_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "refusal", lambda *_: "scripted")
    with pytest.raises(ConfigError, match="does not hold on this machine"):
        core_settings(Config())
    assert core_settings(parse_config('[engine]\nnumerics = "replay"', "test")).numerics.pad_rows is False
