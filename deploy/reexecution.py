"""`headway replay step | rollout | check`: what was recorded, computed once more and compared."""

from __future__ import annotations

import json
from collections.abc import Callable

from headway.bus.recorded import RecordedBus
from headway.deploy.progress import escape
from headway.deploy.sources import CONFIG_JSON, HELDOUT, TRAIN, Source
from headway.kernels.config import ModelConfig
from headway.schemas.errors import InputError, PromiseViolated
from headway.trainer import environment
from headway.trainer.bundle import failed_of
from headway.trainer.check import Checked, check
from headway.trainer.plan import TaskSet
from headway.trainer.reexecute import environment_changes, line_of
from headway.trainer.replay import Replayable, StepReplay, replay_failed, replay_rollout, replay_step

SHOWN = 12
Say = Callable[[str], None]


def model_of(source: Source) -> ModelConfig:
    """Raises InputError."""
    try:
        return ModelConfig.from_hf(json.loads(source.files[CONFIG_JSON]))
    except (KeyError, ValueError) as error:
        raise InputError(
            f"the shape of run {source.bus.run}'s model is unknown",
            why=repr(error)[:200],
            hint="record it where it trained",
        ) from None


def tasks_of(source: Source) -> TaskSet:
    """Raises InputError."""
    try:
        return TaskSet.parse(source.files[TRAIN], source.files[HELDOUT])
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"the task set of run {source.bus.run} is not at hand",
            why=repr(error)[:200],
            hint="record it where it trained",
        ) from None


async def step(source: Source, wanted: str, say: Say) -> None:
    """Raises PromiseViolated when the step gives something else on the recorded environment."""
    run = await Replayable.of(source.bus, source.config, model_of(source))
    found = await replay_step(run, run.version(wanted))
    decided = None
    if TRAIN in source.files:
        decided = await check(source.bus, source.config, run.model, tasks_of(source), until=found.version)
    for line in _step_lines(found, decided):
        say(escape(line))
    differ = [f"step {version}: {text}" for version, text in found.differences]
    differ += decided.differences if decided is not None else []
    if differ and not found.approximate:
        raise PromiseViolated(
            f"step {found.version}, executed again, is not what was recorded",
            why="\n".join(differ[:SHOWN]),
            hint="on the recorded environment only the code or the data can differ: compare `code` and `commit` above",
        )


def _step_lines(found: StepReplay, decided: Checked | None) -> list[str]:
    recorded, last = found.recorded, found.last
    assert recorded is not None
    assert last is not None
    was, here = recorded.environment, environment.describe()
    trained = recorded.step
    sources = "the same sources" if was.get("code") == here["code"] else f"other sources: {was.get('commit')}"
    lines = [
        f"step {found.version}: {len(found.executed)} executed, from the state of {found.start}",
        f"environment  {'; '.join(found.environment) or 'the recorded one'}",
        f"code         {sources}",
    ]
    if decided is not None:
        lines.append(f"decisions    {len(decided.differences)} of {decided.messages} messages and "
                     f"{decided.records} records differ")  # fmt: skip
    version = trained.version
    lines += [
        f"batch        {len(trained.consumed)} rollouts, {len(trained.drops)} drops",
        f"loss         {last.result.metrics['loss']!r}, recorded {trained.metrics.get('loss')!r}",
        f"root         {last.root[:16]}, recorded {trained.root[:16]}",
    ]
    if not found.differences:
        return [*lines, f"result       step {version} is exact, bit for bit: metrics, weights, optimizer state"]
    texts = [f"             {text}" for _, text in found.differences]
    verdict = "approximate: the environment is not the recorded one" if found.approximate else "DIVERGES"
    return [*lines, f"result       step {version} {verdict}", *texts]


async def rollout(source: Source, rollout_id: str, say: Say) -> None:
    """Raises PromiseViolated when a span differs though it may not."""
    run = await Replayable.of(source.bus, source.config, model_of(source))
    found, scores = await replay_rollout(run, rollout_id)
    say(escape(f"rollout {found.rollout_id}, attempt {found.attempt} by {found.region}/{found.agent}"))
    for score in scores:
        span, detail = score.span, ""
        if score.first_unequal >= 0:
            detail = (
                f"; first at token {score.first_unequal}: recorded {score.recorded!r}, now {score.recomputed!r}, "
                f"largest difference {score.diff_max:.3g}"
            )
        routes = f", {score.routes_differ} rows routed otherwise" if score.routes_differ else ""
        say(
            f"  tokens {span.start} to {span.end} by version {span.version}: {score.equal_tokens} of {score.tokens} "
            f"equal bit for bit{routes}{detail}"
        )
    config = source.config
    changed = _changed(run)
    exact = config.engine.numerics == "bitwise" and config.staleness.swap_mode != "in_place"
    if all(score.exact for score in scores):
        say("P7 holds: every recorded log-probability is that of the weights that sampled it")
    elif not exact or changed:
        say(f"approximate: {'; '.join(changed) or 'the run does not promise equal bits (numerics, swap_mode)'}")
    else:
        raise PromiseViolated(f"P7: rollout {rollout_id} was not sampled by the weights that it names")


async def bundle(source: Source, say: Say) -> None:
    """Raises PromiseViolated when the step that failed does not fail here."""
    assert isinstance(source.bus, RecordedBus)
    run = await Replayable.of(source.bus, source.config, model_of(source))
    version, seqs, state, error, described = failed_of(source.bus.recording.about)
    changed = environment_changes(described)
    say(escape(f"step {version} on {len(seqs)} rollouts failed with {error}"))
    say(escape(f"environment  {'; '.join(changed) or 'the recorded one'}"))
    found = await replay_failed(run, seqs, state)
    if found is None:
        raise PromiseViolated(
            f"step {version} does not fail here", why="; ".join(changed) or "today's code is not that which failed"
        )
    same = f"{type(found).__name__}: {found}"[: len(error)] == error
    say(escape(f"reproduced   {'the same error' if same else repr(found)}"))


def _changed(run: Replayable) -> list[str]:
    line = line_of(run.links)
    return list(environment_changes(line[-1].environment)) if line else []


async def decisions(source: Source, say: Say) -> None:
    """Raises PromiseViolated when today's code decides otherwise."""
    found = await check(source.bus, source.config, model_of(source), tasks_of(source))
    taken = f", {found.taken_from_record} taken from the record" if found.taken_from_record else ""
    say(
        f"{found.tasks} tasks, {found.messages} attempts and {found.records} ledger records decided again{taken}: "
        f"{len(found.differences)} differ"
    )
    if found.differences:
        raise PromiseViolated(
            f"today's code decides otherwise in {len(found.differences)} places",
            why=escape("\n".join(found.differences[:SHOWN])),
        )
