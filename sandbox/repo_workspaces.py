"""Workspaces of `repo`: a Python package to repair, graded by calling it.

What is graded are the workspace's Python files as they stand, submitted or not. Boxes compute, the host compares:
the values that are due never enter a box.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from headway.sandbox.isolation import Box, BoxFailed, Limits
from headway.sandbox.pool import Pool
from headway.sandbox.tasks.repo import FILES_BYTES_MAX, RepoTask, load
from headway.sandbox.workspaces import Grade, Shown, digest_of_files, put

FILES_MAX = 256
COLLECT_S = 5.0
LINE_BYTES_MAX = 64 << 10
"""Of one answer of a graded call."""

COLLECT = f"""
import base64, json, os
found, size = {{}}, 0
for folder, folders, names in os.walk("."):
    for name in names:
        path = os.path.normpath(os.path.join(folder, name))
        if path.endswith(".py") and os.path.isfile(path) and not os.path.islink(path):
            with open(path, "rb") as file:
                data = file.read({FILES_BYTES_MAX} + 1)
            size += len(data)
            if size > {FILES_BYTES_MAX} or len(found) >= {FILES_MAX}:
                raise SystemExit(1)
            found[path] = base64.b64encode(data).decode()
print(json.dumps(found))
"""

CALL = """
import importlib, json, os, sys
out, null = os.dup(1), os.open("/dev/null", os.O_RDWR)
os.dup2(null, 1)
os.dup2(null, 2)
sys.path.insert(0, os.getcwd())
for module, function, arguments in json.loads(CALLS):
    try:
        value = getattr(importlib.import_module(module), function)(*arguments)
        line = json.dumps([value], sort_keys=True)
    except BaseException as error:
        line = json.dumps(type(error).__name__)
    os.write(out, line.encode()[:LIMIT] + b"\\n")
"""


class RepoWorkspaces:
    """Those of one task set."""

    def __init__(self, digest: str, tasks: dict[str, RepoTask]) -> None:
        self.digest, self.tasks = digest, tasks

    async def prepare(self, box: Box, task_id: str) -> str:
        task = self.tasks[task_id]
        await put(box, {name: text.encode() for name, text in task.files.items()})
        return task.statement

    async def tool(self, box: Box, task_id: str, name: str, argument: str, limits: Limits) -> Shown:
        return Shown(text="this environment has read, write and exec alone", ok=False)

    async def collect(self, box: Box, task_id: str) -> dict[str, bytes]:
        """The Python files; none where they are too large, too many, or something odd."""
        limit = 2 * FILES_BYTES_MAX
        reply, data = await box.request("exec", code=COLLECT, wall_s=COLLECT_S, output_bytes=limit)
        if "error" in reply:
            raise BoxFailed("a box could not be read", why=str(reply)[:200])
        try:
            files = {str(name): base64.b64decode(text) for name, text in json.loads(data).items()}
        except (ValueError, TypeError, AttributeError, RecursionError):
            return {}
        return {name: content for name, content in files.items() if _inside(name)}

    async def grade(
        self, found: dict[str, bytes], task_id: str, pool: Pool, limits: Limits, *, submitted: bool, malformed: bool
    ) -> Grade:
        task = self.tasks[task_id]
        passed, timed_out = await _passed(found, task, pool, limits)
        right = passed == len(task.checks) > 0
        return Grade(
            digest=digest_of_files(found),
            reward=float(right),
            right=right,
            parts={
                "right": float(right),
                "passed_fraction": passed / max(len(task.checks), 1),
                "submitted": float(submitted),
                "timed_out": float(timed_out),
            },
            timed_out=timed_out,
        )


def open_folder(folder: Path) -> RepoWorkspaces:
    """Raises InputError."""
    return RepoWorkspaces(*load(folder))


async def _passed(files: dict[str, bytes], task: RepoTask, pool: Pool, limits: Limits) -> tuple[int, bool]:
    """How many checks hold, and whether time ran out. Raises BoxFailed."""
    calls = json.dumps([[check.module, check.function, check.arguments] for check in task.checks])
    code = f"CALLS, LIMIT = {calls!r}, {LINE_BYTES_MAX}\n{CALL}"
    box = await pool.take()
    try:
        await put(box, files)
        limit = (LINE_BYTES_MAX + 1) * len(task.checks)
        reply, data = await box.request("exec", code=code, wall_s=limits.command_s, output_bytes=min(limit, 1 << 20))
    finally:
        await box.destroy()
    if "error" in reply:
        raise BoxFailed("a box could not run the checks", why=str(reply)[:200])
    lines = data.split(b"\n")
    got = [_value(line) for line in lines[: len(task.checks)]]
    due = [[check.want] for check in task.checks]
    return sum(_same(a, b) for a, b in zip(got, due, strict=False)), reply.get("timed_out") is True


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _same(got: Any, due: Any) -> bool:
    """Equal as JSON, so that neither 1 and 1.0 nor 1 and true are."""
    return type(got) is list and json.dumps(got, sort_keys=True) == json.dumps(due, sort_keys=True)


def _inside(path: str) -> bool:
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path
