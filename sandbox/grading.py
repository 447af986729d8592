"""Tests and grades of `expr` files: boxes compute, the host compares.

A box is told inputs and answers with outputs. The wanted values never enter any box, so code in it can pass
only by computing them: printing PASS, exiting early, patching builtins or rewriting a runner gains nothing.
A grade runs in a box that no earlier code has seen, after the agent's own box is dead.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headway.sandbox.isolation import Box, BoxFailed, Limits
from headway.sandbox.pool import Pool
from headway.sandbox.tasks.expr import ExprTask
from headway.sandbox.workspaces import put
from headway.schemas.expr_protocol import FILE, FUNCTION

LINE_BYTES_MAX = 128
SUBMISSION_BYTES_MAX = 32 << 10
SHOWN_CHARS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """For each input what the function gave: an int, a str that shows another value, None for an error."""

    outputs: list[int | str | None]
    timed_out: bool

    def shown(self) -> list[str | None]:
        return [None if output is None else str(output)[:SHOWN_CHARS_MAX] for output in self.outputs]


async def call_function(box: Box, inputs: list[int], limits: Limits) -> Outcome:
    """Call the workspace's function on each input, for real, in a fresh child. Raises BoxFailed."""
    reply, data = await box.request(
        "call", path=FILE, function=FUNCTION, inputs=inputs,
        wall_s=limits.command_s, output_bytes=(len(inputs) + 1) * LINE_BYTES_MAX,
    )  # fmt: skip
    if "error" in reply:
        raise BoxFailed("a box could not run a test", why=str(reply)[:200])
    outputs = [_output(line) for line in data.split(b"\n")[: len(inputs)]]
    outputs += [None] * (len(inputs) - len(outputs))
    return Outcome(outputs=outputs, timed_out=reply.get("timed_out") is True)


def _output(line: bytes) -> int | str | None:
    """What one line of a box says; whatever is not exactly a result is an error of the code."""
    try:
        result: Any = json.loads(line) if len(line) <= LINE_BYTES_MAX else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(result, list) or len(result) != 2:
        return None
    kind, value = result
    if kind == "int" and type(value) is int:
        return value
    if kind == "other" and isinstance(value, str):
        return "".join(c if " " <= c <= "~" else "?" for c in value) or "?"
    return None


async def read_submission(box: Box) -> bytes:
    """The workspace's file; nothing where the session left no regular file, or an oversized one."""
    reply, data = await box.request("read", path=FILE, limit=SUBMISSION_BYTES_MAX + 1)
    return b"" if "error" in reply or len(data) > SUBMISSION_BYTES_MAX else data


async def count_passed(data: bytes, task: ExprTask, pool: Pool, limits: Limits) -> tuple[int, bool]:
    """Run a submission on the hidden inputs in a fresh box: how many are right, and whether time ran out.

    Raises BoxFailed for infrastructure.
    """
    box = await pool.take()
    try:
        await put(box, {FILE: data})
        outcome = await call_function(box, task.inputs, limits)
    finally:
        await box.destroy()
    passed = sum(type(got) is int and got == want for got, want in zip(outcome.outputs, task.expected, strict=True))
    return passed, outcome.timed_out
