"""Announce-to-served across four regions: deltas through relays against full snapshots without.

`full` is the plain bytes of the checkpoint, `anchor` our own anchors, a third smaller (of small models only).

Regions are network namespaces of this machine. A link between the origin and a region is a pair of TUN devices
and a process that delays, paces and drops what passes (no kernel module is needed): 50 to 150 ms of round trip,
200 Mbit/s each way, at most 100 ms of queue, Ethernet's MTU. The object store is a folder behind HTTP. Agents are
processes with the real fetcher, host mirror and torch applier; an announcement reaches them after half a round
trip and they ask the ledger, which takes another, before they fetch. Served means: applied to live tensors whose
root was computed again. Needs root (Debian: `apt-get install iproute2`); without it, says so and ends with 0.

Run: OMP_NUM_THREADS=1 python -P tests/bench/wan.py [gigabytes] [repeats] [delta,full,anchor]
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import math
import os
import random
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

RTT_MS = (50, 80, 120, 150)
AGENTS, BYTES_PER_S, QUEUE_S, MTU = 2, 200e6 / 8, 0.1, 1500
ANCHOR_GIGABYTES_MAX = 0.25
"""Beyond, eight agents that decode a whole model at once take more memory than there is."""
KEY, RUN, TOKEN, CHANGED, TENSORS = bytes(range(32)), "wan", "bench", 0.01, 32
ORIGIN, PORT = "hw-origin", 8400
IFF_TUN_VNET, TUNSETIFF, TUNSETOFFLOAD, CSUM_TSO4, NEWNET = 0x5001, 0x400454CA, 0x400454D0, 3, 0x40000000


# -- a link: `wan.py link N` -----------------------------------------------------------------------------------


def tun(namespace: str, name: str, address: str) -> int:
    """A TUN device in `namespace` that takes whole segments (GSO); its file descriptor."""
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN_VNET))
    fcntl.ioctl(handle, TUNSETOFFLOAD, CSUM_TSO4)
    for command in (f"addr add {address} dev {name}", f"link set {name} up mtu {MTU}", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return handle


def link(region: int) -> None:
    """Carry packets both ways until killed."""
    ends = (
        tun(ORIGIN, f"wan{region}", f"10.77.{region}.1/30"),
        tun(f"hw-r{region}", "wan", f"10.77.{region}.2/30"),
    )
    delay_s = RTT_MS[region] / 2e3
    queues: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    free_s = [0.0, 0.0]
    poller = select.poll()
    for end in ends:
        poller.register(end, select.POLLIN)
    print("up", flush=True)
    while True:
        due = min((queue[0][0] for queue in queues if queue), default=math.inf)
        poller.poll(None if math.isinf(due) else max(0.0, (due - time.monotonic()) * 1e3))
        for way in (0, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet, now_s = os.read(ends[way], 1 << 17), time.monotonic()
                    if free_s[way] - now_s < QUEUE_S:
                        free_s[way] = max(free_s[way], now_s) + len(packet) / BYTES_PER_S
                        queues[way].append((free_s[way] + delay_s, packet))
            while queues[way] and queues[way][0][0] <= time.monotonic():
                with contextlib.suppress(BlockingIOError):
                    os.write(ends[1 - way], queues[way].popleft()[1])


# -- the origin, a relay, an agent: processes inside the namespaces ---------------------------------------------


async def listen(app: Any, address: str) -> None:
    from aiohttp import web

    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, PORT).start()
    print("up", flush=True)
    await asyncio.Event().wait()


async def origin(folder: str) -> None:
    from aiohttp import web

    app = web.Application()
    app.router.add_static("/", folder)
    await listen(app, "0.0.0.0")


async def relay(region: int, folder: str) -> None:
    from headway.bus.blobs import ObstoreBlobs
    from headway.weight_sync.relay import Relay
    from headway.weight_sync.shelf import Shelf
    from headway.weight_sync.transfer import TransferLimits

    store = ObstoreBlobs.open(f"http://10.77.{region}.1:{PORT}").once()
    shelf = Shelf(Path(folder) / f"shelf{region}", 4 << 30)
    await listen(Relay(shelf, store, f"{RUN}/weights/", TOKEN, TransferLimits()).app(), "127.0.0.1")


async def agent(region: int, number: int, folder: str) -> None:
    """Reads `mode version digest announced_s` lines; answers each with what it took."""
    import aiohttp
    import torch

    from headway.bus.blobs import ObstoreBlobs
    from headway.schemas import signing
    from headway.schemas.subjects import Keys
    from headway.schemas.version import Version
    from headway.weight_sync import torch_apply
    from headway.weight_sync.fetcher import Fetcher
    from headway.weight_sync.mirror import HostMirror
    from headway.weight_sync.relay_client import RelayClient
    from headway.weight_sync.transfer import Retrier, TransferLimits

    torch.set_num_threads(1)
    public, rtt_s = signing.public_key(KEY), RTT_MS[region] / 1e3
    mirror = HostMirror(Path(folder) / f"mirror{region}{number}", public, fsync=False)
    far = ObstoreBlobs.open(f"http://10.77.{region}.1:{PORT}").once()
    live: dict[str, torch.Tensor] = {}
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with aiohttp.ClientSession() as http:
        near = RelayClient(http, f"http://127.0.0.1:{PORT}", TOKEN)

        def fetcher(mode: str) -> Fetcher:
            store = ObstoreBlobs.open(str(Path(folder) / "store")).once() if mode == "prime" else far
            retrier = Retrier(limits=TransferLimits(), rng=random.Random(number))
            via = near if mode == "delta" else None
            return Fetcher(store=store, keys=Keys(RUN), public_key=public, retrier=retrier, relay=via)

        ways = {mode: fetcher(mode) for mode in ("prime", "delta", "anchor")}
        print("up", flush=True)
        while line := (await lines.readline()).decode().split():
            mode, version, digest, announced_s = line[0], Version.parse(line[1]), line[2], float(line[3])
            if mode == "prime":
                await prime(ways["prime"], digest, Path(folder) / "first", mirror, live)
                print("{}", flush=True)
                continue
            if mode == "anchor":
                mirror.reset("a whole snapshot is due")
            await asyncio.sleep(announced_s + 1.5 * rtt_s - time.monotonic())
            began_s, cpu_s = time.monotonic(), time.process_time()
            if mode == "full":
                found = {"fetched_bytes": await snapshot(ways["anchor"], digest, live)}
            else:
                staged = await ways[mode].stage(version, digest, mirror)
                found = {"staged_s": time.monotonic() - began_s, "fetch_s": staged.stats.fetch_ms / 1e3}
                found["fetched_bytes"] = staged.stats.fetched_bytes
                torch_apply.apply(live, staged)
                assert torch_apply.root(live) == staged.manifest.root
                found["pause_s"] = time.monotonic() - began_s - found["staged_s"]
            found |= {"served_s": time.monotonic() - announced_s, "cpu_s": time.process_time() - cpu_s}
            if mode != "full":
                mirror.commit(staged)
                del staged
            print(json.dumps(found), flush=True)


async def prime(fetcher: Any, digest: str, folder: Path, mirror: Any, live: Any) -> None:
    """Before anything is measured: the first version, read from the local disk, in mirror and live tensors."""
    import numpy as np
    import torch

    from headway.weight_sync.codec import warm_up
    from headway.weight_sync.patch import Patch
    from headway.weight_sync.staged import FetchStats, StagedUpdate

    manifest, sealed = await fetcher._manifest(digest)
    stats = FetchStats(fetched_bytes=0, fetch_ms=0, stage_ms=0, hops=1, refetches=0, from_anchor=True)
    read = {entry.name: np.fromfile(folder / entry.name, np.uint8) for entry in manifest.tensors}
    whole = {name: Patch.whole(data) for name, data in read.items()}
    mirror.commit(
        StagedUpdate(manifest=manifest, digest=digest, sealed=sealed, base_root=None, patches=whole, stats=stats)
    )
    for entry in manifest.tensors:
        live[entry.name] = torch.from_numpy(read[entry.name]).view(torch.bfloat16).reshape(entry.shape)
    warm_up(2)  # as after a cold start


async def snapshot(fetcher: Any, digest: str, live: Any) -> int:
    """Read the checkpoint's plain bytes from the origin into `live`, and compute its root; the bytes read."""
    import torch

    from headway.weight_sync import torch_apply
    from headway.weight_sync.transfer import for_each

    manifest = await fetcher.manifest(digest)

    async def take(entry: Any) -> None:
        def write(data: bytes) -> None:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            live[entry.name].view(-1).view(torch.uint8).copy_(source)

        await fetcher._downloader.get(f"raw/{entry.name}", write, size_bytes=entry.nbytes)

    await for_each(manifest.tensors, take, 4)
    assert torch_apply.root(live) == manifest.root
    return sum(entry.nbytes for entry in manifest.tensors)


