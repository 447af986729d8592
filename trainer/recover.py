"""Bringing a learner to the head of the ledger, also when checkpoints are damaged, gone, or not made at every step.

It starts from the newest usable checkpoint of the line (with none, from the base model) and executes the
steps after it again, from the rollouts that the ledger names. Each must give the recorded metrics, weight root
and checkpoint digest, or nothing goes on: a state that is not the ledger's is never trained on.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from headway.bus.ledger import Link
from headway.bus.service import Service
from headway.schemas.errors import PromiseViolated
from headway.trainer import environment
from headway.trainer.learner import Learner
from headway.trainer.reexecute import Recorded, Shapes, differences, environment_changes, execute, line_of, load
from headway.trainer.staleness import Staleness

log = structlog.get_logger()


async def to_head(
    service: Service, learner: Learner, links: Iterable[Link], shapes: Shapes, stale: Staleness, key: bytes
) -> int:
    """Give `learner`, which holds the base model, the head's state; how many steps were executed again.

    `key` is the trainer's public key. Raises PromiseViolated when that cannot be done exactly, UnavailableError
    when the store does not answer.
    """
    line = line_of(links)
    done = len(line)
    while done and not await load(service.bus, learner, line[done - 1].step, shapes):
        done -= 1
    again = line[done:]
    damaged = [recorded.step.version for recorded in again if recorded.step.checkpoint is not None]
    remade = set(damaged[-service.config.grpo.retain_steps :])
    for recorded in again:
        service.status.update(phase=f"executing step {recorded.step.version} again")
        blob = await _execute(service, learner, recorded, stale, key)
        if recorded.step.version in remade and recorded.step.checkpoint is not None:
            name = service.bus.keys.checkpoint(recorded.step.checkpoint)
            await service.store.delete(name)
            await service.store.put(name, blob)
    if again:
        start, head = str(again[0].step.parent), str(again[-1].step.version)
        log.info("steps_executed_again", good=start, head=head, steps=len(again))
        if remade:
            await service.event("checkpoints_remade", good=start, head=head, steps=len(again))
    return len(again)


async def _execute(service: Service, learner: Learner, recorded: Recorded, stale: Staleness, key: bytes) -> bytes:
    """Take the step again; its checkpoint, which has the recorded digest, where one was made."""
    step = recorded.step
    executed = await execute(service.bus, learner, recorded, stale)
    if differ := await differences(service.bus, learner, recorded, executed, key):
        changed = environment_changes(recorded.environment, environment.describe())
        raise PromiseViolated(
            f"step {step.version}, executed again, is not the ledger's: {differ[0]}",
            why=f"the environment changed: {', '.join(changed)}" if changed else "on the recorded environment",
            hint="resume where it was trained, or `headway rollback` to a version whose checkpoint is whole",
        )
    return executed.checkpoint
