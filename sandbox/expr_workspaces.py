"""Workspaces of `expr`: one file with one function. See `schemas/expr_protocol.py`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from headway.sandbox.grading import call_function, count_passed, read_submission
from headway.sandbox.isolation import Box, Limits
from headway.sandbox.pool import Pool
from headway.sandbox.tasks.expr import ExprTask, TaskSet, load_task_set
from headway.sandbox.workspaces import Grade, Shown, put
from headway.schemas import expr_protocol as p


class ExprWorkspaces:
    """Those of one task set."""

    def __init__(self, task_set: TaskSet) -> None:
        self.digest, self.tasks = task_set.digest, task_set.tasks

    async def prepare(self, box: Box, task_id: str) -> str:
        await put(box, {p.FILE: self.tasks[task_id].text.encode()})
        return ""

    async def tool(self, box: Box, task_id: str, name: str, argument: str, limits: Limits) -> Shown:
        task, timed_out = self.tasks[task_id], False
        if name == "r":
            reply, data = await box.request("read", path=p.FILE, limit=p.FILE_BYTES_MAX)
            text = "no file" if "error" in reply else p.render_file(data)
        elif name == "w":
            text = await self._replace(box, task, argument)
        else:
            text, timed_out = await self._test(box, task, limits)
        return Shown(
            text=text, ok=not text.endswith("error") and text not in ("no file", "no space"), timed_out=timed_out
        )

    async def _replace(self, box: Box, task: ExprTask, expression: str) -> str:
        if not expression.isprintable():
            return "syntax error"
        data = p.replace_expression(task.text, expression).encode()
        reply, _ = await box.request("write", data, path=p.FILE, check=True)
        if "error" not in reply:
            return "ok"
        return "syntax error" if reply["error"] == "SyntaxError" else "no space"

    async def _test(self, box: Box, task: ExprTask, limits: Limits) -> tuple[str, bool]:
        inputs = [given for given, _ in task.visible]
        outcome = await call_function(box, inputs, limits)
        wanted = [want for _, want in task.visible]
        return p.render_test(zip(inputs, outcome.shown(), wanted, strict=True)), outcome.timed_out

    async def collect(self, box: Box, task_id: str) -> bytes:
        return await read_submission(box)

    async def grade(
        self, found: bytes, task_id: str, pool: Pool, limits: Limits, *, submitted: bool, malformed: bool
    ) -> Grade:
        task, judged = self.tasks[task_id], submitted and not malformed
        passed, timed_out = await count_passed(found, task, pool, limits) if judged else (0, False)
        right = passed == len(task.expected) > 0
        return Grade(
            digest=hashlib.sha256(found).hexdigest(),
            reward=p.reward(right=right, submitted=submitted, malformed=malformed),
            right=right,
            parts={
                "right": float(right),
                "passed_fraction": passed / len(task.expected),
                "submitted": float(judged),
                "timed_out": float(timed_out),
            },
            timed_out=timed_out,
        )


def open_folder(folder: Path) -> ExprWorkspaces:
    """Raises InputError."""
    return ExprWorkspaces(load_task_set(folder))
