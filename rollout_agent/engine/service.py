"""`headway engine`: one engine process."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from pathlib import Path

import structlog
import torch
import uvloop
from aiohttp import web

from headway.bus.notify import notify
from headway.kernels import hf, selftest
from headway.kernels.config import ModelConfig
from headway.kernels.numerics import FAST, INVARIANT
from headway.rollout_agent.engine.core import CoreSettings, EngineCore
from headway.rollout_agent.engine.server import EngineServer
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError, PromiseViolated, UnavailableError
from headway.schemas.vocab import VOCAB_SIZE

DRAIN_S = 10.0
SECOND_SIGNAL_EXIT = 130
BEAT_EVERY_S = 1.0
log = structlog.get_logger()


def model_config(config: Config) -> ModelConfig:
    """The geometry of the run's model. Raises ConfigError when model.base cannot be read."""
    if config.model.base:
        try:
            return hf.load_config(Path(config.model.base))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.base = {config.model.base!r} cannot be read", why=str(error)) from None
    shape = config.model.model_dump(exclude={"base", "compute_dtype", "rollout_dtype"})
    return ModelConfig(vocab_size=VOCAB_SIZE, **shape)


def core_settings(config: Config) -> CoreSettings:
    """Sizes and numerics from run.toml. Raises ConfigError when the machine can't do "bitwise"."""
    dtype = getattr(torch, config.model.compute_dtype)
    bitwise = config.engine.numerics == "bitwise"
    torch.set_num_threads(config.engine.threads)
    if bitwise and (why := selftest.refusal(model_config(config), dtype)) is not None:
        raise ConfigError(
            "engine.numerics = 'bitwise' does not hold on this machine",
            why=why,
            hint="set engine.threads = 1, or engine.numerics = 'replay'",
        )
    numerics = INVARIANT if bitwise else FAST
    if isinstance(why := selftest.compiled_decoding(model_config(config), dtype, numerics), str):
        log.info("decoding_not_compiled", why=why)
    return CoreSettings(
        slots=config.engine.slots,
        max_batch=config.engine.max_batch,
        prefill_tokens=config.engine.prefill_tokens,
        context_tokens=config.agent.max_session_tokens,
        threads=config.engine.threads,
        compute_dtype=dtype,
        numerics=numerics,
    )


def check_exposure(host: str, key: str) -> None:
    """Raise ConfigError when an address that others reach would be served without a key."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not key:
        raise ConfigError(
            f"the engine would listen on {host} without a key",
            why="whoever reaches it can replace the weights",
            hint="set HEADWAY_ENGINE_KEY, or listen on 127.0.0.1",
        )


def run_engine(config: Config, *, host: str = "127.0.0.1", port: int, key: str = "") -> int:
    """Serve until SIGTERM, then drain; returns 0. Raises ConfigError, UnavailableError, PromiseViolated."""
    check_exposure(host, key)
    settings = core_settings(config)
    uvloop.run(serve(settings, host=host, port=port, key=key))
    return 0


async def serve(settings: CoreSettings, *, host: str, port: int, key: str) -> None:
    """The engine as a coroutine; see `run_engine`."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def end(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result(error)
        elif error is None:
            raise SystemExit(SECOND_SIGNAL_EXIT)

    core = EngineCore(settings, lambda error: loop.call_soon_threadsafe(end, error))
    server = EngineServer(core, key=key)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=DRAIN_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, None)
    await runner.setup()
    core.start()
    beats = loop.create_task(_beat())
    try:
        await _listen(runner, host, port)
        notify("READY=1")
        log.info("engine_listening", host=host, port=port, slots=settings.slots)
        error = await ended
        notify("STOPPING=1")
        if error is not None:
            server.fail(error)
    finally:
        await runner.cleanup()
        core.stop()
        beats.cancel()
    if error is not None:
        raise PromiseViolated("the engine's model thread stopped", why=repr(error)[:300]) from error


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise UnavailableError(
            f"the engine cannot listen on {host}:{port}",
            why=str(error),
            hint="another process may have the port: --port another one, or stop that process",
        ) from None


async def _beat() -> None:
    while True:
        notify("WATCHDOG=1")
        await asyncio.sleep(BEAT_EVERY_S)
