"""A recorded step, or a recorded rollout, computed once more, and what of it differs."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader, Link
from headway.bus.reader import read_all, read_at
from headway.kernels.config import ModelConfig
from headway.schemas.config import Config
from headway.schemas.errors import InputError, WireError
from headway.schemas.ledger import Genesis
from headway.schemas.messages import H_ROLLOUT, Rollout
from headway.schemas.version import Version
from headway.trainer.checkpoint import from_bytes
from headway.trainer.history import History
from headway.trainer.reexecute import (
    Executed,
    Recorded,
    differences,
    environment_changes,
    execute,
    line_of,
    load,
    make_learner,
)
from headway.trainer.rescore import SpanScore, rescore
from headway.trainer.staleness import Staleness
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.torch_apply import DTYPE_NAMES
from headway.weight_sync.transfer import Retrier, TransferLimits

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayable:
    """What a replay reads: a run or a recording of it, its verified ledger, its model."""

    bus: Bus
    config: Config
    model: ModelConfig
    links: Sequence[Link]
    history: History
    genesis: Genesis

    @classmethod
    async def of(cls, bus: Bus, config: Config, model: ModelConfig) -> Replayable:
        """Raises InputError for a run that has not begun, PromiseViolated for an untrustworthy ledger."""
        links = [link async for link in LedgerReader(bus).links()]
        history = History()
        history.extend(links)
        if history.genesis is None:
            raise InputError(f"run {bus.run} has no step yet", why="its ledger is empty")
        return cls(bus=bus, config=config, model=model, links=links, history=history, genesis=history.genesis)

    def version(self, text: str) -> Version:
        """`e.n`, or `n` on the line that leads to the head. Raises InputError."""
        if text.isdecimal():
            line = line_of(self.links)
            found = next((one.step.version for one in line if one.step.version.n == int(text)), None)
        else:
            try:
                found = Version.parse(text)
            except ValueError as error:
                raise InputError(str(error)) from None
        if found is None or found not in self.history.manifests:
            raise InputError(f"run {self.bus.run} has no step {text}", why=f"its head is {self.history.head}")
        return found

    async def weights(self, version: Version) -> dict[str, Tensor]:
        """The weights that engines served as `version`, verified against the ledger.

        Raises WireError, UnavailableError.
        """
        assert self.bus.store is not None
        key, retrier = self.genesis.trainer_key, Retrier(limits=TransferLimits(), rng=random.Random())
        fetcher = Fetcher(store=self.bus.store, keys=self.bus.keys, public_key=key, retrier=retrier)
        with tempfile.TemporaryDirectory() as scratch:
            mirror = HostMirror(Path(scratch), key, fsync=False)
            staged = await fetcher.stage(version, self.history.manifests[version], mirror)
        found = {}
        for entry in staged.manifest.tensors:
            data = torch.from_numpy(np.array(staged.patches[entry.alias or entry.name].dense(None)))
            found[entry.name] = data.view(DTYPES[entry.dtype]).reshape(entry.shape)
        return found


@dataclass(slots=True, kw_only=True)
class StepReplay:
    """`differences` are (step, what differs): of the first step that diverged. `approximate` when that was to be
    expected, since the environment is another one."""

    version: Version
    start: Version
    executed: list[Version] = field(default_factory=list)
    last: Executed | None = None
    recorded: Recorded | None = None
    environment: Sequence[str] = ()
    differences: list[tuple[Version, str]] = field(default_factory=list)

    @property
    def approximate(self) -> bool:
        return bool(self.environment and self.differences)


async def replay_step(run: Replayable, version: Version) -> StepReplay:
    """Execute `version`'s step again from the newest whole checkpoint before it, and every step between.

    Raises InputError when it is no step, PromiseViolated when a rollout is gone, UnavailableError when neither a
    checkpoint nor the base can be had.
    """
    line, stale = line_of(run.links, version), Staleness.of(run.config)
    if not line or line[-1].step.version != version:
        raise InputError(f"{version} was made by no step", why="it is the base, or a fork's", hint="an earlier n")
    shapes = run.model.tensor_shapes()
    torch.set_num_threads(int(line[-1].environment.get("threads", "1")))
    same = not any(environment_changes(recorded.environment) for recorded in line)
    nothing = {name: torch.zeros(shape) for name, shape in shapes.items()}
    learner = make_learner(run.config, run.model, nothing, same_arithmetic=same)
    done = len(line) - 1
    while done and not await load(run.bus, learner, line[done - 1].step, shapes):
        done -= 1
    if not done and run.config.model.rollout_dtype != "bfloat16":
        raise InputError(
            f"no checkpoint before {version} is at hand", why="version 0 holds quantised weights, not the base's"
        )
    if not done:
        learner = make_learner(run.config, run.model, await run.weights(Version(0, 0)), same_arithmetic=same)
    found = StepReplay(version=version, start=line[done - 1].step.version if done else Version(0, 0))
    for recorded in line[done:]:
        executed = await execute(run.bus, learner, recorded, stale)
        found.executed.append(recorded.step.version)
        found.last, found.recorded = executed, recorded
        found.environment = environment_changes(recorded.environment)
        differ = await differences(run.bus, learner, recorded, executed, run.genesis.trainer_key)
        if differ:
            found.differences = [(recorded.step.version, text) for text in differ]
            break
    return found


async def replay_failed(run: Replayable, seqs: Sequence[int], state: str) -> Exception | None:
    """Take a step that was never committed, from the state of that digest: its error, None when it succeeds.

    Raises InputError, UnavailableError for what a bundle lacks.
    """
    assert run.bus.store is not None
    torch.set_num_threads(1)
    shapes, stale = run.model.tensor_shapes(), Staleness.of(run.config)
    learner = make_learner(run.config, run.model, {name: torch.zeros(shape) for name, shape in shapes.items()})
    learner.load_state(from_bytes(await run.bus.store.get(run.bus.keys.checkpoint(state)), shapes))
    samples = []
    for seq in seqs:
        stored = await read_at(run.bus, "ROLLOUTS", seq)
        if stored is None:
            raise InputError(f"ROLLOUTS {seq} of the batch is missing")
        samples.append(stale.sample(await run.bus.open(Rollout, stored), run.history.lineage))
    try:
        learner.step(samples)
    except Exception as error:  # what it was set aside for, of any type
        return error
    return None


async def replay_rollout(run: Replayable, rollout_id: str) -> tuple[Rollout, list[SpanScore]]:
    """Score the deciding attempt again, each span under the weights that sampled it. Raises InputError."""
    torch.set_num_threads(1)
    rollout = await _deciding(run.bus, rollout_id)
    assert rollout.trajectory is not None
    scores, at, weights = list[SpanScore](), None, dict[str, Tensor]()
    for span in rollout.trajectory.spans:
        if span.version not in run.history.manifests:
            raise InputError(f"{rollout_id} names version {span.version}, which the ledger does not bind")
        if span.version != at:
            at, weights = span.version, await run.weights(span.version)
        scores.append(rescore(weights, run.model, run.config, rollout.trajectory, span))
    return rollout, scores


async def _deciding(bus: Bus, rollout_id: str) -> Rollout:
    async for stored in read_all(bus, "ROLLOUTS"):
        if stored.headers.get(H_ROLLOUT) != rollout_id:
            continue
        try:
            rollout = await bus.open(Rollout, stored)
        except WireError as error:
            raise InputError(f"{rollout_id}, ROLLOUTS {stored.seq}, cannot be read", why=error.what) from None
        if rollout.trajectory is not None and rollout.trajectory.spans:
            return rollout
    raise InputError(f"run {bus.run} has no graded attempt at {rollout_id}", hint="headway inspect rollout ID RUN")
