"""Faults at exact points of a chaos run. Every Python on whose path this folder lies imports it at start.

CHAOS_FAULTS is JSON, {instance: [fault, ...]}. A fault that struck leaves a file of its name in CHAOS_MARKS
and never strikes again.

    deaf           the agent hears no announcement (in every life of the process)
    flip:N         the trainer flips one bit of a shard of version N in the store; a good copy lies beside it
"""

import json
import os
from pathlib import Path


def strikes(fault):
    """Whether `fault` is due: once in all lives of the process."""
    try:
        os.close(os.open(Path(os.environ["CHAOS_MARKS"]) / fault, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def after(owner, name, then):
    """Run `then(result, self, *args)` whenever the coroutine method `name` has returned."""
    real = getattr(owner, name)

    async def wrapped(self, *args, **kwargs):
        result = await real(self, *args, **kwargs)
        then(result, self, *args)
        return result

    setattr(owner, name, wrapped)


def deafen():
    from headway.rollout_agent.head import HeadTracker

    async def nothing(self, message):
        (Path(os.environ["CHAOS_MARKS"]) / "deaf").touch()

    HeadTracker._on_announcement = nothing


def flip(n):
    from headway.schemas.subjects import Keys
    from headway.trainer.publishing import WeightLine

    def flip_bit(published, line, version, weights):
        if version.n == n and strikes(f"flip:{n}"):
            digest = published.manifest.shard_refs("delta")[0].sha256
            path = Path(os.environ["HEADWAY_STORE_URL"]) / Keys(Path(os.environ["HEADWAY_RUN_DIR"]).name).shard(digest)
            data = bytearray(path.read_bytes())
            path.with_suffix(".good").write_bytes(data)
            data[len(data) // 2] ^= 1
            path.write_bytes(data)

    after(WeightLine, "publish", flip_bit)


for fault in json.loads(os.environ.get("CHAOS_FAULTS", "{}")).get(os.environ.get("HEADWAY_INSTANCE", ""), []):
    kind, *arguments = fault.split(":")
    if kind == "deaf":
        deafen()
    elif kind == "flip":
        flip(int(arguments[0]))
