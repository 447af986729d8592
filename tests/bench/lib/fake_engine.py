"""An engine that speaks the protocol and computes nothing: a turn takes as long as its tokens are said to take.

Run: python -P tests/bench/lib/fake_engine.py PORT SECONDS_PER_TOKEN LAYERS TOP_K
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from aiohttp import web
from safetensors.torch import load_file

from headway.weight_sync import torch_apply

TURNS = 4
PROMPT_SIGN = ord(">")
LINE = b"w x*2+3-1*x+4*5//6\n"


def line(prompt: list[int], seed: int) -> list[int]:
    """A write of 8 to 19 tokens, by seed and turn; the last turn submits."""
    turn = prompt.count(PROMPT_SIGN)
    if turn >= TURNS:
        return [*b"s\n"]
    keep = random.Random(f"{seed}/{turn}").randrange(8, len(LINE))
    return [*LINE[: keep - 1], 10]


class FakeEngine:
    """One version of weights, held to prove its root."""

    def __init__(self, token_s: float, layers: int, top_k: int) -> None:
        self._token_s, self._layers, self._top_k = token_s, layers, top_k
        self._version: str | None = None
        self._root: str | None = None
        self._running = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_post("/weights_checker", lambda _: _json({"root": self._root}))
        app.router.add_get("/model_info", lambda _: _json({"weight_version": self._version}))
        app.router.add_get("/server_info", lambda _: _json({"engine": "headway"}))
        app.router.add_get("/v1/loads", self.loads)
        done = {"success": True, "message": ""}
        for path in ("pause_generation", "continue_generation", "prepare_weights_from_disk", "abort_request"):
            app.router.add_post(f"/{path}", lambda _: _json(done))
        return app

    async def update(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self._root = torch_apply.root(load_file(Path(body["model_path"]) / "model.safetensors"))
        self._version = body["weight_version"]
        return await _json({"success": True, "message": ""})

    async def loads(self, request: web.Request) -> web.Response:
        rank = {
            "num_running_reqs": self._running,
            "num_waiting_reqs": 0,
            "num_total_tokens": 192 * self._running,
            "max_total_num_tokens": 1 << 20,
            "total_prefill_uncached_tokens": 0,
        }
        return await _json({"loads": [rank]})

    async def generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        prompt, sampling = body["input_ids"], body["sampling_params"]
        ids = line(prompt, sampling["sampling_seed"])[: sampling["max_new_tokens"]]
        self._running += 1
        await asyncio.sleep(self._token_s * len(ids) * random.uniform(0.9, 1.1))
        self._running -= 1
        end, start = len(prompt) + len(ids) - 1, body.get("routed_experts_start_len", 0)
        rows = end - start
        routes = np.tile(np.arange(self._top_k, dtype="<i4"), (rows, self._layers, 1))
        span = {"version": self._version, "start": 0}
        meta: dict[str, Any] = {
            "finish_reason": {"type": "stop", "matched": 10},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "weight_version": self._version,
            "weight_versions": [span | {"end": len(ids)}],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "routed_experts": base64.b64encode(routes.tobytes()).decode(),
            "routed_experts_versions": [span | {"start": start, "end": end}],
        }
        return await _json({"output_ids": ids, "meta_info": meta})


async def _json(body: dict[str, Any]) -> web.Response:
    return web.json_response(body)


async def main(port: int, token_s: float, layers: int, top_k: int) -> None:
    runner = web.AppRunner(FakeEngine(token_s, layers, top_k).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
