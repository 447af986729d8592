"""One rank of several trains and publishes into a folder: FOLDER DTYPE HOW. A process of its own.

Rank 0 prints a line of JSON for each step. HOW is `in_order`, or a mistake: `all_reduce` sums what ranks found before
it adds, `poison` lets rank 1 fail in its second step, `unlike` gives rank 1 another environment, `halt` lets rank 0
say how it is before its second step and wait for a line of input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from learner_stand import batch, fingerprint, learner

from headway.bus.blobs import ObstoreBlobs
from headway.schemas.errors import HeadwayError
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.schemas.wire import pack
from headway.trainer import lead
from headway.trainer.checkpoint import from_bytes, to_bytes
from headway.trainer.follower import Follower
from headway.trainer.learner import Learner
from headway.trainer.mesh import Layout, Mesh, Ranks, mesh_of
from headway.trainer.publishing import Share
from headway.weight_sync import torch_apply

KEY, KEYS = bytes(range(32)), Keys("demo")
STEPS = 3
UNIT_TOKENS = 14
"""A limit at which the batch makes several micro-batches."""


def all_reduced(self: Ranks, layout: Layout, sums: Any, found: Any, adds: Any) -> None:
    if any(adds):
        for name in sorted(layout.shapes):
            total = torch.zeros(layout.shapes[name]) if found is None else found[name].clone()
            dist.all_reduce(total)
            if name in sums:
                sums[name] += total


def poisoned(real: Any) -> Any:
    def gradients(self: Learner, *args: Any) -> Any:
        if self.steps_done == 1:
            raise ValueError("a share that cannot be computed")
        return real(self, *args)

    return gradients


async def train(mesh: Mesh, who: Learner, share: Share, how: str) -> None:
    async def publish(n: int) -> Any:
        mesh.tell(lead.PUBLISH, [pack(lead.Named(version=f"0.{n}"))])
        return await share.publish(Version(0, n), who.rollout_weights())

    await publish(0)
    older = who.rollout_weights()
    for n in range(1, STEPS + 1):
        before, weights = to_bytes(who.state()), who.rollout_weights()
        samples = batch(weights, None if n == 1 else older)
        older = weights
        if how == "halt" and n == 2:
            print("{}", flush=True)
            sys.stdin.readline()
        try:
            result = who.step(samples)
        except HeadwayError as error:
            print(json.dumps({"error": str(error), "unchanged": to_bytes(who.state()) == before}), flush=True)
            break
        published = await publish(n)
        line = {
            "metrics": result.metrics,
            "micro_batches": result.micro_batches,
            "checkpoint": fingerprint(who),
            "root": torch_apply.root(who.rollout_weights()),
            "published": published.manifest.root,
            "changed": published.changed_fraction,
            "shards": sorted(shard.kind for shard in published.manifest.shards),
        }
        print(json.dumps(line), flush=True)
    else:
        who.load_state(from_bytes(before, who.model.tensor_shapes()))
        assert who.step(samples).metrics == result.metrics, "the state of before gives the same step"
    mesh.tell(lead.END)


async def main(folder: str, dtype: str, how: str) -> None:
    torch.set_num_threads(1)
    if how == "all_reduce":
        Ranks.add_in_order = all_reduced  # type: ignore[method-assign]
    mesh = mesh_of(os.environ)
    if how == "poison" and mesh.rank == 1:
        Learner._gradients = poisoned(Learner._gradients)  # type: ignore[method-assign]
    who = learner(rollout_dtype=dtype, mesh=mesh, micro_batch_tokens=UNIT_TOKENS, balance_loss=0.01)
    mesh.require_alike({"build": "another" if how == "unlike" and mesh.rank else "one"})
    share = Share(ObstoreBlobs.open(folder), KEYS, KEY, mesh)
    if isinstance(mesh, Ranks) and mesh.rank:
        await Follower(mesh, who, share).run()
    else:
        await train(mesh, who, share, how)
    mesh.close()


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except HeadwayError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    os._exit(0)
