"""Rank 0's learner, and the orders by which the other ranks do what it does.

An order is a verb and a few byte strings: messages of the wire's format, of a batch one for each sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from headway.schemas.config import Config
from headway.schemas.trajectory import Trajectory
from headway.schemas.wire import Model, pack, unpack
from headway.trainer import environment
from headway.trainer.batching import Sample
from headway.trainer.checkpoint import Checkpoint
from headway.trainer.learner import Learner, StepResult
from headway.weight_sync import torch_apply

log = structlog.get_logger()
STEP = "step"
"""Take a step on the samples."""
STATE = "state"
LOAD = "load"
PUBLISH = "publish"
"""The present weights, as the given version."""
ADOPT = "adopt"
END = "end"


class Counted(Model):
    """Of LOAD: the counter that belongs to the state."""

    steps_done: int


class Named(Model):
    """Of PUBLISH and ADOPT: a version; for ADOPT where it is and what it must be."""

    version: str
    manifest: str = ""
    root: str = ""


class _Sample(Model):
    rollout_id: str
    group: int
    reward: float
    trajectory: Trajectory
    span_lags: list[int]
    route_lags: list[int]


class Lead(Learner):
    """All ranks do what it does."""

    def step(self, batch: Sequence[Sample]) -> StepResult:
        self._mesh.tell(STEP, [pack_sample(sample) for sample in batch])
        result = super().step(batch)
        if len(result.micro_batches) < self._mesh.size:
            log.warning("ranks_stood_idle", ranks=self._mesh.size, micro_batches=len(result.micro_batches))
        return result

    def state(self, *, copied: bool = True) -> Checkpoint:
        self._mesh.tell(STATE)
        return super().state(copied=copied)

    def load_state(self, checkpoint: Checkpoint) -> None:
        self._mesh.tell(LOAD, [pack(Counted(steps_done=checkpoint.counters["steps_done"]))])
        super().load_state(checkpoint)


def pack_sample(sample: Sample) -> bytes:
    """The sample's bytes."""
    return pack(
        _Sample(
            rollout_id=sample.rollout_id,
            group=sample.group,
            reward=sample.reward,
            trajectory=sample.trajectory,
            span_lags=list(sample.span_lags),
            route_lags=list(sample.route_lags),
        )
    )


def unpack_sample(body: bytes) -> Sample:
    """What `pack_sample` packed. Raises WireError."""
    found = unpack(_Sample, body)
    return Sample(
        rollout_id=found.rollout_id,
        group=found.group,
        reward=found.reward,
        trajectory=found.trajectory,
        span_lags=tuple(found.span_lags),
        route_lags=tuple(found.route_lags),
    )


def likeness(config: Config, learner: Learner) -> dict[str, str]:
    """What must be the same on all ranks, lest the bits of a step hang on which of them computes what."""
    base = torch_apply.root(learner.rollout_weights())
    return environment.describe() | {"run.toml": config.shared_digest(), "base": base}
