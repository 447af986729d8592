"""`headway inspect rollout ID RUN --tokens`: a rollout's sampled tokens beside the trainer's forward, worst first.

A trained rollout is computed under the weights that the step began with, in the run's numerics, routes replayed as
the step did; one that was not trained under the newest version that wrote part of it; `--under` names another, such as
the one that sampled a token. The store must still hold that version.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader
from headway.bus.reader import read_all
from headway.deploy import export
from headway.deploy.progress import escape
from headway.deploy.run_folder import RunFolder
from headway.schemas.config import Config
from headway.schemas.errors import InputError, WireError
from headway.schemas.ledger import Step
from headway.schemas.messages import H_ROLLOUT, Rollout
from headway.schemas.trajectory import span_cover
from headway.schemas.version import Version
from headway.schemas.vocab import decode

if TYPE_CHECKING:
    from headway.trainer.batching import MicroBatch

SHOWN_MAX = 40


async def lines(
    bus: Bus, folder: RunFolder, config: Config, rollout_id: str, under: Version | None = None
) -> list[str]:
    """A line about the whole rollout, a heading, then the SHOWN_MAX worst tokens. Raises InputError."""
    if config.model.rollout_dtype in ("fp8", "int4"):
        raise InputError("--tokens computes 16-bit versions only", why=f"this run serves {config.model.rollout_dtype}")
    found, version = await _judged(bus, rollout_id)
    trajectory = found.trajectory
    if trajectory is None or not trajectory.spans:
        raise InputError(f"{rollout_id} has no sampled tokens", why=f"it ended as {found.outcome}: {found.reason}")
    version = under or version or max(span.version for span in trajectory.spans)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "model")
        await export.export(bus, await export.committed(bus), version, export.config_json(folder, config), out)
        try:
            return list(_lines(found, version, out, config))
        except ValueError as error:  # what was dropped need not fit the model
            raise InputError(f"{rollout_id} cannot be computed under {version}", why=str(error)[:300]) from None


async def _judged(bus: Bus, rollout_id: str) -> tuple[Rollout, Version | None]:
    """The attempt that decided, and the version that trained on it, None when none did."""
    trained: Version | None = None
    seq: int | None = None
    async for link in LedgerReader(bus).links():
        if isinstance(body := link.record.body, Step):
            for one in body.consumed:
                if one.rollout_id == rollout_id:
                    trained, seq = body.parent, one.seq
    async for stored in read_all(bus, "ROLLOUTS"):
        if stored.headers.get(H_ROLLOUT) == rollout_id and seq in (None, stored.seq):
            try:
                found = await bus.open(Rollout, stored)
            except WireError as error:
                raise InputError(f"{rollout_id} cannot be read", why=error.what) from None
            if found.terminal:
                return found, trained
    raise InputError(f"run {bus.run} has no ended rollout {rollout_id!r}", hint="ids look like g0000012s003")


def _lines(found: Rollout, version: Version, model_folder: Path, config: Config) -> Iterator[str]:
    import numpy as np  # these cost seconds: only for who asks for tokens
    import torch

    from headway.kernels import hf
    from headway.trainer.agreement import mismatch
    from headway.trainer.batching import Sample, micro_batches
    from headway.trainer.learner import Learner

    assert found.trajectory is not None
    trajectory, max_lag = found.trajectory, config.staleness.max_lag
    model, weights = hf.load(model_folder)
    dtype = getattr(torch, config.model.compute_dtype)
    learner = Learner(weights, model, config.grpo, numerics=config.engine.numerics, compute_dtype=dtype,
                      max_lag=max_lag, seed=config.run.seed, rollout_dtype=config.model.rollout_dtype)  # fmt: skip

    def lags(spans: list[Any]) -> tuple[int, ...]:
        return tuple(max(0, version.n - span.version.n) for span in spans)

    sample = Sample(rollout_id=found.rollout_id, group=0, reward=0.0, trajectory=trajectory,
                    span_lags=lags(trajectory.spans), route_lags=lags(trajectory.route_spans))  # fmt: skip
    micros = micro_batches([sample], np.ones(1, np.float32), 1, max_lag)
    forwards = [learner.recompute(micro) for micro in micros]
    current_N, behaviour_N = torch.cat([f[0] for f in forwards]), torch.cat([m.behaviour_N for m in micros])
    places = [int(place) for micro in micros for place in micro.place_N]
    targets = [int(target) for micro in micros for target in micro.targets_N]
    totals = mismatch(current_N, behaviour_N)
    yield f"{found.rollout_id} under {version}: " + "  ".join(f"{key} {value:.6g}" for key, value in totals.items())
    yield " token text     version     recorded   recomputed  difference     ratio  routes"
    gap_N = current_N.double() - behaviour_N.double()
    routes = [shown for micro, (_, _, out) in zip(micros, forwards, strict=True) for shown in _routes(micro, out.live)]
    cover = span_cover(trajectory.spans, len(trajectory.token_ids))
    order = sorted(range(len(gap_N)), key=lambda n: (-abs(float(gap_N[n])), -routes[n][0], n))
    for n in order[:SHOWN_MAX]:
        text, place = repr(decode([targets[n]]))[1:-1], places[n]
        sampler, recorded = str(trajectory.spans[cover[place]].version), float(behaviour_N[n])
        yield (
            f"{place:6} {escape(text):8} {sampler:>7} {recorded:12.6f} {float(current_N[n]):12.6f} "
            f"{float(gap_N[n]):11.2e} {float(gap_N[n].clamp(-50, 50).exp()):9.4f}  {routes[n][1]}"
        )
    if len(order) > SHOWN_MAX:
        yield f"… {len(order) - SHOWN_MAX} more, none of them worse"


def _routes(micro: MicroBatch, live_BTLk: Any) -> list[tuple[int, str]]:
    """Of each token: how many layers flipped, and what to print of its routes."""
    live_NLk = live_BTLk.flatten(0, 1)[micro.rows_N]
    if micro.routes_BTLk is None:
        return [(0, "none recorded")] * len(live_NLk)
    shown = []
    for own_Lk, live_Lk in zip(micro.routes_BTLk.flatten(0, 1)[micro.rows_N].tolist(), live_NLk.tolist(), strict=True):
        pairs = list(zip(own_Lk, live_Lk, strict=True))
        missing = sum(min(own) < 0 for own, _ in pairs)
        flips = [
            f"layer {n}: {own} now {live}"
            for n, (own, live) in enumerate(pairs)
            if min(own) >= 0 and set(own) != set(live)
        ]
        order = sum(own != live and set(own) == set(live) for own, live in pairs)
        said = flips[:3] + [f"{len(flips) - 3} more layers"] * (len(flips) > 3)
        said += [f"{order} in another order"] * bool(order) + [f"{missing} not recorded"] * bool(missing)
        shown.append((len(flips), "; ".join(said) or "agree"))
    return shown
