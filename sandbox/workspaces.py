"""What an environment is to a sandbox host: what a task's workspace holds, what its own verbs do, what it is worth.

`[tasks] env` names one of ours, or any other together with `host_side = "module:attribute"`: a function of the
task set's folder that returns Workspaces. The agent's half is `agent_side`, see `rollout_agent/environments/base.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.sandbox.isolation import Box, BoxFailed, Limits
from headway.sandbox.pool import Pool
from headway.schemas.plugs import load
from headway.schemas.sections import TasksConfig

OURS = {
    "expr": "headway.sandbox.expr_workspaces:open_folder",
    "repo": "headway.sandbox.repo_workspaces:open_folder",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a verb of the environment showed."""

    text: str
    ok: bool
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What a workspace is worth. `digest` is the SHA-256 of what was graded; `right`: nothing is wrong with it."""

    digest: str
    reward: float
    right: bool
    parts: dict[str, float]
    timed_out: bool = False


class Workspaces(Protocol):
    """All tasks of a set. Whatever a box answers was made by untrusted code."""

    digest: str
    """Of the task set, as tasks name it."""
    tasks: Container[str]

    async def prepare(self, box: Box, task_id: str) -> str:
        """Fill a fresh box; the task's text for the session. Raises BoxFailed."""

    async def tool(self, box: Box, task_id: str, name: str, argument: str, limits: Limits) -> Shown:
        """A verb beyond read, write and exec. Raises BoxFailed."""

    async def collect(self, box: Box, task_id: str) -> Any:
        """What of a session's box is graded. The box is gone afterwards. Raises BoxFailed."""

    async def grade(
        self, found: Any, task_id: str, pool: Pool, limits: Limits, *, submitted: bool, malformed: bool
    ) -> Grade:
        """Judge it, in boxes that no earlier code has seen. Raises BoxFailed."""


def workspaces_of(config: TasksConfig, folder: Path) -> Workspaces:
    """The run's, read from its task set. Raises ConfigError, InputError."""
    found: Workspaces = load(config.host_side or OURS[config.env], "tasks.host_side")(folder)
    return found


def digest_of_files(files: dict[str, bytes]) -> str:
    """SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for name in sorted(files):
        data = files[name]
        digest.update(f"{len(name.encode())} {len(data)} {name}\n".encode())
        digest.update(data)
    return digest.hexdigest()


async def put(box: Box, files: dict[str, bytes]) -> None:
    """Write files into a fresh box. Raises BoxFailed."""
    for name, data in files.items():
        reply, _ = await box.request("write", data, path=name)
        if "error" in reply:
            raise BoxFailed(f"a fresh box takes no file {name[:80]}", why=str(reply)[:200])
