"""Progress lines, the figures of a summary, its table and its plot."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.deploy import plot, summary
from headway.deploy.progress import Progress, escape, midtrain_line, sparkline
from headway.deploy.summary import Reading, Session, figures
from headway.schemas.config import Config
from headway.schemas.ledger import Counters, Step
from headway.schemas.messages import Event, WeightsAnnounced
from headway.schemas.version import Version
from headway.schemas.vocab import BOS, encode

DIGEST = "ab" * 32
ENDS = {"issued": 128, "trained": 120, "dropped": {"stale": 8}, "pending": 0, "lost": 0, "trained_twice": 0}


def step_fields(n: int) -> dict[str, Any]:
    return {
        "step": n,
        "reward_mean": 0.1 * n,
        "lag_mean": 0.5,
        "lag_max": 2.0,
        "trained": 64 * n,
        "dropped": 3,
        "zero_variance_groups": 2.0,
        "tokens": 1000,
        "tokens_per_s": 1940.2,
        "waiting_for": "policy",
        "waited_s": 1.0,
        "computed_s": 2.0,
        "published_s": 1.0,
        "lag_tokens_0": 300,
        "lag_tokens_1": 100,
    }


def event(n: int) -> Event:
    return Event(service="trainer", instance="t", name="step", fields=step_fields(n))


def step(n: int) -> Step:
    metrics = {
        "reward_mean": 0.1 * n,
        "lag0_tokens": 100.0 * n,
        "lag0_equal_fraction": 1.0 if n > 1 else 0.5,
        "lag0_swapped_tokens": 10.0,
        "lag0_diff_max": 0.25 / n,
    }
    return Step(
        version=Version(0, n), parent=Version(0, n - 1), consumed=[], drops=[], cursor=0, pool=[],
        counters=Counters(trained_tokens=90 * n, masked_tokens=10 * n), rng=b"", metrics=metrics,
        checkpoint=DIGEST, manifest=DIGEST, root=DIGEST,
    )  # fmt: skip


def session(version: int, *, right: bool, greedy: bool = False, calls: str = "r w s") -> Session:
    answers = {"t": "f(0)=7 want 4", "T": "pass"}
    made = tuple((call.lower(), answers.get(call, "")) for call in calls.split())
    return Session(version=Version(0, version), greedy=greedy, right=right, submitted="s" in calls, calls=made)


def reading() -> Reading:
    announced = [
        WeightsAnnounced(
            version=Version(0, n), parent=None, manifest=DIGEST, root=DIGEST,
            delta_bytes=100 * n, full_bytes=1000, changed_fraction=0.1 * n,
        )
        for n in range(3)
    ]  # fmt: skip
    return Reading(
        steps=[step(1), step(2)],
        events={1: step_fields(1), 2: step_fields(2)},
        sessions=[
            session(0, right=False),
            session(0, right=True, calls="r w t w s"),
            session(0, right=False, calls="r w t w"),
            session(0, right=True, greedy=True),
            session(2, right=True, calls="r w T s"),
            session(2, right=True, calls="r w t w T s"),
            session(2, right=False, greedy=True),
        ],
        weights={one.version: one for one in announced},
        pauses_ms=[5.0, 7.0, 30.0],
    )


def test_a_step_is_one_line_with_everything_a_person_watches() -> None:
    lines: list[str] = []
    progress = Progress(say=lines.append, steps=70, max_lag=2)
    progress.add(event(1), shown=False)
    progress.resumed()
    progress.add(event(2), shown=True)
    assert lines == [
        "going on after step 1 of 70",
        "step  2/70  reward +0.20 ▁█  lag 0.5 (max 2 of 2)  trained 128  dropped 3  flat groups 2  1,940 tok/s  "
        "trainer idle 25%, bound by policy",
    ]


def test_other_events_show_their_fields_escaped() -> None:
    lines: list[str] = []
    progress = Progress(say=lines.append, steps=1, max_lag=0)
    odd = Event(service="trainer", instance="t", name="eval_done", fields={"x": "a\x1b[2J\u202eb", "rate": 0.51234})
    progress.add(odd, shown=True)
    assert lines == ["eval done x=a\\x1b[2J\\u202eb rate=0.5123"]


def test_escape_leaves_letters_of_all_scripts_and_no_control() -> None:
    assert escape("naïve 数 \x07\n\x9b") == "naïve 数 \\x07\\n\\x9b"


def test_sparkline_spans_its_scale_and_bears_a_flat_one() -> None:
    assert sparkline([0.0, 0.5, 1.0, 9.0], 0.0, 1.0) == "▁▅██"
    assert sparkline([1.0, 1.0], 1.0, 1.0) == "▁▁"


def test_midtrain_shows_some_steps_and_its_end() -> None:
    fields = {"phase": "sft", "step": 20, "loss": 1.2345, "tokens_per_s": 9000.0}
    assert midtrain_line(fields, 360) == "midtrain sft       20/360  loss 1.234  9,000 tok/s"
    assert midtrain_line({**fields, "step": 21}, 360) is None
    assert midtrain_line({"phase": "done", "step": 360, "cached": True}, 360) == (
        "midtrain done after 360 steps (found finished)"
    )


def test_figures_say_what_the_streams_say() -> None:
    found = figures(reading(), Config(), rollouts=ENDS, wall_s=100.04)
    assert found["heldout_before"] == pytest.approx(1 / 3, abs=1e-4)
    assert (found["heldout_after"], found["greedy_before"], found["greedy_after"]) == (1.0, 1.0, 0.0)
    assert (found["valid_submit_before"], found["valid_submit_after"]) == (pytest.approx(2 / 3, abs=1e-4), 1.0)
    assert found["learned"] == {"tested_before_submit": [0.3333, 1.0], "repaired_after_failed_test": [0.5, 1.0]}
    assert found["reward_curve"] == [0.1, 0.2]
    assert found["staleness_hist"] == {"0": 600, "1": 200}
    assert found["masked_share"] == 0.1
    assert found["lag0"] == {
        "tokens": 300, "after_swap_tokens": 20, "max_abs_dlogprob": 0.25, "bitwise_equal_fraction": 0.833333,
    }  # fmt: skip
    assert found["weights"] == {
        "versions": 3, "changed_fraction": 0.15, "delta_bytes": 150.0, "full_bytes": 1000.0, "pause_ms_p50": 7.0,
    }  # fmt: skip
    assert (found["tokens_per_s"], found["trainer_idle_share"]) == (250.0, 0.25)
    assert (found["steps"], found["wall_s"], found["rollouts"]) == (2, 100.0, ENDS)


def test_a_run_of_no_steps_has_a_summary_too(tmp_path: Path) -> None:
    found = figures(Reading(sessions=[session(0, right=True)]), Config(), rollouts=ENDS, wall_s=1.0)
    assert (found["heldout_before"], found["heldout_after"]) == (1.0, None)
    assert json.loads(summary.to_json(found)) == found
    assert "100.0% -> -" in summary.table(found)
    plot.draw(found, [], tmp_path / "run.png")


def test_the_table_names_every_drop_reason() -> None:
    table = summary.table(figures(reading(), Config(), rollouts=ENDS, wall_s=1.0))
    assert "dropped 8 (stale 8)" in table
    assert "33.3% -> 100.0%" in table


def test_calls_are_read_from_the_transcript() -> None:
    text = 'fix f.py\n>r\ndef f(x):\n    """d"""\n    return x\n>w x+1\nok\n>t\nf(0)=1 want 2\n>s\n'
    assert summary.calls_of([BOS, *encode(text)]) == (
        ("r", 'def f(x):\n    """d"""\n    return x'),
        ("w", "ok"),
        ("t", "f(0)=1 want 2"),
        ("s", ""),
    )


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    found = figures(reading(), Config(), rollouts=ENDS, wall_s=1.0)
    plot.draw(found, [step_fields(1), step_fields(2)], tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