# -- the experiment -------------------------------------------------------------------------------------------


def publish(folder: Path, gigabytes: float, versions: int) -> list[tuple[str, str]]:
    """(version, digest) of a model and its successors: 1% changes a step; the last also has an anchor."""
    import numpy as np
    import torch

    from headway.bus.blobs import ObstoreBlobs
    from headway.schemas.subjects import Keys
    from headway.schemas.version import Version
    from headway.weight_sync.publisher import Publisher, PublishSettings
    from headway.weight_sync.tensors import RawTensor

    rng, size = np.random.default_rng(0), int(gigabytes * 1e9 / 2 / TENSORS)
    lanes = {
        f"w{n:02}": torch.from_numpy(0.02 * rng.standard_normal(size, np.float32)).bfloat16().view(torch.uint8).numpy()
        for n in range(TENSORS)
    }
    store, head, found = ObstoreBlobs.open(str(folder / "store")), None, []

    async def put(n: int) -> None:
        nonlocal head
        raw = {name: RawTensor(dtype="BF16", shape=(size,), data=data) for name, data in lanes.items()}
        last = n == versions - 1 and gigabytes <= ANCHOR_GIGABYTES_MAX
        settings = PublishSettings(anchor_every=1 if last else 1 << 20)
        publisher = Publisher(store=store, keys=Keys(RUN), private_key=KEY, settings=settings)
        head, _ = await publisher.publish(Version(0, n), raw, head)
        found.append((f"0.{n}", head.digest))
        if n == 0:
            checkpoint(folder / "first", lanes)

    for n in range(versions):
        if n:
            for name, data in lanes.items():
                fresh = data.view("<u2").copy()
                fresh[rng.integers(0, size, int(size * CHANGED))] ^= 1
                lanes[name] = fresh.view(np.uint8)
        asyncio.run(put(n))
    checkpoint(folder / "store" / "raw", lanes)
    return found


