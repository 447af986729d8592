"""One rank of several publishes three versions into a folder: FOLDER RANK WORLD_SIZE ATTEMPT. A process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np

from headway.bus.blobs import ObstoreBlobs
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.weight_sync.publisher import Published, Publisher, PublishSettings
from headway.weight_sync.ranks import RankedPublisher
from headway.weight_sync.tensors import RawTensor

KEY, KEYS = bytes(range(32)), Keys("demo")
SETTINGS = PublishSettings(chunk_bytes=4096, shard_bytes=4096)
NAMES = [f"t{i}" for i in range(7)]


def weights(n: int) -> dict[str, RawTensor]:
    """Of version n; of the last tensor nothing ever changes."""
    made = {}
    for i, name in enumerate(NAMES):
        data = np.random.default_rng(i).integers(0, 256, 16384).astype(np.uint8)
        data[:: 50 + i] += 0 if name == NAMES[-1] else n
        made[name] = RawTensor(dtype="BF16", shape=(64, 128), data=data)
    return made


async def publish(folder: Path, rank: int, world_size: int, attempt: str) -> None:
    publisher = Publisher(store=ObstoreBlobs.open(str(folder)), keys=KEYS, private_key=KEY, settings=SETTINGS)
    mine = RankedPublisher(
        publisher=publisher, rank=rank, world_size=world_size, attempt=attempt, patience_s=60, poll_s=0.02
    )
    head: Published | None = None
    for n in range(3):
        share = {name: raw for i, (name, raw) in enumerate(weights(n).items()) if i % world_size == rank}
        head = await mine.publish(Version(0, n), share, head, NAMES)
        print(n, head.digest, flush=True)


if __name__ == "__main__":
    asyncio.run(publish(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
    os._exit(0)  # taking an interpreter down beside the threads of its store ended in an abort once
