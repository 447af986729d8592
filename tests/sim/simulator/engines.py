"""Engines that sample from a draw, and hold a tensor for weights, behind the real client."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headway.rollout_agent import client
from headway.rollout_agent.client import EngineTrouble
from headway.schemas.errors import InputError
from headway.schemas.version import Version
from headway.schemas.vocab import NEWLINE
from headway.weight_sync import torch_apply
from headway.weight_sync.changes import FILE as CHANGES
from headway.weight_sync.changes import read_changes
from simulator.loop import Life


@dataclass(eq=False)
class Engine:
    """An engine process: what it holds is lost when it dies. `token_s` is the time of one turn's sampling."""

    url: str
    life: Life
    rng: random.Random
    turn_s: float
    weights: torch.Tensor | None = None
    version: Version | None = None
    paused: bool = False
    resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def root(self) -> str | None:
        return torch_apply.root({"w": self.weights}) if self.weights is not None else None


class EngineClient(client.EngineClient):
    """The real client, whose requests reach one of the world's `engines`, by URL, instead of the network."""

    engines: dict[str, Engine] = {}  # noqa: RUF012  # set by the world

    async def _call(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        await asyncio.sleep(0.001)
        engine = self.engines[self.url]
        names = {"/generate": "generate_", "/v1/loads?include=core": "loads"}
        answer = getattr(self, names.get(path, path.strip("/")))
        try:
            async with asyncio.timeout(timeout_s):
                while engine.life.frozen is not None:
                    await asyncio.sleep(0.05)
                found: dict[str, Any] = await answer(engine, body or {})
        except TimeoutError:
            raise EngineTrouble(f"{self.url}{path} failed", why="no answer") from None
        if not engine.life.alive or self.engines[self.url] is not engine:
            raise EngineTrouble(f"{self.url}{path} failed", why="connection reset")
        return found

    async def generate_(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        prompt, sampling = body["input_ids"], body["sampling_params"]
        if engine.version is None:
            raise EngineTrouble(f"{self.url} has no weights")
        first, text = engine.version, _line(len(prompt), sampling)
        await asyncio.sleep(engine.turn_s * (0.5 + engine.rng.random()))
        while engine.paused or engine.life.frozen is not None:
            await asyncio.sleep(0.01)
        if engine.version is None:
            raise EngineTrouble(f"{self.url} has no weights")
        cut = len(text) if engine.version == first else 1 + engine.rng.randrange(len(text))
        spans = [{"start": 0, "end": cut, "version": str(first)}]
        if cut < len(text):
            spans.append({"start": cut, "end": len(text), "version": str(engine.version)})
        return {
            "output_ids": text,
            "meta_info": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(text),
                "weight_versions": spans,
                "output_token_logprobs": [[-0.5, token, None] for token in text],
                "finish_reason": {"type": "stop"},
            },
        }

    async def server_info(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        return {"engine": "headway"}

    async def model_info(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        return {"weight_version": str(engine.version)} if engine.version is not None else {}

    async def loads(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        raise InputError("this engine does not say how full it is")

    async def pause_generation(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        engine.paused = True
        return {}

    async def continue_generation(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        engine.paused = False
        return {}

    async def abort_request(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def prepare_weights_from_disk(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        return {"success": True}

    async def update_weights_from_disk(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.005)
        folder = Path(body["model_path"])
        if engine.weights is not None and (folder / CHANGES).exists():
            changes = read_changes(folder)
            engine.weights = torch_apply.changed(engine.weights, *changes["w"]) if changes else engine.weights
        elif (folder / "model.safetensors").exists():
            engine.weights = load_file(folder / "model.safetensors").get("w", engine.weights)
        if engine.weights is None or not engine.life.alive:
            return {"success": False, "message": "nothing to change"}
        engine.version = Version.parse(body["weight_version"])
        return {"success": True}

    async def weights_checker(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        return {"root": engine.root()}


def _line(place: int, sampling: dict[str, Any]) -> list[int]:
    """What the model says: a test, or the end; a function of the task and the place."""
    draw = random.Random(f"{sampling.get('sampling_seed')}/{place}").random()
    return [ord("s" if draw < 0.4 else "t"), NEWLINE]