def checkpoint(folder: Path, tensors: dict[str, Any]) -> None:
    """The plain bytes of each."""
    folder.mkdir()
    for name, data in tensors.items():
        (folder / name).write_bytes(data.data)


class Fleet:
    """Every process of the experiment, by name; killed at the end, with the namespaces."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []
        self.agents: list[asyncio.subprocess.Process] = []

    async def start(self, namespace: str, *arguments: object) -> asyncio.subprocess.Process:
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        command = [*inside, sys.executable, "-P", __file__, *map(str, arguments)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self.processes.append(process)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n", arguments
        return process

    async def order(self, mode: str, version: str, digest: str, at_once: int = 1000) -> list[dict[str, Any]]:
        """Announce to all agents, so many at once; what each took."""
        found = []
        for start in range(0, len(self.agents), at_once):
            announced_s, some = time.monotonic(), self.agents[start : start + at_once]
            for process in some:
                process.stdin.write(f"{mode} {version} {digest} {announced_s}\n".encode())  # type: ignore[union-attr]
            found += [json.loads(await process.stdout.readline()) for process in some]  # type: ignore[union-attr]
        return found

    def egress_bytes(self) -> int:
        """Of the origin, on all links, headers and repetitions included."""
        files = [f"/sys/class/net/wan{region}/statistics/tx_bytes" for region in range(len(RTT_MS))]
        command = ["ip", "netns", "exec", ORIGIN, "cat", *files]
        return sum(map(int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()))


@contextlib.asynccontextmanager
async def world(folder: Path) -> AsyncIterator[Fleet]:
    names, fleet = [ORIGIN, *(f"hw-r{region}" for region in range(len(RTT_MS)))], Fleet()
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)  # noqa: ASYNC221
        for region in range(len(RTT_MS)):
            await fleet.start("", "link", region)
        await fleet.start(ORIGIN, "origin", folder / "store")
        for region in range(len(RTT_MS)):
            await fleet.start(f"hw-r{region}", "relay", region, folder)
            for number in range(AGENTS):
                fleet.agents.append(await fleet.start(f"hw-r{region}", "agent", region, number, folder))
        yield fleet
    finally:
        for process in fleet.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)  # noqa: ASYNC221


async def main(gigabytes: float, repeats: int, modes: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nothing stays behind
    if os.geteuid() or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):  # noqa: ASYNC240
        print("skipped: network namespaces need root, iproute2 and /dev/net/tun")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions = await asyncio.to_thread(publish, folder, gigabytes, repeats + 1)
        async with world(folder) as fleet:
            await fleet.order("prime", *versions[0], at_once=1)
            due_of = {mode: versions[1:] if mode == "delta" else versions[-1:] for mode in modes.split(",")}
            if gigabytes > ANCHOR_GIGABYTES_MAX:
                due_of.pop("anchor", None)
            rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in due_of}
            egress: dict[str, list[int]] = {mode: [] for mode in rows}
            for mode, due in due_of.items():
                for version in due:
                    before = fleet.egress_bytes()
                    rows[mode] += await fleet.order(mode, *version)
                    egress[mode].append(fleet.egress_bytes() - before)
                    print(mode, version[0], max(row["served_s"] for row in _waves(rows[mode])[-1]), "s", flush=True)
    report(gigabytes, repeats, rows, egress)


def _waves(taken: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What each version took, agent by agent."""
    each = len(RTT_MS) * AGENTS
    return [taken[start : start + each] for start in range(0, len(taken), each)]


