"""A subscriber that reads subjects and headers, and no body, reconstructs what happened."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from headway.schemas.version import Version
from headway.trainer.audit import audit


async def test_headers_alone_reconstruct_every_rollout_version_and_verdict(make_run: Callable[..., Any]) -> None:
    run = make_run(steps=2)
    story: list[tuple[str, dict[str, str]]] = []

    async def listen(message: Any) -> None:
        story.append((message.subject, dict(message.headers or {})))

    await run.bus.client.subscribe("rl.test.>", cb=listen)

    def answer(task: Any, head: Version) -> Any:
        return run.failed(task) if task.group == 1 else run.graded(task, float(task.sample), head)

    async with run.dispatcher(), run.trainer(), run.agent(answer):
        history = await run.wait_for_step(2)
        await asyncio.sleep(0.5)

    by_kind: dict[str, list[tuple[str, dict[str, str]]]] = defaultdict(list)
    for subject, headers in story:
        by_kind[subject.split(".")[2]].append((subject, headers))

    issued = {headers["Headway-Rollout"] for _, headers in by_kind["task"]}
    outcomes = {h["Headway-Rollout"]: (h["Headway-Outcome"], h.get("Headway-Reward")) for _, h in by_kind["rollout"]}
    verdicts = {h["Headway-Rollout"]: (h["Headway-Outcome"], h["Headway-Version"], h["Headway-Lag"])
                for s, h in by_kind["stamp"] if s.endswith(".trainer")}  # fmt: skip
    versions = {h["Headway-Version"]: h["Headway-Root"] for _, h in by_kind["weights"]}
    records = [(h["Headway-Record"], h["Headway-Version"]) for _, h in by_kind["ledger"]]

    report = await audit(run.bus)
    assert len(issued) == report.issued
    assert set(outcomes) == issued == set(verdicts)
    assert {outcome for r, outcome in outcomes.items() if "s000" in r and "g0000001" not in r} == {("ok", "0")}
    assert sum(v[0] == "trained" for v in verdicts.values()) == report.trained
    assert sum(v[0] == "dropped:infra_failed" for v in verdicts.values()) == report.dropped["infra_failed"] == 2
    assert {v for _, v, _ in verdicts.values()} <= {"0.1", "0.2", "0.0"}
    assert all(lag.partition("..")[2] in {"0", "1", "2", "-1"} for _, _, lag in verdicts.values())
    assert versions == {str(version): root for version, root in history.roots.items()}
    assert [r for r in records if r[0] != "drops"] == [
        ("genesis", "0.0"),
        ("open", "0.0"),
        ("step", "0.1"),
        ("step", "0.2"),
    ]
