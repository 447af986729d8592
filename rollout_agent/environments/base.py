"""What an environment is to a session: what it shows, how it reads what the model says, what a call does.

`[tasks] env` names one of ours, or any other together with `agent_side = "module:attribute"`: a function of the run's
Config that returns an Environment. The sandbox's half is `host_side`, see `sandbox/workspaces.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.rollout_agent.tool_formats import Call, Malformed, ToolResult
from headway.rollout_agent.tools import Box
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError
from headway.schemas.plugs import load

OURS = {
    "expr": "headway.rollout_agent.environments.expr:ExprEnvironment",
    "repo": "headway.rollout_agent.environments.repo:make",
}


class Dialogue(Protocol):
    """One session. Its answers depend on nothing but what was said and heard, so that they can be derived again."""

    stop_ids: tuple[int, ...]
    """Where a turn of the model ends."""
    malformed_ends: bool
    """Whether a line that is no call ends the session; else the model is told."""
    summarises: bool
    """Whether `answer` and `restart` know how to go on from a summary."""

    def opening(self) -> list[int]:
        """The first prompt."""

    def read(self, line: Sequence[int]) -> tuple[Call, ...] | Malformed:
        """What was sampled, as calls: at least one. Whatever the ids are, this raises nothing."""

    def ends(self, call: Call) -> bool:
        """Whether it submits."""

    async def act(self, box: Box, call: Call) -> ToolResult:
        """Do it. What the model got wrong is a result; raises SandboxTrouble for anything else."""

    def answer(
        self, line: Sequence[int], heard: Sequence[ToolResult] | Malformed, *, summarise: bool = False
    ) -> list[int]:
        """What follows `line`: the observation and, with `summarise`, the request for a summary."""

    def restart(self, summary: Sequence[int]) -> list[int]:
        """A new first prompt that goes on from a summary, which was sampled and stays as it is."""


class Environment(Protocol):
    """Of a process; made once, when it starts."""

    def begin(self, statement: str) -> Dialogue:
        """A session at a task. `statement` is its text, which is hostile."""


def environment_of(config: Config) -> Environment:
    """The run's. Raises ConfigError."""
    spec = config.tasks.agent_side or OURS[config.tasks.env]
    environment: Environment = load(spec, "tasks.agent_side")(config)
    if config.agent.summarise_at_tokens and not environment.begin("").summarises:
        raise ConfigError(f"environment {config.tasks.env} cannot summarise", hint="set agent.summarise_at_tokens = 0")
    return environment
