"""What every service shares: settings from the environment, signals, logging, heartbeats, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import uvloop

from headway.bus import metrics, rpc
from headway.bus.blobs import BlobStore, ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.ending import ending
from headway.bus.notify import notify
from headway.schemas import signing
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError, HeadwayError, InputError, from_os
from headway.schemas.ids import check_id
from headway.schemas.messages import Event

BEAT_EVERY_S = 1.0
DRAIN_S_MAX = 86_400.0
ENDED = "ended"
"""The phase in the last beat of a service that ends by itself."""
SECOND_SIGNAL_EXIT = 130
CRASH_EXIT = 1
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Addresses, secrets and names of one service instance, from `HEADWAY_*` variables."""

    nats_url: str
    nats_token: str = field(repr=False, default="")
    nats_user: str = ""
    nats_password: str = field(repr=False, default="")
    run_dir: Path
    keys_dir: Path
    store_url: str
    region: str
    instance: str

    @classmethod
    def from_env(cls, config: Config, service: str, env: dict[str, str] | None = None) -> Settings:
        """Read the environment. Raises ConfigError naming the variable that is missing."""
        env = dict(os.environ) if env is None else env
        run_dir = Path(env.get("HEADWAY_RUN_DIR") or f"runs/{config.run.name}")
        url = env.get("HEADWAY_NATS_URL") or config.bus.url
        if not url:
            raise ConfigError(
                "no NATS address", why="neither bus.url nor HEADWAY_NATS_URL is set", hint="use `headway up`"
            )
        return cls(
            nats_url=url,
            nats_token=env.get("HEADWAY_NATS_TOKEN", ""),
            nats_user=env.get("HEADWAY_NATS_USER", ""),
            nats_password=env.get("HEADWAY_NATS_PASSWORD", ""),
            run_dir=run_dir,
            keys_dir=Path(env.get("HEADWAY_KEYS_DIR") or run_dir / "keys"),
            store_url=env.get("HEADWAY_STORE_URL") or config.store.url or str(run_dir / "store"),
            region=check_id(env.get("HEADWAY_REGION") or next(iter(config.regions))),
            instance=check_id(env.get("HEADWAY_INSTANCE") or f"{service}-{os.getpid()}"),
        )

    def trainer_key(self) -> Path:
        return self.keys_dir / "trainer.key"

    def sandbox_key(self) -> Path:
        return self.keys_dir / "sandbox.key"

    def sandbox_public_key(self) -> bytes:
        """What verdicts are checked with: `sandbox.pub`, or derived where the private key lies. Raises ConfigError."""
        public = self.keys_dir / "sandbox.pub"
        return signing.load_key(public) if public.exists() else signing.public_key(signing.load_key(self.sandbox_key()))


@dataclass(slots=True, kw_only=True)
class Service:
    """What a service's main function gets. `stop` is set by SIGTERM: drain, then return."""

    name: str
    config: Config
    settings: Settings
    bus: Bus
    store: BlobStore
    tasks: asyncio.TaskGroup
    stop: asyncio.Event
    drain_s: float | None = None
    """How long the drain may take, where whoever asked for it said so."""
    status: dict[str, Any] = field(default_factory=dict)
    """Small and flat; travels with every heartbeat. `phase` says what the service does or waits for."""
    gauges: dict[str, float] = field(default_factory=dict)
    """For the metrics endpoint alone."""

    async def event(self, name: str, **fields: str | int | float | bool) -> None:
        """Publish an event worth keeping."""
        event = Event(service=self.name, instance=self.settings.instance, name=name, fields=fields)
        await self.bus.publish(self.bus.subjects.event(self.name, name), event)

    def drain(self, fields: dict[str, Any]) -> None:
        """Ask for the end, within `within_s` seconds if the fields have it. Raises InputError."""
        within_s = fields.get("within_s")
        if within_s is not None:
            if not isinstance(within_s, int | float) or not 0 < within_s <= DRAIN_S_MAX:
                raise InputError(f"within_s = {str(within_s)[:40]}", why=f"it is seconds, at most {DRAIN_S_MAX:g}")
            self.drain_s = float(within_s)
        self.stop.set()

    async def serve_verb(self, verb: str, act: Callable[[dict[str, Any]], None]) -> None:
        """Answer `rl.<run>.ctl.<service>.<instance>.<verb>`: `act` on the fields, then reply with the status."""

        async def handle(fields: dict[str, Any]) -> dict[str, Any]:
            log.info("verb_received", verb=verb)
            act(fields)
            return dict(self.status)

        await rpc.serve(
            self.bus.client,
            self.bus.subjects.ctl(self.name, self.settings.instance, verb),
            handler=handle,
            tasks=self.tasks,
        )


