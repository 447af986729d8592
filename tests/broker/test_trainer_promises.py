"""Trainer, dispatcher and audit on a real bus with scripted agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.bus.ledger import LedgerWriter
from headway.bus.reader import read_all
from headway.schemas.errors import ConfigError, FencedOut, HeadwayError
from headway.schemas.ids import train_rollout_id
from headway.schemas.ledger import Open
from headway.schemas.messages import Dead, Task, TrainerStamp
from headway.schemas.trajectory import Span
from headway.schemas.version import Version
from headway.schemas.wire import Envelope
from headway.trainer.audit import audit
from headway.trainer.learner import Learner

Make = Callable[..., Any]


def reward_of(task: Task) -> float:
    return float(task.sampling_seed % 2)


async def finish(run: Any, answer: Any, steps: int, timeout_s: float = 60) -> Any:
    async with run.dispatcher(), run.trainer(), run.agent(answer):
        return await run.wait_for_step(steps, timeout_s)


async def test_every_committed_step_makes_one_version_and_every_rollout_one_end(make_run: Make) -> None:
    run = make_run(steps=3)
    history = await finish(run, lambda task, head: run.graded(task, reward_of(task), head), 3)
    assert sorted(history.manifests) == [Version(0, n) for n in range(4)]
    report = await audit(run.bus)
    assert report.violations == []
    assert (report.issued, report.trained, report.pending) == (12, 12, 0)
    stamps = [await run.bus.open(TrainerStamp, s) async for s in read_all(run.bus, "STAMPS")]
    assert {s.rollout_id for s in stamps} == {train_rollout_id(g, s) for g in range(6) for s in range(2)}
    assert {s.outcome for s in stamps} == {"trained"}


async def test_twenty_steps_without_any_variance_go_on(make_run: Make) -> None:
    run = make_run(steps=20)
    history = await finish(run, lambda task, head: run.graded(task, 0.0, head), 20)
    assert history.counters.zero_variance_groups == 40
    assert (await audit(run.bus)).violations == []


async def test_groups_that_fail_forever_are_declared_and_pacing_goes_on(make_run: Make) -> None:
    """Forty groups (twenty batches) of failed infrastructure, then good ones: training arrives."""
    run = make_run(steps=2)

    def answer(task: Task, head: Version) -> Any:
        return run.failed(task) if task.group < 40 else run.graded(task, reward_of(task), head)

    history = await finish(run, answer, 2)
    assert history.counters.void_groups == 40
    report = await audit(run.bus)
    assert report.violations == []
    assert report.dropped == {"infra_failed": 80}


async def test_lockstep_with_one_failing_group_at_a_time_does_not_starve(make_run: Make) -> None:
    run = make_run(steps=3, extra="[staleness]\nmax_lag = 0\nswap_slack = 0\n")

    def answer(task: Task, head: Version) -> Any:
        return run.failed(task) if task.group % 3 == 0 else run.graded(task, reward_of(task), head)

    history = await finish(run, answer, 3)
    assert history.counters.trained_groups == 6
    assert (await audit(run.bus)).violations == []


async def test_a_trainer_cut_off_anywhere_resumes_with_the_same_weights_losses_and_order(
    make_run: Make, bus: Any, tmp_path: Any
) -> None:
    """The stream is recorded first; then trainers that are cancelled at random points must agree on every step."""
    run = make_run(steps=40, extra="[staleness]\nmax_lag = 80\nswap_slack = 0\n")
    async with run.dispatcher(), run.agent(lambda task, head: run.graded(task, reward_of(task), Version(0, 0))):
        async with run.trainer():
            await run.wait_for_step(40)
    undisturbed = [link async for link in links(run)]
    await bus.js.purge_stream(bus.subjects.stream("LEDGER"))
    await bus.js.delete_stream(bus.subjects.stream("LEDGER"))
    from headway.bus.topology import Topology

    await Topology(run="test").apply(bus.js)
    for wait_s in (0.05, 0.1, 0.15, 0.2, 0.1, 0.15, 0.3):
        async with run.trainer():
            await asyncio.sleep(wait_s)
    async with run.trainer():
        await run.wait_for_step(40)
    again = [link async for link in links(run)]
    assert [essence(step) for step in again] == [essence(step) for step in undisturbed]
    assert (await run.history()).term > 2
    assert (await audit(run.bus)).violations == []


async def links(run: Any) -> Any:
    from headway.bus.ledger import LedgerReader

    async for link in LedgerReader(run.bus).links():
        if link.record.body.kind == "step":
            yield link.record.body


def essence(step: Any) -> Any:
    ids = [(c.rollout_id, c.seq, c.reward) for c in step.consumed]
    return str(step.version), step.root, step.checkpoint, ids, step.drops, step.metrics


async def test_the_next_step_is_computed_while_one_is_made_durable_and_a_crash_discards_both(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without computing ahead the first checkpoint would wait for a second step for ever."""
    run, steps, loop = make_run(steps=3), [], asyncio.get_running_loop()
    second, release, real_step, real_put = asyncio.Event(), asyncio.Event(), Learner.step, ObstoreBlobs.put

    def step(learner: Learner, batch: Any) -> Any:
        steps.append(learner.steps_done)
        if learner.steps_done == 1:
            loop.call_soon_threadsafe(second.set)
        return real_step(learner, batch)

    async def put(store: ObstoreBlobs, key: str, data: bytes) -> None:
        if "/ckpt/" in key:
            await release.wait()
        await real_put(store, key, data)

    monkeypatch.setattr(Learner, "step", step)
    monkeypatch.setattr(ObstoreBlobs, "put", put)
    answer = lambda task, head: run.graded(task, reward_of(task), head)  # noqa: E731
    async with run.dispatcher(), run.agent(answer):
        async with run.trainer():
            await asyncio.wait_for(second.wait(), 30)
            await asyncio.sleep(1.0)
            assert steps == [0, 1], "more than one step was computed ahead"
        assert (await run.history()).head.n == 0
        release.set()
        async with run.trainer():
            history = await run.wait_for_step(3)
    assert steps == [0, 1, 0, 1, 2]
    assert sorted(history.manifests) == [Version(0, n) for n in range(4)]
    report = await audit(run.bus)
    assert (report.violations, report.trained, report.pending) == ([], 12, 0)