def report(gigabytes: float, repeats: int, rows: Any, egress: Any) -> None:
    found: dict[str, Any] = {"model_bytes": gigabytes * 1e9, "repeats": repeats, "rtt_ms": RTT_MS}
    for mode, taken in rows.items():
        found[f"{mode}_all_served_s"] = statistics.median(max(r["served_s"] for r in wave) for wave in _waves(taken))
        found[f"{mode}_served_s"] = statistics.median(row["served_s"] for row in taken)
        for key in ("fetch_s", "staged_s", "pause_s", "cpu_s"):
            if key in taken[0]:
                found[f"{mode}_{key}"] = statistics.median(row[key] for row in taken)
        found[f"{mode}_fetched_bytes"] = taken[0]["fetched_bytes"]
        found[f"{mode}_egress_copies_a_region"] = (
            statistics.median(egress[mode]) / taken[0]["fetched_bytes"] / len(RTT_MS)
        )
    for mode in rows.keys() - {"delta"}:
        found[f"factor_over_{mode}"] = found[f"{mode}_all_served_s"] / found["delta_all_served_s"]
    found["full_ideal_s"] = AGENTS * gigabytes * 1e9 / BYTES_PER_S  # the link alone
    found["factor_over_full_ideal"] = found["full_ideal_s"] / found["delta_all_served_s"]
    found["delta_waves_s"] = [round(max(r["served_s"] for r in w), 2) for w in _waves(rows["delta"])]
    found["load"] = [round(load, 1) for load in os.getloadavg()]
    found = {key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()}
    for key, value in found.items():
        print(f"{key:30} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    role, given = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if role == "link":
        link(int(given[0]))
    elif role == "origin":
        asyncio.run(origin(given[0]))
    elif role == "relay":
        asyncio.run(relay(int(given[0]), given[1]))
    elif role == "agent":
        asyncio.run(agent(int(given[0]), int(given[1]), given[2]))
    else:
        size, repeats, modes = [*sys.argv[1:4], *("0.5", "3", "delta,full,anchor")[len(sys.argv) - 1 :]]
        asyncio.run(main(float(size), int(repeats), modes))