Main = Callable[[Service], Awaitable[None]]


def configure_logging(stream: Any = None) -> None:
    """JSON lines on stderr, or console lines when it is a terminal."""
    stream = stream or sys.stderr
    render: Any = structlog.dev.ConsoleRenderer() if stream.isatty() else structlog.processors.JSONRenderer()
    level = logging.getLevelNamesMapping().get(os.environ.get("HEADWAY_LOG", "INFO").upper(), logging.INFO)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )


def run_service(name: str, config: Config, main: Main, settings: Settings | None = None) -> int:
    """Run `main` until it returns or fails; return the process's exit code. Never restarts anything."""
    configure_logging()
    try:
        settings = settings or Settings.from_env(config, name)
        structlog.contextvars.bind_contextvars(service=name, instance=settings.instance, run=config.run.name)
        uvloop.run(_serve(name, config, settings, main))
    except (BaseExceptionGroup, HeadwayError) as error:
        return exit_code(error)
    return 0


def exit_code(failure: BaseException) -> int:
    """What a process that failed so ends with; the failure, of a group the first, is logged."""
    error = first_error(failure) if isinstance(failure, BaseExceptionGroup) else failure
    if isinstance(error, OSError):
        error = from_os(error) or error
    if not isinstance(error, HeadwayError):
        log.error("service_crashed", error=repr(error)[:300], exc_info=failure)
        return CRASH_EXIT
    log.error("service_failed", kind=type(error).__name__, what=error.what, why=error.why, hint=error.hint)
    return error.exit_code


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of an exception group, a HeadwayError if there is one."""
    leaves: list[BaseException] = []

    def walk(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                walk(inner)
        else:
            leaves.append(error)

    walk(group)
    return next((leaf for leaf in leaves if isinstance(leaf, HeadwayError)), leaves[0])


async def _serve(name: str, config: Config, settings: Settings, main: Main) -> None:
    stop = asyncio.Event()
    _handle_signals(stop)
    gc.collect()
    gc.freeze()  # what was imported stays: to look through it again holds the event loop up for a tenth of a second
    store = ObstoreBlobs.open(settings.store_url, attempts=config.store.put_attempts)
    async with (
        await Bus.connect(
            settings.nats_url,
            config.run.name,
            token=settings.nats_token,
            user=settings.nats_user,
            password=settings.nats_password,
            name=settings.instance,
            store=store,
        ) as bus,
        asyncio.TaskGroup() as tasks,
    ):
        service = Service(name=name, config=config, settings=settings, bus=bus, store=store, tasks=tasks, stop=stop)
        async with reachable(service):
            notify("READY=1")
            await main(service)


@contextlib.asynccontextmanager
async def reachable(service: Service) -> AsyncIterator[None]:
    """Beat, answer `status` and `drain`, and serve metrics if HEADWAY_METRICS_PORT asks for it.

    The last beat of a service that drained says so.
    """
    beats = service.tasks.create_task(_beat(service))
    await service.serve_verb("status", lambda _: None)
    await service.serve_verb("drain", service.drain)
    try:
        shown = ChainMap(service.status, service.gauges)
        async with metrics.served(service.name, service.settings.instance, shown, os.environ):
            yield
            service.status["phase"] = ENDED
            await service.bus.beat(service.name, service.settings.instance, _signs_of_life(service))
    finally:
        beats.cancel()


async def _beat(service: Service) -> None:
    while not ending():
        notify("WATCHDOG=1")
        await service.bus.beat(service.name, service.settings.instance, _signs_of_life(service))
        await asyncio.sleep(BEAT_EVERY_S)


def _signs_of_life(service: Service) -> dict[str, Any]:
    return {"time_s": time.time(), "pid": os.getpid(), **service.status}


def _handle_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(SECOND_SIGNAL_EXIT)
        log.info("drain_requested")
        notify("STOPPING=1")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