async def test_an_older_trainer_is_fenced_out_by_a_newer_one(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the older one commits between the newer one's look at the ledger and its first append."""
    run = make_run(steps=50)
    append, overtaken = LedgerWriter.append, list[int]()

    async def append_late(writer: LedgerWriter, body: Any, version: Version, *, term: int | None = None) -> Any:
        if isinstance(body, Open) and term == 2 and len(overtaken) < 3:
            overtaken.append(version.n)
            await run.wait_for_step(version.n + 1)
        return await append(writer, body, version, term=term)

    monkeypatch.setattr(LedgerWriter, "append", append_late)
    ahead = 0
    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.dispatcher(), run.agent(lambda task, head: run.graded(task, reward_of(task), head)):
            async with run.trainer():
                await run.wait_for_step(1)
                async with run.trainer(), asyncio.timeout(60):
                    while (history := await run.history()).term < 2:
                        await asyncio.sleep(0.1)
                    ahead = (await run.wait_for_step(history.head.n + 2)).head.n - history.head.n
                    await asyncio.sleep(0.5)
    assert caught.group_contains(FencedOut)
    assert len(overtaken) == 3
    assert ahead >= 2


async def test_of_two_dispatchers_one_is_refused(make_run: Make) -> None:
    run = make_run(steps=50)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.trainer(), run.dispatcher():
            async with run.dispatcher(), run.agent(lambda task, head: run.graded(task, reward_of(task), head)):
                await run.wait_for_step(6)
    assert caught.group_contains(FencedOut)


async def test_rollouts_that_arrive_before_a_commit_is_acknowledged_are_not_lost(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other services act on a stored record while its writer still waits for the acknowledgement."""
    run = make_run(steps=4)
    append = LedgerWriter.append

    async def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        link = await append(self, *args, **kwargs)
        await asyncio.sleep(0.7)
        return link

    monkeypatch.setattr(LedgerWriter, "append", slow)
    await finish(run, lambda task, head: run.graded(task, reward_of(task), head), 4)
    report = await audit(run.bus)
    assert report.violations == []
    assert (report.trained, report.dropped) == (16, {})


@pytest.mark.parametrize(
    "lie",
    [
        {"rollout_id": "g0000000s099", "sample": 99},
        {"rollout_id": "g0009999s000", "group": 9999},
        {"rollout_id": "g0000000s000", "sample": 1},
    ],
)
async def test_a_rollout_that_was_never_issued_is_buried_and_the_trainer_lives(make_run: Make, lie: Any) -> None:
    run = make_run(steps=2)
    async with run.dispatcher(), run.trainer():
        await run.bus.publish(
            run.bus.subjects.rollout("east", "scripted"), run.failed(run_task(run, 0, 0)).model_copy(update=lie)
        )
        async with run.agent(lambda task, head: run.graded(task, reward_of(task), head)):
            await run.wait_for_step(2)
    assert [s.subject async for s in read_all(run.bus, "EVENTS", filter_subject="rl.test.dead.>")] == [
        "rl.test.dead.invalid"
    ]


@pytest.mark.parametrize("lie", ["task", "temperature"])
async def test_a_rollout_of_another_task_or_temperature_than_issued_is_dropped(make_run: Make, lie: str) -> None:
    run = make_run(steps=2)

    def answer(task: Task, head: Version) -> Any:
        if task.group or task.sample:
            return run.graded(task, reward_of(task), head)
        if lie == "task":
            return run.graded(task.model_copy(update={"task_id": "heldout1"}), 1.0, head)
        rollout = run.graded(task, 1.0, head)
        cold = rollout.trajectory.model_copy(update={"temperature": 1e-40})
        return rollout.model_copy(update={"trajectory": cold})

    await finish(run, answer, 2)
    assert (await audit(run.bus)).dropped == {"invalid": 1, "group_incomplete": 1}


async def test_routes_that_no_router_could_choose_are_dropped_under_a_reason_of_their_own(make_run: Make) -> None:
    run = make_run(steps=2)
    good = np.tile(np.array([[0, 1], [2, 3]], np.uint8), (5, 1, 1))
    lies: list[dict[str, Any]] = [
        {"layer_map": [1, 2]},
        {"routes": np.where(good == 3, 2, good).astype(np.uint8)},
        {"routes": np.where(good == 3, 4, good).astype(np.uint8)},
        {"routes": np.zeros_like(good)},
        {"routes": good[:, :, :1]},
        {"routes": good[:4]},
        {"route_spans": [Span(start=0, end=4, version=Version(0, 0))]},
        {},  # negative control: these routes are right
    ]

    def answer(task: Task, head: Version) -> Any:
        rollout = run.graded(task, reward_of(task), head)
        assert rollout.trajectory is not None
        routed = {"routes": good, "route_spans": [Span(start=0, end=5, version=head)]}
        lie = lies[task.group] if task.group < len(lies) and task.sample == 0 else {}
        return rollout.model_copy(update={"trajectory": rollout.trajectory.model_copy(update=routed | lie)})

    await finish(run, answer, 2)
    report = await audit(run.bus)
    assert report.violations == []
    assert report.dropped == {"bad_routes": 7, "group_incomplete": 7}
    subjects = [s.subject async for s in read_all(run.bus, "EVENTS", filter_subject="rl.test.dead.>")]
    assert subjects == ["rl.test.dead.bad_routes"] * 7


async def test_a_claim_check_that_names_another_object_is_buried(make_run: Make) -> None:
    run = make_run(steps=2)
    async with run.dispatcher(), run.trainer():
        envelope = Envelope.seal(run.failed(run_task(run, 0, 0)))
        for claim in (
            {"key": "test/blobs/../x", "sha256": "../x", "size_bytes": 5},
            {"key": "test/ckpt/" + "0" * 64, "sha256": "0" * 64, "size_bytes": 5},
            {"key": "test/blobs/" + "0" * 64, "sha256": "0" * 64, "size_bytes": -1},
        ):
            await run.bus.js.publish(
                run.bus.subjects.rollout("east", "scripted"),
                msgpack.packb(claim),
                headers={
                    **envelope.headers,
                    "Headway-Claim": "1",
                    "Nats-Msg-Id": claim["key"] + str(claim["size_bytes"]),
                },
            )
        async with run.agent(lambda task, head: run.graded(task, reward_of(task), head)):
            await run.wait_for_step(2)
    subjects = [s.subject async for s in read_all(run.bus, "EVENTS", filter_subject="rl.test.dead.>")]
    assert sorted(subjects) == ["rl.test.dead.bad_claim", "rl.test.dead.invalid", "rl.test.dead.invalid"]


async def test_a_forged_verdict_is_dropped_with_its_reason_and_the_group_closes(make_run: Make) -> None:
    run = make_run(steps=2)

    def answer(task: Task, head: Version) -> Any:
        rollout = run.graded(task, 0.0, head)
        return rollout.model_copy(update={"reward": 1.0}) if task.group == 0 and task.sample == 0 else rollout

    await finish(run, answer, 2)
    report = await audit(run.bus)
    assert report.violations == []
    assert report.dropped == {"bad_verdict": 1, "group_incomplete": 1}
    dead = [await run.bus.open(Dead, s) async for s in read_all(run.bus, "EVENTS", filter_subject="rl.test.dead.>")]
    assert [(d.reason, d.subject) for d in dead] == [("bad_signature", "rl.test.rollout.east.scripted")]


async def test_bytes_that_cannot_be_decoded_end_their_rollout_and_nothing_else(make_run: Make) -> None:
    run = make_run(steps=2)
    async with run.dispatcher(), run.trainer():
        envelope = Envelope.seal(run.failed(run_task(run, 0, 0)))
        await run.bus.js.publish(run.bus.subjects.rollout("east", "scripted"), b"\xc1", headers=envelope.headers)
        async with run.agent(lambda task, head: run.graded(task, reward_of(task), head)):
            await run.wait_for_step(2)
    report = await audit(run.bus)
    assert report.violations == []
    assert report.dropped == {"invalid": 1, "group_incomplete": 1}
    assert report.duplicates == 1


def run_task(run: Any, group: int, sample: int) -> Task:
    from headway.trainer.plan import Plan, TaskSet

    return Plan(config=run.config, tasks=TaskSet.load(run.folder / "tasks")).group(group, 0)[sample]


async def test_a_service_with_another_configuration_refuses_to_start(make_run: Make) -> None:
    run = make_run(steps=1)
    await finish(run, lambda task, head: run.graded(task, reward_of(task), head), 1)
    other = make_run(steps=1, extra="[dispatch2]\n".replace("dispatch2", "tasks") + "seed = 9\n")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with other.trainer():
            await asyncio.sleep(3)
    assert caught.group_contains(ConfigError, match=r"tasks\.seed = 9 here, 0 in the genesis")


async def test_a_trainer_with_another_chat_template_refuses_to_go_on(make_run: Make, tmp_path: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    run = make_run(steps=1, extra=f'[agent]\ntokenizer = "{folder}"\n')
    await finish(run, lambda task, head: run.graded(task, reward_of(task), head), 1)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(BaseExceptionGroup) as caught:
        async with run.trainer():
            await asyncio.sleep(3)
    assert caught.group_contains(ConfigError, match=r"not the one that the run began with")


async def test_a_rollout_whose_every_token_is_stale_is_dropped(make_run: Make) -> None:
    run = make_run(steps=5, extra="[staleness]\nmax_lag = 1\nswap_slack = 0\n")

    def answer(task: Task, head: Version) -> Any:
        return run.graded(task, reward_of(task), Version(0, 0) if task.group < 8 else head)

    history = await finish(run, answer, 5)
    assert history.counters.dropped_rollouts > 0
    report = await audit(run.bus)
    assert report.violations == []
    assert {"stale"} <= set(report.dropped) <= {"stale", "group_incomplete"}


@pytest.mark.parametrize("policy", ["mask", "drop"])
async def test_staleness_is_judged_token_by_token(make_run: Make, policy: str) -> None:
    """Rollouts of which the first two tokens are too old: masked and counted, or the whole rollout dropped."""
    run = make_run(steps=4, extra=f'[staleness]\nmax_lag = 1\nswap_slack = 0\nstale_policy = "{policy}"\n')

    def answer(task: Task, head: Version) -> Any:
        rollout = run.graded(task, reward_of(task), head)
        if head.n < 2 or task.group % 2:
            return rollout
        old = [Span(start=2, end=4, version=Version(0, 0)), Span(start=4, end=6, version=head)]
        spanning = rollout.trajectory.model_copy(update={"spans": old})
        return rollout.model_copy(update={"trajectory": spanning})

    history = await finish(run, answer, 4)
    report = await audit(run.bus)
    assert report.violations == []
    if policy == "mask":
        assert report.dropped == {}
        assert history.counters.masked_tokens > 0
        assert history.counters.masked_tokens + history.counters.trained_tokens == 16 * 4
    else:
        assert history.counters.masked_tokens == 0
        assert {"stale"} <= set(report.dropped) <= {"stale", "group_incomplete"}


def test_errors_carry_exit_codes() -> None:
    assert {cls.exit_code for cls in HeadwayError.__subclasses__()} == {64, 65, 69, 70, 75}
