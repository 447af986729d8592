"""P6 at every fail point: real processes kill themselves there, and a lockstep run ends as the undisturbed one.

CI kills the trainer at the ten points of a commit, at their first and at their last pass; `make crash-matrix`
takes every point of every service at the first, a middle and the last, and stamps docs/RELIABILITY.md.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

STEPS = 3
ONE_REGION = "\n[regions.east]\n"
PARTS = ("put.ckpt", "put.shard", "put.manifest", "publish.ledger", "publish.weights")
COMMIT_PATH = [f"{part}.{side}" for part in PARTS for side in ("before", "after")]
INSTANCES = ("trainer", "east-agent-0", "dispatcher")
UNTIMED = re.compile(r"lease\.renew|lease\.nak|publish\.(event|dead)")
"""How often these are passed depends on time; they are killed at the first pass alone."""
RELIABILITY = Path(__file__).parents[2] / "docs" / "RELIABILITY.md"


@pytest.fixture(scope="module")
def undisturbed(launch: Any, lockstep: dict[str, Any]) -> Any:
    run = launch(STEPS, lockstep, points="*:0:trace", regions=ONE_REGION)
    ended = run.end()
    ended.assert_promises(STEPS)
    assert len({step.root for step in ended.steps}) == STEPS, "the weights stood still: nothing would be compared"
    return run, ended


def killed_at(
    launch: Any, lockstep: dict[str, Any], undisturbed: Any, points: list[str], last_served: bool = True
) -> None:
    run = launch(STEPS, lockstep, points=",".join(points), regions=ONE_REGION)
    ended = run.end()
    assert run.struck() == set(points), f"of {points} only {run.struck()} struck\n{ended.output}"
    ended.assert_promises(STEPS, last_served=last_served)
    assert ended.trace() == undisturbed[1].trace()


def first() -> list[list[str]]:
    """The genesis and the first commit: each life dies at the next point."""
    return [[f"trainer@{point}:1:kill" for point in COMMIT_PATH[start::2]] for start in (0, 1)]


def last(passed: dict[str, int]) -> list[list[str]]:
    """The last commit. Each life before adds a term and an announcement to what the undisturbed run passes.

    The run may end once the last record is stored, so a death after that is the only further one of its run.
    """
    due = [f"trainer@{point}:{passed[point]}:kill" for point in COMMIT_PATH]
    before_ledger = f"trainer@publish.ledger.before:{passed['publish.ledger.before'] + 1}:kill"
    before_weights = f"trainer@publish.weights.before:{passed['publish.weights.before'] + 2}:kill"
    return [due[:5], [due[5], before_ledger, before_weights], due[7:8], due[9:]]


@pytest.mark.parametrize("which", range(2))
def test_a_trainer_killed_at_any_point_of_its_first_commit_changes_nothing(
    launch: Any, lockstep: dict[str, Any], undisturbed: Any, which: int
) -> None:
    killed_at(launch, lockstep, undisturbed, first()[which])


@pytest.mark.parametrize("which", range(4))
def test_a_trainer_killed_at_any_point_of_its_last_commit_changes_nothing(
    launch: Any, lockstep: dict[str, Any], undisturbed: Any, which: int
) -> None:
    killed_at(launch, lockstep, undisturbed, last(undisturbed[0].passed("trainer"))[which])


@pytest.mark.parametrize("which", range(2))
def test_a_trainer_killed_between_two_checkpoints_changes_nothing(
    launch: Any, lockstep: dict[str, Any], undisturbed: Any, which: int
) -> None:
    """Only the last step has a checkpoint: each life executes again what was committed, and dies at the next point."""
    passed = undisturbed[0].passed("trainer")
    points = [point for point in COMMIT_PATH if not point.startswith("put.ckpt")]
    due = [f"trainer@{point}:{(passed[point] + 1) // 2}:kill" for point in points]
    killed_at(launch, lockstep | {"grpo.checkpoint_every": STEPS}, undisturbed, due[which::2])


def whole(run: Any) -> Iterator[tuple[str, ...]]:
    """For each instance every point at its first, a middle and its last pass; one kill an instance and run."""
    columns = []
    for instance in INSTANCES:
        column = []
        for point, passes in sorted(run.passed(instance).items()):
            hits = {1} if UNTIMED.match(point) else {1, (passes + 1) // 2, passes}
            column += [f"{instance}@{point}:{hit}:kill" for hit in sorted(hits)]
        columns.append(column)
    for row in range(max(map(len, columns))):
        yield tuple(column[row] for column in columns if row < len(column))


@pytest.mark.timeout(4 * 3600)
def test_the_whole_matrix(
    request: pytest.FixtureRequest, launch: Any, lockstep: dict[str, Any], undisturbed: Any
) -> None:
    if not request.config.getoption("--crash-matrix"):
        pytest.skip("`make crash-matrix` kills at every point, for about half an hour")
    began_s, lines, failed = time.monotonic(), [], 0
    try:
        for points in whole(undisturbed[0]):
            result = _result(
                lambda points=points: killed_at(launch, lockstep, undisturbed, list(points), last_served=False)
            )
            failed += result != "equal"
            lines += [f"| `{point.removesuffix(':kill')}` | {result} |" for point in points]
    finally:
        _stamp(lines, time.monotonic() - began_s)
    assert not failed


def _result(act: Callable[[], None]) -> str:
    try:
        act()
    except AssertionError as error:
        return f"**{str(error).splitlines()[0][:120]}**"
    return "equal"


def _stamp(lines: list[str], seconds: float) -> None:
    """Replace the table between the two marks."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    head = [
        f"{len(lines)} kills at commit {commit.strip()}, {time.strftime('%Y-%m-%d')}, {seconds / 60:.0f} minutes.",
        "",
        "| killed at (instance@point:pass) | P6 projection |",
        "|---|---|",
    ]
    text = RELIABILITY.read_text()
    before, _, rest = text.partition("<!-- crash-matrix -->\n")
    _, _, after = rest.partition("<!-- /crash-matrix -->")
    marks = "<!-- crash-matrix -->\n{}\n<!-- /crash-matrix -->"
    RELIABILITY.write_text(before + marks.format("\n".join([*head, *lines])) + after)
