"""Writes a task set and its demonstrations as JSONL: the same seed gives the same bytes.

train.jsonl, heldout.jsonl   one task a line (`ExprTask`); hidden values stay with dispatcher and sandbox
sessions.jsonl               {"segments": [[text, trained], ...]} of train programs, for mid-training
summary.json                 what was built, and the digest that names the task set
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from headway.sandbox.tasks.demonstrator import demonstrate
from headway.sandbox.tasks.expr import digest_of_parts, dump_lines, tasks
from headway.schemas.expr_protocol import ENV, HIDDEN_INPUTS


def build(seed: int, out_dir: Path, sessions: int = 20_000) -> dict[str, Any]:
    """Write the four files into `out_dir` and return the summary."""
    out_dir.mkdir(parents=True, exist_ok=True)
    everything = list(tasks(seed))
    train = [(gold, task) for gold, task in everything if task.split == "train"]
    heldout = [task for _, task in everything if task.split == "heldout"]
    parts = [dump_lines([task for _, task in train]), dump_lines(heldout)]
    lines, right = [], 0
    for number in range(sessions):
        rng = Random(f"expr-session-{seed}-{number}")
        gold, task = rng.choice(train)
        session = demonstrate(gold, task, rng)
        right += session.written.values(HIDDEN_INPUTS) == gold.values(HIDDEN_INPUTS)
        lines.append(json.dumps({"segments": session.segments}, separators=(",", ":")))
    summary = {
        "env": ENV,
        "seed": seed,
        "task_set": digest_of_parts(parts),
        "train_tasks": len(train),
        "train_programs": len({task.gold for _, task in train}),
        "heldout_tasks": len(heldout),
        "heldout_hidden_fraction": sum(bool(task.hides) for task in heldout) / len(heldout),
        "sessions": sessions,
        "sessions_right_fraction": right / max(sessions, 1),
    }
    (out_dir / "train.jsonl").write_bytes(parts[0])
    (out_dir / "heldout.jsonl").write_bytes(parts[1])
    (out_dir / "sessions.jsonl").write_text("".join(line + "\n" for line in lines))
    (out_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary
