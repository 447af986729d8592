"""Repairing a small Python package: a shell, files, its tests."""

from __future__ import annotations

from collections.abc import Mapping

from headway.rollout_agent.environments.chat import ChatEnvironment, Tool
from headway.rollout_agent.tools import Box
from headway.schemas.config import Config
from headway.schemas.expr_protocol import CommandReply

SYSTEM = (
    "You repair a Python package in the current folder. Find out what is wrong, change the files, run the tests, and "
    "submit. Tests that you are not shown decide."
)
RUN_TESTS = """
import io, sys, unittest
sys.path.insert(0, ".")
out = io.StringIO()
result = unittest.TextTestRunner(stream=out, verbosity=2).run(unittest.defaultTestLoader.discover("."))
print("\\n".join(line for line in out.getvalue().splitlines() if not line.startswith("Ran ")))
sys.exit(not result.wasSuccessful())
"""
"""Without the time that unittest prints: a session must show the same when it is done again."""


def shown(reply: CommandReply) -> tuple[str, bool]:
    """A command's output and how it ended."""
    text = reply.data.decode("utf-8", "replace")
    if reply.truncated:
        text += "\n[output cut off]"
    if reply.timed_out:
        return text + "\n[killed: it ran too long]", False
    return text + (f"\n[exit code {reply.status}]" if reply.status else ""), reply.status == 0


async def _bash(box: Box, arguments: Mapping[str, str]) -> tuple[str, bool]:
    return shown(await box.exec(["/bin/sh", "-c", arguments["command"]]))


async def _read(box: Box, arguments: Mapping[str, str]) -> tuple[str, bool]:
    return shown(await box.read(arguments["path"]))


async def _write(box: Box, arguments: Mapping[str, str]) -> tuple[str, bool]:
    text, ok = shown(await box.write(arguments["path"], arguments["text"].encode()))
    return ("written" if ok else text), ok


async def _test(box: Box, arguments: Mapping[str, str]) -> tuple[str, bool]:
    return shown(await box.exec(["python3", "-B", "-c", RUN_TESTS]))


TOOLS = (
    Tool(name="bash", description="Run a shell command.", arguments={"command": "the command"}, run=_bash),
    Tool(name="read", description="Show a file.", arguments={"path": "relative"}, run=_read),
    Tool(
        name="write",
        description="Replace a file, or make one.",
        arguments={"path": "relative", "text": "all of it"},
        run=_write,
    ),
    Tool(name="test", description="Run the package's own tests.", arguments={}, run=_test),
)


def make(config: Config) -> ChatEnvironment:
    """Raises ConfigError."""
    return ChatEnvironment.of(config, SYSTEM, TOOLS)
