"""`headway relay` as a process: its region's agents read through it; kill -9 at its worst moment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.bus.server import free_port
from headway.schemas.subjects import Keys
from headway.schemas.wire import digest_of
from headway.weight_sync.relay_client import RelayClient
from headway.weight_sync.transfer import SourceDown

HEADWAY = [sys.executable, "-P", "-m", "headway.deploy.cli.main"]
START_S_MAX = 20.0


class World:
    """A store folder, and the address at which a relay before it would listen."""

    def __init__(self, nats: Any, folder: Path) -> None:
        self.folder, self.port, self.metrics_port = folder, free_port(), free_port()
        (folder / "run.toml").write_text(
            f'[run]\nname = "demo"\n[regions.east]\nrelay_url = "http://127.0.0.1:{self.port}"\n'
        )
        self.env = {
            **os.environ,
            "HEADWAY_NATS_URL": nats.settings.url,
            "HEADWAY_NATS_TOKEN": nats.settings.token,
            "HEADWAY_STORE_URL": str(folder / "store"),
            "HEADWAY_RELAY_TOKEN": "secret",
            "HEADWAY_INSTANCE": "east-relay",
            "HEADWAY_METRICS_PORT": str(self.metrics_port),
        }
        self.store = ObstoreBlobs.open(str(folder / "store"))
        self.shelf = folder / "relays" / "east-relay"

    @contextlib.asynccontextmanager
    async def relay(self) -> AsyncIterator[tuple[asyncio.subprocess.Process, RelayClient]]:
        files = ["--config", str(self.folder / "run.toml"), "--run-dir", str(self.folder)]
        process = await asyncio.create_subprocess_exec(*HEADWAY, "relay", *files, env=self.env)
        try:
            async with aiohttp.ClientSession() as http:
                url = f"http://127.0.0.1:{self.port}"
                async with asyncio.timeout(START_S_MAX):
                    while not await answers(http, f"{url}/health"):
                        assert process.returncode is None
                        await asyncio.sleep(0.05)
                yield process, RelayClient(http, url, "secret")
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def answers(http: aiohttp.ClientSession, url: str) -> str:
    try:
        async with http.get(url) as reply:
            return await reply.text()
    except aiohttp.ClientError:
        return ""


async def test_a_relay_killed_while_it_writes_leaves_nothing_torn_and_the_next_serves(
    nats_process: Any, tmp_path: Path
) -> None:
    world, data = World(nats_process, tmp_path), os.urandom(100_000)
    key = Keys("demo").shard(digest_of(data))
    await world.store.put(key, data)
    world.env["HEADWAY_FAILPOINTS"] = "relay.rename.before:1:kill"  # once: not in its next life
    async with world.relay() as (process, client):
        with pytest.raises(SourceDown):
            await client.get_range(key, 0, 10, len(data))
        assert await process.wait() == -signal.SIGKILL
    assert [path.suffix for path in world.shelf.iterdir()] == [".partial"]
    async with world.relay() as (process, client):
        assert list(world.shelf.iterdir()) == []
        assert await client.get_range(key, 500, 90_000, len(data)) == data[500:90_000]
        await world.store.delete(key)
        assert await client.get(key) == data
        await asyncio.sleep(0.6)
        metrics = await answers(client._http, f"http://127.0.0.1:{world.metrics_port}/metrics")
        labels = '{service="relay",instance="east-relay"}'
        assert f"headway_origin_bytes{labels} 100000\n" in metrics
        assert f"headway_hits{labels} 1\n" in metrics
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_relay_without_a_token_or_an_address_is_a_config_error(nats_process: Any, tmp_path: Path) -> None:
    world = World(nats_process, tmp_path)
    for name, value in (("HEADWAY_RELAY_TOKEN", ""), ("HEADWAY_REGION", "west")):
        process = await asyncio.create_subprocess_exec(
            *(*HEADWAY, "relay", "--config", str(tmp_path / "run.toml")),
            env={**world.env, name: value},
            stderr=asyncio.subprocess.PIPE,
        )
        said = (await process.communicate())[1].decode()
        assert process.returncode == 64
        assert name in said or "regions.west.relay_url" in said
