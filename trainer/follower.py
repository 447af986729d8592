"""`headway trainer` on the ranks but 0: computes its share of each step and publishes its share of each version.

It knows neither bus nor ledger: rank 0 decides, and tells what it is about to do (`lead`). While a share is put into
the store the next step is computed. It ends when rank 0 says so or is gone, never by a signal: to drain is rank 0's.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import NoReturn

import structlog
import torch

from headway.bus.blobs import ObstoreBlobs
from headway.bus.service import Settings, configure_logging, exit_code
from headway.schemas import signing
from headway.schemas.config import Config
from headway.schemas.errors import UnavailableError
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.schemas.wire import unpack
from headway.trainer import lead
from headway.trainer.begin import base_folder, begin, load_base
from headway.trainer.checkpoint import Checkpoint
from headway.trainer.learner import Learner
from headway.trainer.mesh import Ranks
from headway.trainer.publishing import Share

LINGER_S = 5.0
"""A rank that lost another lets it end first: that one's exit code tells why."""
log = structlog.get_logger()


class Follower:
    """Does what it hears."""

    def __init__(self, mesh: Ranks, learner: Learner, share: Share) -> None:
        self._mesh, self._learner, self._share = mesh, learner, share
        self._publishing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until rank 0 ends it. Raises UnavailableError when a rank or the store is gone."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                verb, parts = await asyncio.to_thread(self._mesh.hear)
                if verb == lead.END:
                    return
                if verb == lead.PUBLISH:
                    version = Version.parse(unpack(lead.Named, parts[0]).version)
                    publish = self._publish(version, self._learner.rollout_weights(), self._publishing)
                    self._publishing = tasks.create_task(publish)
                elif verb == lead.ADOPT:
                    await self._adopt(unpack(lead.Named, parts[0]))
                else:
                    await asyncio.to_thread(self._compute, verb, parts)

    def _compute(self, verb: str, parts: list[bytes]) -> None:
        if verb == lead.STATE:
            self._learner.state(copied=False)
        elif verb == lead.LOAD:
            counters = {"steps_done": unpack(lead.Counted, parts[0]).steps_done}
            self._learner.load_state(Checkpoint(masters={}, moments={}, counters=counters))
        elif verb == lead.STEP:
            try:
                self._learner.step([lead.unpack_sample(body) for body in parts])
            except UnavailableError:
                raise
            except Exception as error:  # of any type: rank 0 got it too, and decides what becomes of the batch
                log.warning("step_not_taken", error=repr(error)[:300])
        else:
            raise AssertionError(f"rank 0 told {verb!r}")

    async def _publish(
        self, version: Version, weights: dict[str, torch.Tensor], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await before
        await self._share.publish(version, weights)

    async def _adopt(self, head: lead.Named) -> None:
        version, weights = Version.parse(head.version), self._learner.rollout_weights()
        await self._share.adopt(version, head.manifest, weights, head.root)


def run_follower(config: Config) -> NoReturn:
    """This process as a rank but 0; ends it with its exit code."""
    configure_logging()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_run(config))


async def _run(config: Config) -> NoReturn:
    code = 0
    try:
        await follow(config, Settings.from_env(config, "trainer"))
    except Exception as error:
        code = exit_code(error)
    if code == UnavailableError.exit_code:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        await asyncio.sleep(LINGER_S)
    os._exit(code)  # a thread that still waits for rank 0 could not be ended otherwise


async def follow(config: Config, settings: Settings) -> None:
    """One rank of a trainer, until rank 0 ends it. Raises HeadwayError, also in a group."""
    torch.set_num_threads(1)
    mesh = Ranks(os.environ)
    structlog.contextvars.bind_contextvars(service="trainer", instance=settings.instance, rank=mesh.rank)
    learner = begin(config, *load_base(base_folder(config, settings)), mesh)
    mesh.require_alike(lead.likeness(config, learner))
    store = ObstoreBlobs.open(settings.store_url, attempts=config.store.put_attempts)
    share = Share(store, Keys(config.run.name), signing.load_key(settings.trainer_key()), mesh)
    await Follower(mesh, learner, share).run()
    mesh.close()
