"""The expr task set, its protocol and its demonstrations, without any box."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from headway.sandbox.tasks import expr
from headway.sandbox.tasks.build import build
from headway.sandbox.tasks.demonstrator import demonstrate
from headway.schemas import expr_protocol as p
from headway.schemas.errors import InputError


def test_programs_are_many_and_distinct_by_behaviour() -> None:
    behaviours = {tuple(program.values(p.HIDDEN_INPUTS)) for program in expr.programs()}
    assert len(behaviours) == len(expr.programs()) == 684


def test_forms_mean_what_their_text_says() -> None:
    for program in expr.programs()[::7]:
        for expression in (program, program.mistaken()):
            function = eval(f"lambda x: {expression.text}")  # our own templates
            assert [function(x) for x in p.HIDDEN_INPUTS] == expression.values(p.HIDDEN_INPUTS)


@pytest.mark.parametrize("seed", [0, 1])
def test_splits_share_no_behaviour(seed: int) -> None:
    train, heldout = ({tuple(g.values(p.HIDDEN_INPUTS)) for g in part} for part in expr.split(seed))
    assert (len(train), len(heldout)) == (548, 136)
    assert not train & heldout


def test_every_task_is_broken_and_hides_what_only_a_test_reveals() -> None:
    hidden = 0
    for gold, task in expr.tasks(0):
        function = eval("lambda x: " + task.text.rsplit("return ", 1)[1])
        assert [function(x) for x in task.inputs] != task.expected
        assert task.expected == gold.values(p.HIDDEN_INPUTS)
        if task.hides:
            hidden += 1
            constant = gold.a if task.hides == "A" else gold.b
            assert "?" in task.text
            assert str(constant) in str(abs(task.visible[0][1])), "f(0) reveals it"
    assert 0.25 < hidden / 2328 < 0.4


def test_build_is_deterministic_and_its_digest_names_it(tmp_path: Path) -> None:
    first, second = (build(3, tmp_path / name, sessions=200) for name in "ab")
    assert first == second
    for name in ("train.jsonl", "heldout.jsonl", "sessions.jsonl", "summary.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert expr.load_task_set(tmp_path / "a").digest == first["task_set"]
    (tmp_path / "a" / "train.jsonl").write_bytes(b'{"id": 1}\n')
    with pytest.raises(InputError, match="no readable task set"):
        expr.load_task_set(tmp_path / "a")


def test_demonstrations_stay_within_the_protocol_and_are_mostly_wrong(tmp_path: Path) -> None:
    summary = build(0, tmp_path, sessions=2000)
    assert 0.22 < summary["sessions_right_fraction"] < 0.33
    heldout = {task["gold"] for task in map(json.loads, (tmp_path / "heldout.jsonl").read_text().splitlines())}
    assert not heldout & {json.loads(line)["gold"] for line in (tmp_path / "train.jsonl").read_text().splitlines()}
    for line in (tmp_path / "sessions.jsonl").read_text().splitlines():
        segments = json.loads(line)["segments"]
        actions = [p.parse_action(text.encode()) for text, trained in segments if trained]
        assert all(actions)
        assert len(actions) <= p.ACTIONS_MAX
        assert actions[-1] == p.Action("s")
        assert sum(len(text) for text, _ in segments) <= 190
        assert all(len(text) <= p.OBSERVATION_BYTES_MAX for text, trained in segments if not trained)


def test_the_demonstrator_tests_a_quarter_of_the_time() -> None:
    pairs = list(expr.tasks(0))
    sessions = [demonstrate(*pairs[n % len(pairs)], Random(n)) for n in range(2000)]
    tested = sum(any(text == "t\n" for text, _ in session.segments) for session in sessions)
    assert 0.2 < tested / 2000 < 0.3


@pytest.mark.parametrize(
    "line", [b"x\n", b"r", b"w \n", b"w\n", b"r \n", b"w x\ty\n", b"w \xff\n", b"w " + b"1" * 18 + b"\n"]
)
def test_malformed_lines_are_no_action(line: bytes) -> None:
    assert p.parse_action(line) is None


def test_actions_parse() -> None:
    assert p.parse_action(b"w x*5 - 4\n") == p.Action("w", "x*5 - 4")
    assert [p.parse_action(line) for line in (b"r\n", b"t\n", b"s\n")] == [p.Action(t) for t in ("r", "t", "s")]  # type: ignore[arg-type]


def test_observations_render_bounded_and_printable() -> None:
    assert p.render_test([(0, "7", 7), (1, "8", 4)]) == "f(1)=8 want 4"
    assert p.render_test([(0, None, 7)]) == "f(0) error"
    assert p.render_test([(0, "7", 7)]) == "pass"
    assert len(p.observation(p.render_file(b"\x1b[2J\xff" * 500))) <= p.OBSERVATION_BYTES_MAX
    assert set(p.render_file(bytes(range(256)))) <= set(map(chr, range(32, 127))) | {"\n"}


def test_not_submitting_is_worth_less_than_a_wrong_answer() -> None:
    assert p.reward(right=True, submitted=True, malformed=False) == 1.0
    assert p.reward(right=False, submitted=True, malformed=False) == 0.0
    assert p.reward(right=True, submitted=False, malformed=False) == -0.25
    assert p.reward(right=True, submitted=True, malformed=True) == -0.25
