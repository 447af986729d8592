"""A full disk is a clear error; what was acknowledged or committed before it is still there after it."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.reader import read_all
from headway.bus.server import ServerSettings, find_nats_server, free_port, wait_listening
from headway.bus.topology import Topology
from headway.deploy.cli import main as cli
from headway.schemas import signing
from headway.schemas.errors import UnavailableError, from_os
from headway.schemas.messages import Event
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.trainer import checkpoint as checkpoints
from headway.trainer import midtrain
from headway.trainer.audit import audit
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.publisher import Publisher
from headway.weight_sync.tensors import RawTensor
from headway.weight_sync.transfer import Retrier, TransferLimits

Make = Callable[..., Any]


class Disk:
    """A small tmpfs at `path`."""

    def __init__(self, path: Path, size: str) -> None:
        self.path = path
        path.mkdir(parents=True)
        self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))

    def _mount(self, *arguments: str) -> None:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")

    def grow(self, size: str) -> None:
        self._mount("-o", f"remount,size={size}", str(self.path))

    def fill(self, leave_bytes: int) -> None:
        free = os.statvfs(self.path)
        (self.path / "ballast").write_bytes(b"\0" * (free.f_bavail * free.f_frsize - leave_bytes))

    def clear(self) -> None:
        (self.path / "ballast").unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str, str], Disk]]:
    """Make a disk in the test's folder. Needs root, else the test is skipped."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    made: list[Disk] = []

    def make(name: str, size: str) -> Disk:
        made.append(Disk(tmp_path / name, size))
        return made[-1]

    yield make
    for one in made:
        subprocess.run(["umount", "-l", str(one.path)], check=False)


async def test_a_full_store_is_named_and_keeps_only_whole_objects(disk: Any) -> None:
    small = disk("small", "4m")
    store = ObstoreBlobs.open(str(small.path / "store"), attempts=2)
    await store.put("run/a", b"a" * 1_000_000)
    small.fill(leave_bytes=500_000)
    with pytest.raises(UnavailableError, match=r"put run/b failed 2 times.*free space") as caught:
        await store.put("run/b", b"b" * 1_000_000)
    assert "No space left" in caught.value.why
    assert [key async for key, _ in store.list("run/")] == ["run/a"]
    small.clear()
    await store.put("run/b", b"b" * 1_000_000)
    assert await store.get("run/b") == b"b" * 1_000_000


async def test_a_full_disk_under_a_mirror_is_an_error_and_leaves_no_half_version(disk: Any) -> None:
    """Not SIGBUS, which is what a write to a mapped file without room would be."""
    small, key, keys = disk("mirror", "2m"), bytes(range(32)), Keys("run")
    publisher = Publisher(store=ObstoreBlobs.open("memory://"), keys=keys, private_key=key)
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    line = [
        (await publisher.publish(Version(0, 0), {"w": RawTensor(dtype="U8", shape=data.shape, data=data)}, None))[0]
    ]
    changed = RawTensor(dtype="U8", shape=data.shape, data=data + 1)
    line.append((await publisher.publish(Version(0, 1), {"w": changed}, line[0]))[0])
    retrier = Retrier(limits=TransferLimits(), rng=random.Random(0))
    fetcher = Fetcher(store=publisher.store.once(), keys=keys, public_key=signing.public_key(key), retrier=retrier)

    def opened() -> HostMirror:
        return HostMirror(small.path / "mirror", signing.public_key(key), fsync=False)

    async def advance(mirror: HostMirror, n: int) -> None:
        mirror.commit(await fetcher.stage(line[n].version, line[n].digest, mirror))

    small.fill(leave_bytes=500_000)
    with pytest.raises(OSError, match="No space left") as caught:
        await advance(opened(), 0)
    assert "free disk space" in from_os(caught.value).hint
    assert opened().head is None
    small.clear()
    mirror = opened()
    await advance(mirror, 0)
    small.fill(leave_bytes=0)
    with pytest.raises(OSError, match="No space left"):
        await advance(mirror, 1)
    assert opened().root in (line[0].manifest.root, None)
    small.clear()
    mirror = opened()
    await advance(mirror, 1)
    assert mirror.root == line[1].manifest.root
    assert mirror.tensors["w"].tobytes() == changed.data.tobytes()


