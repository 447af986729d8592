"""What the trainer tells the world after a commit: stamps and events. All of it derives from the ledger,
is rewritten after a restart, and is never read back as truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.bus.connection import Bus
from headway.bus.reader import read_at
from headway.bus.service import Service
from headway.schemas.errors import WireError
from headway.schemas.ledger import Consumed, Drop, Step
from headway.schemas.messages import Rollout, TrainerStamp
from headway.schemas.version import Version
from headway.trainer.batching import ABANDONED_LAG, Sample
from headway.trainer.groups import Batch, Lineage
from headway.trainer.history import History
from headway.trainer.learner import StepResult
from headway.trainer.staleness import Staleness

LAG_BINS = 8


def consumed(batch: Batch[Rollout]) -> list[Consumed]:
    """The batch as the ledger names it, in batch order."""
    return [
        Consumed(rollout_id=d.rollout_id, seq=d.seq, reward=float(d.payload.reward or 0.0))
        for d in batch.rollouts()
        if d.payload is not None
    ]


def _trained(version: Version, sample: Sample, max_lag: int) -> TrainerStamp:
    tokens, masked = sample.counts(max_lag)
    lags = [lag for lag in sample.span_lags if lag < ABANDONED_LAG]
    return TrainerStamp(
        rollout_id=sample.rollout_id,
        version=version,
        outcome="trained",
        lag_min=min(lags, default=-1),
        lag_max=max(lags, default=-1),
        tokens_trained=tokens,
        tokens_masked=masked,
    )


def _dropped(version: Version, drop: Drop) -> TrainerStamp:
    return TrainerStamp(
        rollout_id=drop.rollout_id,
        version=version,
        outcome=f"dropped:{drop.reason}",
        lag_min=-1,
        lag_max=-1,
        tokens_trained=0,
        tokens_masked=0,
    )


async def _publish_all(bus: Bus, stamps: Iterable[TrainerStamp]) -> None:
    await bus.publish_all((bus.subjects.trainer_stamp, stamp) for stamp in stamps)


async def stamp_drops(bus: Bus, version: Version, drops: Sequence[Drop]) -> None:
    await _publish_all(bus, [_dropped(version, drop) for drop in drops])


async def restamp(bus: Bus, step: Step, lineage: Lineage, stale: Staleness) -> None:
    """Stamp the last step, trained on `lineage`, again: the trainer may have died before its stamps."""
    samples = []
    for one in step.consumed:
        stored = await read_at(bus, "ROLLOUTS", one.seq)
        if stored is None:
            continue
        try:
            samples.append(stale.sample(await bus.open(Rollout, stored), lineage))
        except WireError:
            continue  # its body is gone from the store; the ledger still says what became of it
    await _publish_all(bus, [_trained(step.version, sample, stale.max_lag) for sample in samples])
    await stamp_drops(bus, step.version, step.drops)


def lag_histogram(samples: Sequence[Sample], max_lag: int) -> dict[str, int]:
    """Trained tokens by lag: lag_tokens_0, lag_tokens_1, …"""
    found: dict[str, int] = {}
    for sample in samples:
        for span, lag in zip(sample.trajectory.spans, sample.span_lags, strict=True):
            if lag <= max_lag:
                key = f"lag_tokens_{min(lag, LAG_BINS)}"
                found[key] = found.get(key, 0) + span.end - span.start
    return found


async def announce_step(
    service: Service,
    history: History,
    result: StepResult,
    samples: Sequence[Sample],
    timings: dict[str, float],
    duplicates: int,
) -> None:
    """Stamps of the batch and the `step` event, whose fields are the canonical line about a step."""
    step, max_lag = history.last_step, service.config.staleness.max_lag
    assert step is not None
    stamps = [_trained(step.version, sample, max_lag) for sample in samples]
    stamps += [_dropped(step.version, drop) for drop in step.drops]
    await _publish_all(service.bus, stamps)
    metrics = result.metrics
    wall_s = timings["waited_s"] + timings["computed_s"] + timings["published_s"]
    seen_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
    fields: dict[str, str | int | float | bool] = {
        "step": step.version.n,
        "steps": service.config.run.steps,
        "version": str(step.version),
        "max_lag": max_lag,
        "trained": step.counters.trained_rollouts,
        "dropped": step.counters.dropped_rollouts,
        "duplicates": duplicates,
        "tokens": seen_tokens,
        "tokens_per_s": seen_tokens / max(wall_s, 1e-9),
        "waiting_for": "rollouts" if timings["waited_s"] > 0.5 * wall_s else "policy",
        **{key: round(value, 6) for key, value in timings.items()},
        **lag_histogram(samples, max_lag),
        **{name: value for name, value in metrics.items() if "_layer_" not in name},
    }
    service.gauges.update(metrics)
    await service.event("step", **fields)
