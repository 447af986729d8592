"""`headway agent`: leases tasks, runs their sessions, publishes what came of them. The parts, put together."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Callable

import aiohttp

from headway.bus.held import Held
from headway.bus.leases import TaskQueue
from headway.bus.service import Service
from headway.rollout_agent.attempts import Agent
from headway.rollout_agent.client import EngineClient, check_address
from headway.rollout_agent.engine_writer import EngineWriter
from headway.rollout_agent.harness import sessions_of
from headway.rollout_agent.head import HeadTracker
from headway.rollout_agent.model_shape import ModelShape, hf_config
from headway.rollout_agent.session import Session
from headway.rollout_agent.tools import BusSandbox
from headway.rollout_agent.weights import WeightKeeper
from headway.schemas.errors import ConfigError
from headway.schemas.rewards import Scoring
from headway.schemas.sections import RegionConfig
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.layouts import Layout
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.relay_client import RelayClient
from headway.weight_sync.transfer import Retrier, TransferLimits

POLL_S = 0.1
ENGINE_CONNECTIONS_MAX = 512


async def serve(service: Service) -> None:
    """The agent as a service; `run_service("agent", config, serve)`.

    HEADWAY_ENGINE_URL names its engines (comma-separated), else the region's `engine_urls`;
    HEADWAY_ENGINE_KEY their key.
    """
    config = service.config
    urls, secret = engine_urls(service), os.environ.get("HEADWAY_ENGINE_KEY", "")
    for url in urls:
        check_address(url, secret)
    scoring = Scoring(config.reward)
    async with sessions_of(config, time.time) as make_session:
        await _work(service, urls, secret, make_session, scoring)


async def _work(
    service: Service, urls: list[str], secret: str, make_session: Callable[..., Session], scoring: Scoring
) -> None:
    config, settings = service.config, service.settings
    model = hf_config(config.model)
    shape = ModelShape.from_hf(model)
    tracker = HeadTracker(service.bus, config)
    background = [service.tasks.create_task(tracker.run())]
    service.status.update(phase="waiting for the genesis")
    while tracker.genesis is None:
        if service.stop.is_set():
            background[0].cancel()
            return
        await asyncio.sleep(POLL_S)
    folder = settings.run_dir / "agents" / settings.instance
    key = tracker.genesis.trainer_key
    connector = aiohttp.TCPConnector(limit=ENGINE_CONNECTIONS_MAX)
    own_deadlines = aiohttp.ClientTimeout(total=None)
    no_cookies = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(connector=connector, timeout=own_deadlines, cookie_jar=no_cookies) as http:
        keeper = WeightKeeper(
            bus=service.bus,
            config=config,
            region=settings.region,
            agent=settings.instance,
            tracker=tracker,
            fetcher=fetcher(service, http, key, Layout.from_hf(model)),
            mirror=HostMirror(folder / "mirror", key, fsync=config.bus.sync_always),
            writers=[
                EngineWriter(
                    engine=EngineClient(http, url, shape, key=secret),
                    model_config=model,
                    scratch=(folder / "staged" / str(number)).absolute(),
                    clock=time.perf_counter,
                )
                for number, url in enumerate(urls)
            ],
            clock=time.perf_counter,
        )
        background.append(service.tasks.create_task(keeper.run()))
        sandbox = BusSandbox(
            bus=service.bus, region=settings.region, command_timeout_s=config.sandbox.command_timeout_s
        )
        try:
            queue = TaskQueue(service.bus, Held(folder / "leases", config.dispatch.ack_wait_s, time.time))
            await Agent(service, queue, keeper, sandbox, shape, time.perf_counter, make_session, scoring).run()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)


def fetcher(service: Service, http: aiohttp.ClientSession, key: bytes, layout: Layout) -> Fetcher:
    """What brings weights: from the region's relay where it has one, else from the store."""
    region = service.config.regions.get(service.settings.region) or RegionConfig()
    token = os.environ.get("HEADWAY_RELAY_TOKEN", "")
    relay = RelayClient(http, region.relay_url, token) if region.relay_url else None
    cap = math.inf if relay is not None else region.download_bytes_per_s_max or math.inf
    retrier = Retrier(limits=TransferLimits(bytes_per_s_max=cap), rng=random.Random())
    return Fetcher(
        store=service.store.once(),
        keys=service.bus.keys,
        public_key=key,
        retrier=retrier,
        relay=relay,
        layout=layout,
    )


def engine_urls(service: Service) -> list[str]:
    """Where this agent's engines listen. Raises ConfigError when nobody says."""
    given = os.environ.get("HEADWAY_ENGINE_URL", "")
    region = service.config.regions.get(service.settings.region)
    urls = [url.strip() for url in given.split(",") if url.strip()] or (region.engine_urls if region else [])
    if not urls:
        raise ConfigError(
            f"agent {service.settings.instance} has no engine",
            why=f"neither HEADWAY_ENGINE_URL nor regions.{service.settings.region}.engine_urls is set",
            hint="start `headway engine` and set HEADWAY_ENGINE_URL=http://127.0.0.1:<port>",
        )
    return urls