@pytest.fixture
def store_disk(disk: Any) -> Disk:
    """The store of the `bus` fixture, which is made after it."""
    return disk("store", "16m")


async def test_a_disk_that_fills_up_during_a_checkpoint_costs_no_step(
    store_disk: Disk, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(steps=6)
    run.bus.store._attempts = 2
    real, failed = ObstoreBlobs.put, asyncio.Event()

    async def put(self: ObstoreBlobs, key: str, data: bytes) -> None:
        try:
            await real(self, key, data)
        except UnavailableError:
            failed.set()
            raise

    monkeypatch.setattr(ObstoreBlobs, "put", put)

    def answer(task: Any, head: Any) -> Any:
        return run.graded(task, float(task.sample), head)

    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.dispatcher(), run.agent(answer):
            async with run.trainer():
                await run.wait_for_step(2)
                store_disk.fill(leave_bytes=20_000)
                await asyncio.wait_for(failed.wait(), 30)
                await asyncio.sleep(0.5)
    assert caught.group_contains(UnavailableError, match="free space")
    stopped = (await run.history()).head
    store_disk.clear()
    async with run.dispatcher(), run.agent(answer), run.trainer():
        history = await run.wait_for_step(6)
    assert 2 <= stopped.n < 6
    assert history.term == 2
    report = await audit(run.bus)
    assert (report.violations, report.trained, report.lost) == ([], 24, 0)


def test_a_disk_that_fills_up_during_mid_training_is_one_clear_block_and_the_old_checkpoint_stays(
    disk: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = disk("small", "1m")
    state = checkpoints.Checkpoint(
        masters={"w": torch.ones(50_000)},
        moments={f"{kind}/w": torch.ones(50_000) for kind in checkpoints.MOMENTS},
        counters={},
    )
    path = small.path / "state.ckpt"
    checkpoints.save_file(state, path)
    before = path.read_bytes()
    monkeypatch.setattr(midtrain, "run_midtrain", lambda *_: checkpoints.save_file(state, path))
    assert cli.main(["midtrain", "--run-dir", str(small.path)]) == 69
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert "try: " in said
    assert "Traceback" not in said
    assert path.read_bytes() == before


async def test_a_server_whose_disk_is_full_acknowledges_nothing_it_cannot_keep(disk: Any, tmp_path: Path) -> None:
    small = disk("nats", "6m")
    settings = ServerSettings(folder=small.path, port=free_port(), token="t")
    stored: list[int] = []

    def start() -> subprocess.Popen[bytes]:
        conf = settings.write_config()  # which would let the server see that the disk is small
        conf.write_text(conf.read_text().replace("store_dir", "max_file_store: 1TB, store_dir"))
        return subprocess.Popen([find_nats_server(), "-c", str(conf), "-l", str(tmp_path / "log")])

    async def publish(bus: Bus) -> int:
        event = Event(service="t", instance="t", name="seen", fields={"pad": "x" * 60_000})
        return await bus.publish(bus.subjects.event("t", "seen"), event, deadline_s=0.5)

    server = start()
    try:
        await wait_listening(settings.port)
        async with await Bus.connect(settings.url, "test", token="t") as bus:
            await Topology(run="test").apply(bus.js)
            with pytest.raises(UnavailableError, match="no acknowledgement") as caught:
                while True:
                    stored.append(await publish(bus))
            assert "disk" in caught.value.hint
            assert [one.seq async for one in read_all(bus, "EVENTS")] == stored
        server.kill()
        server.wait()
        small.grow("20m")
        server = start()
        await wait_listening(settings.port)
        async with await Bus.connect(settings.url, "test", token="t") as bus:
            assert [one.seq async for one in read_all(bus, "EVENTS")][: len(stored)] == stored
            assert await publish(bus) > stored[-1]
    finally:
        server.kill()
        server.wait()
