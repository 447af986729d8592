"""Publish three versions and apply them to a mirror, killed at every fail point passed; then again, to the end.

A program of its own, because it forks: nothing here may start a thread before. Prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headway.bus import failpoints
from headway.bus.blobs import ObstoreBlobs
from headway.schemas import signing
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.publisher import Published, Publisher, PublishSettings
from headway.weight_sync.tensors import RawTensor
from headway.weight_sync.transfer import Retrier, TransferLimits

KEY, KEYS = bytes(range(32)), Keys("demo")
SETTINGS = PublishSettings(chunk_bytes=8192, shard_bytes=8192, anchor_every=16)


def weights(n: int) -> dict[str, RawTensor]:
    """Of version n: two tensors that change, at a few places but for half of version 2, and one that does not."""
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, 16384).astype(np.uint8)
    data[:: 64 // (n + 1)] += n
    half = data[: len(data) // 2]
    half[:: 1 if n == 2 else 64] += n
    return {
        "a": RawTensor(dtype="BF16", shape=(64, 128), data=data),
        "b": RawTensor(dtype="F32", shape=(2,), data=data[:8].copy() * 0),
        "c": RawTensor(dtype="BF16", shape=(64, 128), data=data[::-1].copy()),
    }


async def publish(folder: Path) -> list[Published]:
    publisher = Publisher(store=ObstoreBlobs.open(str(folder / "store")), keys=KEYS, private_key=KEY, settings=SETTINGS)
    line: list[Published] = []
    for n in range(3):
        line.append((await publisher.publish(Version(0, n), weights(n), line[-1] if line else None))[0])
    return line


async def work(folder: Path) -> None:
    """All of it, from whatever an earlier life left. Raises unless the mirror ends with the bytes of version 2."""
    mirror = HostMirror(folder / "mirror", signing.public_key(KEY))
    held = -1 if mirror.head is None else mirror.head.version.n
    if held >= 0:
        require(mirror, held)
    line = await publish(folder)
    fetcher = Fetcher(
        store=ObstoreBlobs.open(str(folder / "store")).once(),
        keys=KEYS,
        public_key=signing.public_key(KEY),
        retrier=Retrier(limits=TransferLimits(attempts_max=1), rng=random.Random(0)),
    )
    for published in line[held + 1 :]:
        staged = await fetcher.stage(published.version, published.digest, mirror)
        if (held >= 0 or published.version.n) and staged.patches["a"].is_whole:
            raise AssertionError("a single delta was made whole")
        mirror.stage_partial_checkpoint(folder / "checkpoint", b"{}", staged, full=True)
        mirror.commit(staged)
        require(mirror, published.version.n)
    if sorted(p.name for p in (folder / "mirror").iterdir()) != ["head.manifest", "weights.bin"]:
        raise AssertionError("the mirror keeps something that it does not need")


def require(mirror: HostMirror, n: int) -> None:
    for name, raw in weights(n).items():
        if mirror.tensors[name].tobytes() != raw.data.tobytes():
            raise AssertionError(f"{name} is not that of version {n}")


def life(folder: Path, hook: Callable[[str], None]) -> int:
    """Run `work` in a process of its own; its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        try:
            failpoints.install(hook)
            asyncio.run(work(folder))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def passes(folder: Path) -> list[str]:
    """The fail points that an undisturbed life passes, in order."""
    seen = folder / "seen"

    def note(name: str) -> None:
        with seen.open("a") as file:
            file.write(f"{name}\n")

    assert life(folder / "run", note) == 0
    return seen.read_text().split()


def killed_at(number: int) -> Callable[[str], None]:
    left = [number]

    def hook(name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def main(folder: Path) -> None:
    names = passes(folder / "whole")
    failed = []
    for number, name in enumerate(names):
        run = folder / "killed"
        first, second = life(run, killed_at(number)), life(run, lambda name: None)
        if (first, second) != (-signal.SIGKILL, 0):
            failed.append(f"{number} {name}: {first}, then {second}")
        shutil.rmtree(run)
    print(json.dumps({"passes": names, "failed": failed}))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "whole").mkdir()
    main(target)
