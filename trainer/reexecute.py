"""Executing recorded steps again: what a resuming trainer and `headway replay step` have in common.

A step is a pure function of (state, the rollouts it consumed in order, config); nothing here looks at a clock or a
random source. What comes out is compared with everything that the ledger says of the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
import torch

from headway.bus.blobs import MissingBlob
from headway.bus.connection import Bus
from headway.bus.ledger import Link
from headway.bus.reader import read_at
from headway.kernels.config import ModelConfig
from headway.schemas.config import Config
from headway.schemas.errors import InputError, PromiseViolated, WireError
from headway.schemas.ledger import Fork, Open, Step
from headway.schemas.manifest import open_manifest
from headway.schemas.messages import Rollout
from headway.schemas.version import Version
from headway.schemas.wire import digest_of
from headway.trainer import checkpoint as checkpoints
from headway.trainer import environment
from headway.trainer.batching import Sample
from headway.trainer.groups import Lineage
from headway.trainer.history import History
from headway.trainer.lead import Lead
from headway.trainer.learner import Learner, StepResult
from headway.trainer.mesh import Mesh
from headway.trainer.staleness import Staleness
from headway.weight_sync import torch_apply
from headway.weight_sync.tensors import table_of

DIFFERENCES_MAX = 8
log = structlog.get_logger()
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A committed step, the line it trained on, and the environment of its term."""

    step: Step
    lineage: Lineage
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What a step, executed again, gave. `checkpoint` is the learner's state afterwards, where one was recorded;
    `root` is that of its weights."""

    result: StepResult
    checkpoint: bytes
    root: str


def make_learner(
    config: Config,
    model: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    *,
    same_arithmetic: bool = True,
    mesh: Mesh | None = None,
) -> Learner:
    """The learner that a run's config asks for, from the base model's weights; see `Learner`."""
    leads = mesh is not None and mesh.size > 1 and mesh.rank == 0
    return (Lead if leads else Learner)(
        weights,
        model,
        config.grpo,
        numerics=config.engine.numerics,
        compute_dtype=getattr(torch, config.model.compute_dtype),
        rollout_dtype=config.model.rollout_dtype,
        max_lag=config.staleness.max_lag,
        seed=config.run.seed,
        swap_mode=config.staleness.swap_mode,
        same_arithmetic=same_arithmetic,
        mesh=mesh,
    )


def line_of(links: Iterable[Link], to: Version | None = None) -> list[Recorded]:
    """The steps that lead to version `to`, by default the head, oldest first; other lines are left out."""
    history, described = History(), dict[str, str]()
    steps: dict[Version, Recorded] = {}
    bases: dict[Version, Version] = {}
    for link in links:
        match link.record.body:
            case Open() as opened:
                described = opened.environment or described
            case Step() as step:
                steps[step.version] = Recorded(step=step, lineage=history.lineage, environment=described)
            case Fork() as fork:
                bases[fork.version] = fork.base
        history.add(link)
    line, at = list[Recorded](), to or history.head
    while at in steps or at in bases:
        if at in steps:
            line.insert(0, steps[at])
        at = steps[at].step.parent if at in steps else bases[at]
    return line


async def load(bus: Bus, learner: Learner, step: Step, shapes: Shapes) -> bool:
    """Give `learner` the state after `step` from its checkpoint; False when there is none that is whole."""
    assert bus.store is not None
    if step.checkpoint is None:
        return False
    try:
        data = await bus.store.get(bus.keys.checkpoint(step.checkpoint))
        if digest_of(data) != step.checkpoint:
            raise InputError(f"{len(data)} bytes do not match the digest {step.checkpoint[:16]}")
        state = await asyncio.to_thread(checkpoints.from_bytes, data, shapes)
    except (MissingBlob, InputError) as error:
        log.warning("checkpoint_unusable", version=str(step.version), why=str(error)[:300])
        return False
    learner.load_state(state)
    return True


async def execute(bus: Bus, learner: Learner, recorded: Recorded, stale: Staleness) -> Executed:
    """Take the step again from the learner's state. Raises PromiseViolated when a rollout of it is gone."""
    samples = [await _sample(bus, one.seq, recorded, stale) for one in recorded.step.consumed]
    result = await asyncio.to_thread(learner.step, samples)
    blob = b""
    if recorded.step.checkpoint is not None:
        blob = await asyncio.to_thread(lambda: checkpoints.to_bytes(learner.state(copied=False)))
    return Executed(result=result, checkpoint=blob, root=torch_apply.root(learner.rollout_weights()))


