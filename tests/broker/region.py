"""Two nats-servers: a hub that holds the streams, and a region's, which stores nothing. All roles have accounts."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.bus.blobs import BlobStore
from headway.bus.connection import Bus
from headway.bus.server import find_nats_server
from headway.bus.topology import Topology
from headway.deploy import keys

RUN = "test"
CONF = Path(__file__).parents[2] / "deploy" / "nats"
LISTENING_S = 60.0


@dataclass(slots=True, kw_only=True)
class Region:
    """`hub` and `leaf` are host:port for clients, `link` where the hub listens for regions and `dial` the way there.

    The leaf runs under `within` (a command such as `ip netns exec NAME`).
    """

    folder: Path
    hub: str
    leaf: str
    link: str
    dial: str
    within: Sequence[str] = ()

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Both servers, as the files in deploy/nats configure them, at these addresses."""
        keys.create(self.folder / "keys", RUN, self.dial)
        (self.folder / "keys" / "leaf.conf").symlink_to(Path("nats/leaf.conf"))
        (self.folder / "keys" / "accounts.conf").symlink_to(Path("nats/accounts.conf"))
        servers: list[subprocess.Popen[bytes]] = []
        try:
            for name, listen in (("hub", self.hub), ("leaf", self.leaf)):
                text = (CONF / f"{name}.conf").read_text().replace('"0.0.0.0:4222"', f'"{listen}"')
                text = text.replace('"0.0.0.0:7422"', f'"{self.link}"').replace('"/data"', f'"{self.folder / "js"}"')
                text = text.replace('http: "127.0.0.1:8222"\n', "")
                conf = self.folder / f"{name}.conf"
                conf.write_text(text)
                command = [find_nats_server(), "-c", str(conf), "-l", str(self.folder / f"{name}.log")]
                server = subprocess.Popen([*(self.within if name == "leaf" else ()), *command])  # noqa: ASYNC220
                servers.append(server)
                await _listening(server, listen, self.folder / f"{name}.log")
            async with await self.bus("operator") as operator:
                await Topology(run=RUN, ack_wait_s=1.0, max_stream_bytes=16 << 20).apply(operator.js)
            yield
        finally:
            for server in servers:
                server.kill()
                server.wait()

    async def bus(self, role: str, store: BlobStore | None = None) -> Bus:
        """The operator's at the hub, everyone else's in the region."""
        login, place = keys.credentials(self.folder / "keys", role), self.hub if role == "operator" else self.leaf
        return await Bus.connect(
            f"nats://{place}", RUN, user=login[keys.USER], password=login[keys.PASSWORD], name=role, store=store
        )


async def _listening(server: subprocess.Popen[bytes], place: str, log: Path) -> None:
    host, port = place.split(":")
    end, why = time.monotonic() + LISTENING_S, ""
    while server.poll() is None and time.monotonic() < end:
        try:
            async with asyncio.timeout(1.0):  # a first packet that is lost is sent again later and later
                (await asyncio.open_connection(host, int(port)))[1].close()
                return
        except OSError as error:  # TimeoutError is one
            why = repr(error)
        await asyncio.sleep(0.05)
    raise AssertionError(f"{place}: {why}; the server's exit code is {server.poll()}, and it logged {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text()[-2000:] if log.exists() else "nothing"
