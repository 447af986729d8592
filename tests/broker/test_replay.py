"""What was recorded, computed once more: exact where nothing changed, and the change named where something did."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.bus.ledger import LedgerReader
from headway.bus.recorded import RecordedBus
from headway.bus.recording import Recording
from headway.deploy.cli.main import main
from headway.trainer import environment, groups, learner, optim, plan

from .recorded import STEPS, Made, tamper


@pytest.fixture
def own(made: Made, tmp_path: Path) -> Path:
    """A copy of the full recording, to be changed."""
    return Path(shutil.copy(made.full, tmp_path / "own.hwr"))


def test_every_step_is_exact_from_checkpoints_and_from_the_base(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(1, STEPS + 1):
        assert main(["replay", "step", str(n), str(made.full)]) == 0
        said = capsys.readouterr().out
        assert f"step 0.{n} is exact, bit for bit" in said
        assert "environment  the recorded one" in said
        assert "0 of" in said
    assert main(["replay", "step", f"0.{STEPS}", str(made.bare)]) == 0
    said = capsys.readouterr().out
    assert f"step 0.{STEPS}: {STEPS} executed, from the state of 0.0" in said
    assert "is exact, bit for bit" in said
    assert f"root         {made.steps[-1].root[:16]}, recorded {made.steps[-1].root[:16]}" in said


def test_the_record_holds_what_a_step_was_a_function_of(made: Made) -> None:
    step = made.steps[2]
    assert sorted(place for part in step.micro_batches for place in part) == list(range(len(step.consumed)))
    assert int.from_bytes(step.rng, "little") == 1_000_003 + 2
    with Recording(made.full) as recording:
        links = asyncio.run(_links(RecordedBus(recording)))
    described = next(link.record.body.environment for link in links if link.record.body.kind == "open")
    assert described == environment.describe()
    assert {"torch", "numpy", "blas", "mkl", "onednn", "cpu_capability", "isa", "threads", "mesh"} <= described.keys()
    assert described["code"] == environment.source_digest()


async def _links(bus: Any) -> list[Any]:
    return [link async for link in LedgerReader(bus).links()]


def test_a_changed_loss_constant_is_named_with_the_first_tensor(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = learner.grpo_loss

    def other(*args: Any) -> Any:
        return loss(*args[:-1], replace(args[-1], entropy_bonus=args[-1].entropy_bonus * 3))

    monkeypatch.setattr(learner, "grpo_loss", other)
    assert main(["replay", "step", "3", str(made.full)]) == 70
    found = capsys.readouterr()
    assert "step 0.3 DIVERGES" in found.out
    assert "step 0.3: metric loss: recorded" in found.err
    assert "tensors that differ is" in found.err
    assert "state: master" in found.err


def test_a_change_below_the_rounding_of_the_weights_is_found_in_the_state(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(optim, "ADAM_EPS", 1.01e-8)
    assert main(["replay", "step", "1", str(made.full)]) == 70
    assert "state: master" in capsys.readouterr().err


def test_another_environment_is_named_and_the_result_called_approximate(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described = environment.describe()
    monkeypatch.setattr(environment, "describe", lambda: {**described, "torch": "9.9"})
    assert main(["replay", "step", "2", str(made.full)]) == 0
    assert "is exact" in capsys.readouterr().out
    monkeypatch.setattr(optim, "ADAM_EPS", 1.01e-8)
    assert main(["replay", "step", "2", str(made.full)]) == 0
    said = capsys.readouterr().out
    assert "approximate: the environment is not the recorded one" in said
    assert f"torch {described['torch']} -> 9.9" in said


def test_a_rollout_that_is_not_in_the_recording_is_named(
    made: Made, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seq = made.steps[3].consumed[1].seq
    tamper(own, "ROLLOUTS", lambda rows: rows.pop(next(i for i, row in enumerate(rows) if row[0] == seq)))
    assert main(["replay", "step", "4", str(own)]) == 70
    assert f"ROLLOUTS sequence {seq}" in capsys.readouterr().err


def test_a_missing_body_is_named(made: Made, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Recording(own) as recording:
        blob = next(key for key in recording.contents.objects if "/blobs/" in key)
    tamper(own, "ROLLOUTS", lambda rows: None, drop_object=blob)
    n = next(step.version.n for step in made.steps for one in step.consumed if one.rollout_id.startswith("g0000001"))
    assert main(["replay", "step", str(n), str(own)]) == 70
    assert f"{blob} of a claim check is gone" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["step"], ["step", "3"], ["nothing", "x", "y"], ["check"], ["rollout", "x"]])
def test_a_misspelt_replay_is_refused_with_its_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *words]) in (64, 65, 69)
    assert "try: " in capsys.readouterr().err


def test_todays_code_decides_as_recorded(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "check", str(made.bare)]) == 0
    assert capsys.readouterr().out.strip().endswith("0 differ")


def test_other_decisions_are_named_with_what_was_recorded(
    made: Made, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as changed:
        kept = groups.Pool.plan
        changed.setattr(groups.Pool, "plan", lambda self, size, stale: kept(self, size - 1, stale))
        assert main(["replay", "check", str(made.bare)]) == 70
        assert "step 0.1 trains at place 2: recorded rollout_id" in capsys.readouterr().err
    with monkeypatch.context() as changed:
        changed.setattr(plan.Plan, "task_of", lambda self, group: self.tasks.train[0])
        assert main(["replay", "check", str(made.bare)]) == 70
        assert "was issued with task_id" in capsys.readouterr().err
    with monkeypatch.context() as changed:
        changed.setattr("headway.trainer.intake._reason", lambda error: "invalid")
        assert main(["replay", "check", str(made.bare)]) == 70
        err = capsys.readouterr().err
        assert "reason bad_verdict, today" in err
        assert "reason invalid" in err
