"""Sampled tokens a second of the local engine over HTTP, as sessions use it.

Run: OMP_NUM_THREADS=1 python -P tests/bench/engine.py [sessions]
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from headway.bus.server import free_port, wait_listening
from headway.kernels.hf import save_folder
from headway.kernels.weights import init_weights
from headway.rollout_agent.engine.service import model_config
from headway.schemas.config import Config

TURNS, REPEATS = 4, 5
SHAPES = ((5, 22), (20, 16))
"""(sampled tokens, observed tokens) a turn."""
SERVE = """
import sys
from headway.rollout_agent.engine.service import run_engine
from headway.schemas.config import Config
run_engine(Config(), port=int(sys.argv[1]))
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


async def main(sessions: int) -> None:
    port, shape = free_port(), model_config(Config())
    with tempfile.TemporaryDirectory() as folder:
        save_folder(Path(folder), shape, {n: w.bfloat16() for n, w in init_weights(shape, 0).items()})
        engine = subprocess.Popen([sys.executable, "-P", "-c", SERVE, str(port)])  # noqa: ASYNC220
        try:
            await wait_listening(port, 60)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                await measure(http, f"http://127.0.0.1:{port}", folder, sessions, engine.pid)
        finally:
            engine.terminate()
            engine.wait()


async def measure(http: aiohttp.ClientSession, url: str, folder: str, sessions: int, pid: int) -> None:
    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with http.post(url + path, json=body) as response:
            reply = await response.json()
            assert response.status == 200, reply
            return reply

    await post("/update_weights_from_disk", {"model_path": folder, "weight_version": "0.0"})

    async def session(seed: int, new: int, seen: int) -> None:
        ids, rng = [256, *b"fix f.py\n>"], random.Random(seed)
        for _ in range(TURNS):
            sampling = {"max_new_tokens": new, "sampling_seed": seed}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
            reply = await post("/generate", {**body, "return_routed_experts": True})
            ids = [*ids, *reply["output_ids"], *(rng.randrange(97, 120) for _ in range(seen))]

    for new, seen in SHAPES:
        for repeat in range(REPEATS):
            started, cpu = time.perf_counter(), cpu_s(pid)
            await asyncio.gather(*(session(repeat * 1000 + i, new, seen) for i in range(sessions)))
            took = time.perf_counter() - started
            rate = sessions * TURNS / took
            print(f"{new:3} sampled a turn: {rate * new:6.0f} tok/s, {rate:4.0f} requests/s, ", end="")
            print(f"{sessions * TURNS * new / (cpu_s(pid) - cpu):6.0f} tokens a CPU-second")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 32))