async def _sample(bus: Bus, seq: int, recorded: Recorded, stale: Staleness) -> Sample:
    try:
        stored = await read_at(bus, "ROLLOUTS", seq)
        if stored is None:
            raise WireError("invalid", "the stream no longer holds it")
        return stale.sample(await bus.open(Rollout, stored), recorded.lineage)
    except WireError as error:
        raise PromiseViolated(
            f"step {recorded.step.version} cannot be executed again: ROLLOUTS sequence {seq}",
            why=f"{error.what}; and no checkpoint from that step on is whole",
            hint="restore the store or the streams from a copy, or fork from an exported version",
        ) from None


async def differences(bus: Bus, learner: Learner, recorded: Recorded, executed: Executed, key: bytes) -> list[str]:
    """What differs from the record, most telling first: metrics, the first tensor of the weights, of the state."""
    step, found = recorded.step, list[str]()
    metrics = executed.result.metrics
    for name in sorted(step.metrics.keys() & metrics.keys()):  # another build may measure something else as well
        if (was := step.metrics[name]) != (now := metrics[name]):
            found.append(f"metric {name}: recorded {was!r}, now {now!r}")
    found = sorted(found, key=lambda text: not text.startswith("metric loss:"))[:DIFFERENCES_MAX]
    if executed.root != step.root:
        tensor = await _first_tensor(bus, learner, step, key)
        found.append(f"weight root: recorded {step.root[:16]}, now {executed.root[:16]}; {tensor}")
    if step.checkpoint is not None and digest_of(executed.checkpoint) != step.checkpoint:
        found.append(await _first_of_state(bus, learner, step.checkpoint))
    return found


async def _first_tensor(bus: Bus, learner: Learner, step: Step, key: bytes) -> str:
    assert bus.store is not None
    try:
        manifest = open_manifest(await bus.store.get(bus.keys.manifest(step.manifest)), step.manifest, key)
    except (MissingBlob, WireError) as error:
        return f"which tensor is unknown: {error.what}"
    theirs = {entry.name: entry.xxh3 for entry in manifest.tensors}
    ours = {entry.name: entry.xxh3 for entry in table_of(torch_apply.raw_tensors(learner.rollout_weights()))}
    differ = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]
    return f"the first of {len(differ)} tensors that differ is {differ[0]}"


async def _first_of_state(bus: Bus, learner: Learner, digest: str) -> str:
    assert bus.store is not None
    state = learner.state()
    shapes = {name: tuple(w.shape) for name, w in state.masters.items()}
    try:
        before = checkpoints.from_bytes(await bus.store.get(bus.keys.checkpoint(digest)), shapes)
    except (MissingBlob, InputError) as error:
        return f"state: another checkpoint than {digest[:16]}; which tensor is unknown: {error.what}"
    for kind, was, now in (("master", before.masters, state.masters), ("moment", before.moments, state.moments)):
        for name in sorted(was):
            if not torch.equal(was[name].view(torch.int32), now[name].view(torch.int32)):
                largest = float((was[name].double() - now[name].double()).abs().max())
                return f"state: {kind} {name} is the first that differs, by at most {largest:.3g}"
    return f"state: counters were {before.counters}, now {state.counters}"


def environment_changes(recorded: Mapping[str, str], here: Mapping[str, str] | None = None) -> Sequence[str]:
    """`key was -> is` for what bits depend on. The code's own commit is no environment: it is what is tested."""
    here = environment.describe() if here is None else here
    if recorded:
        recorded = {"arithmetic": "1", **recorded}  # it had no number before 2
    return [
        f"{key} {was} -> {here.get(key)}"
        for key, was in recorded.items()
        if here.get(key) != was and key not in environment.NOT_OF_THE_BITS
    ]
