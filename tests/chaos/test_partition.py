"""A cable that is cut: a client's, whose messages arrive when it heals, once and in order; a region's to the hub."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.bus.server import find_nats_server, free_port
from headway.bus.topology import Topology
from tests.broker.region import Region
from tests.broker.test_regions import assert_finishes_pauses_and_goes_on, regional_stand

SERVER, CLIENT = "10.213.77.1", "10.213.77.2"
CUT_S = 8.0
HUB, LEAF, LEAF_TO_HUB = "10.213.78.1", "10.213.79.2", "10.213.78.2"
REGION_CUT_S = 60.0
MESSAGES = 120
EVERY_S = 0.1
PUBLISHER = f"""if True:
    import asyncio, sys
    from headway.bus.connection import Bus
    from headway.schemas.messages import Stamp
    from headway.schemas.version import Version

    async def main():
        async with await Bus.connect(sys.argv[1], "test") as bus:
            for number in range({MESSAGES}):
                stamp = Stamp(rollout_id=f"r{{number}}", attempt="a", spans=[], tokens=1, head=Version(0, 0))
                print("seq", await bus.publish(bus.subjects.stamp("t", "t"), stamp), flush=True)
                await asyncio.sleep({EVERY_S})

    asyncio.run(main())
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def made_namespace() -> Iterator[str]:
    """A network namespace without a cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    name = f"hw{secrets.token_hex(4)}"  # no earlier one's: the kernel takes cables away some time after a namespace
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr!r}")
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def lay_cable(name: str, letter: str, near_address: str, far_address: str) -> str:
    """From here into the namespace; our end."""
    near, far = f"{name}{letter}", f"{name}{letter}f"
    ip("link", "add", near, "type", "veth", "peer", "name", far)
    ip("link", "set", far, "netns", name)
    ip("addr", "add", f"{near_address}/30", "dev", near)
    ip("link", "set", near, "up")
    ip("-n", name, "addr", "add", f"{far_address}/30", "dev", far)
    ip("-n", name, "link", "set", far, "up")
    return near


@pytest.fixture
async def namespace(tmp_path: Path) -> AsyncIterator[tuple[str, str, int]]:
    """(a network namespace, the cable to it, the port of a server on our end of that)."""
    with made_namespace() as name:
        near, port = lay_cable(name, "a", SERVER, CLIENT), free_port()
        conf = tmp_path / "nats.conf"
        conf.write_text(f'listen: "{SERVER}:{port}"\njetstream {{ store_dir: "{tmp_path / "js"}" }}\n')
        server = subprocess.Popen([find_nats_server(), "-c", str(conf), "-l", str(tmp_path / "log")])  # noqa: ASYNC220
        try:
            yield name, near, port
        finally:
            server.kill()
            server.wait()


async def test_a_partition_loses_and_repeats_nothing(namespace: tuple[str, str, int]) -> None:
    name, cable, port = namespace
    url = f"nats://{SERVER}:{port}"
    async with await Bus.connect(url, "test") as bus:
        await Topology(run="test", max_stream_bytes=16 << 20).apply(bus.js)
        command = ["ip", "netns", "exec", name, sys.executable, "-P", "-c", PUBLISHER, url]
        publisher = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        acknowledged: list[int] = []

        async def hear(count: int) -> None:
            while len(acknowledged) < count and (line := await publisher.stdout.readline()):  # type: ignore[union-attr]
                if line.startswith(b"seq "):  # the rest is its log
                    acknowledged.append(int(line.split()[1]))

        await hear(20)
        ip("link", "set", cable, "down")
        await asyncio.sleep(CUT_S)
        during = (await bus.last("STAMPS")).seq  # type: ignore[union-attr]
        ip("link", "set", cable, "up")
        async with asyncio.timeout(90):
            await hear(MESSAGES)
            assert await publisher.wait() == 0
        stored = [one.seq async for one in read_all(bus, "STAMPS")]
        assert during < MESSAGES * 0.6, "the cut cut nothing"
        assert acknowledged == stored == list(range(1, MESSAGES + 1))


async def test_a_region_cut_off_for_a_minute_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Its nats-server is behind two cables: one to the region's agent and sandbox, and one to the hub, which is cut."""
    with made_namespace() as name:
        lay_cable(name, "c", "10.213.79.1", LEAF)
        near = lay_cable(name, "h", HUB, LEAF_TO_HUB)
        link = f"{HUB}:{free_port()}"
        region = Region(
            folder=tmp_path,
            hub=f"127.0.0.1:{free_port()}",
            leaf=f"{LEAF}:4222",
            link=link,
            dial=link,
            within=("ip", "netns", "exec", name),
        )

        async def turn(state: str) -> None:
            ip("link", "set", near, state)

        async with regional_stand(region) as (stand, agent):
            await assert_finishes_pauses_and_goes_on(
                stand, agent, lambda: turn("down"), lambda: turn("up"), cut_s=REGION_CUT_S
            )
