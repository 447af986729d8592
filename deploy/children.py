"""Which processes make up a run on one machine, with what environment, and in which order they are drained."""

from __future__ import annotations

import ipaddress
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from urllib.parse import urlsplit

from headway.bus.server import ServerSettings, free_port
from headway.deploy import sglang_server
from headway.deploy.run_folder import RunFolder
from headway.deploy.supervisor import ChildSpec
from headway.schemas.config import Config

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
MALLOC_TUNABLES = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=17179869184"
"""glibc returns large freed tensors to the kernel by default; faulting their pages in again dominates a step."""


class Rank(IntEnum):
    """The order of draining: who makes work stops before who serves it."""

    ONCE = 0
    DISPATCHER = 1
    AGENT = 2
    TRAINER = 3
    ENGINE = 4
    SANDBOX = 5
    RELAY = 6
    NATS = 7


DRAIN_S = {
    Rank.ONCE: 5.0,
    Rank.DISPATCHER: 10.0,
    Rank.AGENT: 40.0,  # sessions may end for 20 s, then have 15 to be saved
    Rank.TRAINER: 60.0,
    Rank.ENGINE: 15.0,
    Rank.SANDBOX: 10.0,
    Rank.RELAY: 10.0,
    Rank.NATS: 15.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """Makes the specs of a run's processes."""

    config: Config
    folder: RunFolder
    nats_url: str

    def nats(self, server: ServerSettings) -> ChildSpec:
        return ChildSpec(
            name="nats",
            argv=server.command(),
            env={"PATH": os.environ.get("PATH", "")},
            log=server.folder / "nats.log",  # where it says itself why it cannot start
            rank=Rank.NATS,
            drain_s=DRAIN_S[Rank.NATS],
        )

    def tasks(self) -> ChildSpec:
        tasks = self.config.tasks
        sizes = ("--seed", str(tasks.seed), "--sessions", str(tasks.demonstrations), "--out", str(self.folder.tasks))
        return self._once("tasks", ["tasks", "build", tasks.env, *sizes])

    def midtrain(self) -> ChildSpec:
        return self._once("midtrain", ["midtrain"], threads=self.config.midtrain.threads)

    def services(self) -> Iterator[ChildSpec]:
        """Every long-running process, in the order of starting; HEADWAY_METRICS_PORT counts up from the given one."""
        first_port = os.environ.get("HEADWAY_METRICS_PORT", "")
        for number, spec in enumerate(self._services()):
            port = {"HEADWAY_METRICS_PORT": str(int(first_port) + number)} if first_port.isdigit() else {}
            yield replace(spec, env={**spec.env, **port})

    def _services(self) -> Iterator[ChildSpec]:
        yield self._service("trainer", "trainer", Rank.TRAINER)
        yield self._service("dispatcher", "dispatcher", Rank.DISPATCHER)
        for region, settings in self.config.regions.items():
            relay = {"HEADWAY_RELAY_TOKEN": secrets.token_urlsafe(24)}
            if is_loopback(urlsplit(settings.relay_url).hostname or ""):
                yield self._service("relay", f"{region}-relay", Rank.RELAY, region, relay)
            elif settings.relay_url:
                relay = {}  # the environment's, which all children inherit
            for number in range(settings.sandboxes):
                yield self._service("sandbox", f"{region}-sandbox-{number}", Rank.SANDBOX, region)
            for number in range(settings.agents):
                yield from self._agent(region, number, relay)

    def _agent(self, region: str, number: int, relay: dict[str, str]) -> Iterator[ChildSpec]:
        agent = f"{region}-agent-{number}"
        if self.config.regions[region].engine_urls:
            yield self._service("agent", agent, Rank.AGENT, region, relay)
            return
        port, secret = free_port(), {"HEADWAY_ENGINE_KEY": secrets.token_urlsafe(24)}
        engine = f"{region}-engine-{number}"
        yield self.engine(engine, port, secret)
        address = {"HEADWAY_ENGINE_URL": f"http://127.0.0.1:{port}"}
        yield self._service("agent", agent, Rank.AGENT, region, secret | address | relay)

    def engine(self, name: str, port: int, secret: dict[str, str]) -> ChildSpec:
        """An inference engine of the configured kind; `secret` holds HEADWAY_ENGINE_KEY, which SGLang isn't given."""
        if self.config.engine.kind == "local":
            arguments = ["engine", "--port", str(port), "--name", name]
            return self._spec(name, arguments, Rank.ENGINE, env=secret, threads=self.config.engine.threads)
        interpreter, folder = sglang_server.find(), self.folder.path / "engines" / name
        return ChildSpec(
            name=name,
            argv=sglang_server.command(self.config, interpreter, folder, port=port),
            env=self._environment(self.config.engine.threads) | sglang_server.environment(interpreter, folder),
            log=self.folder.logs / f"{name}.log",
            rank=Rank.ENGINE,
            drain_s=DRAIN_S[Rank.ENGINE],
        )

    def _service(
        self, command: str, instance: str, rank: Rank, region: str = "", env: dict[str, str] | None = None
    ) -> ChildSpec:
        names = {"HEADWAY_INSTANCE": instance, **({"HEADWAY_REGION": region} if region else {})}
        own = self.folder.environment(command, self.config)
        return self._spec(instance, [command], rank, env=own | names | (env or {}))

    def _once(self, name: str, arguments: list[str], threads: int = 1) -> ChildSpec:
        return self._spec(name, arguments, Rank.ONCE, threads=threads, once=True)

    def _spec(
        self,
        name: str,
        arguments: list[str],
        rank: Rank,
        *,
        env: dict[str, str] | None = None,
        threads: int = 1,
        once: bool = False,
    ) -> ChildSpec:
        files = ("--config", str(self.folder.config_file), "--run-dir", str(self.folder.path))
        return ChildSpec(
            name=name,
            argv=[sys.executable, "-P", "-m", "headway.deploy.cli.main", *arguments, *files],
            env=self._environment(threads) | (env or {}),
            log=self.folder.logs / f"{name}.log",
            rank=rank,
            drain_s=DRAIN_S[rank],
            once=once,
            show_stdout=once,
        )

    def _environment(self, threads: int) -> dict[str, str]:
        return {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, str(threads)),
            "GLIBC_TUNABLES": MALLOC_TUNABLES,
            "PYTHONUNBUFFERED": "1",
            "HEADWAY_NATS_URL": self.nats_url,
            "HEADWAY_RUN_DIR": str(self.folder.path),
            "HEADWAY_STORE_URL": self.folder.store_url(self.config),
        }


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's own address, by its text alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
