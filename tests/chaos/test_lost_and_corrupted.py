"""An announcement that nobody hears only delays; a flipped bit in the store is never served."""

from __future__ import annotations

from typing import Any

STEPS = 6
AGENTS = ["east-agent-0", "west-agent-0"]


def test_announcements_that_nobody_hears_only_delay(launch: Any) -> None:
    run = launch(STEPS, faults={agent: ["deaf"] for agent in AGENTS})
    ended = run.end()
    assert (run.marks / "deaf").exists()
    ended.assert_promises(STEPS)


def test_a_shard_with_a_flipped_bit_is_refused_until_it_is_whole_again(launch: Any) -> None:
    run = launch(STEPS, faults={"trainer": ["flip:3"]})
    run.until_step(2)
    run.until(lambda: all("does not match its digest" in run.log(agent) for agent in AGENTS), "refusal")
    (good,) = run.folder.path.rglob("*.good")
    good.with_suffix(".shard").write_bytes(good.read_bytes())
    ended = run.end()
    ended.assert_promises(STEPS)
