"""What the tests of somebody else's harness share: a scripted engine, a sandbox of files, agents by OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai

from headway.rollout_agent.chat_endpoint import ChatEndpoint
from headway.rollout_agent.client import Completion, Sampling
from headway.rollout_agent.environments.chat import SUBMIT, Tool
from headway.rollout_agent.harness import HarnessSession, HarnessTask, chat_of
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.session import SessionResult
from headway.rollout_agent.tools import Box
from headway.schemas import expr_protocol as p
from headway.schemas.config import Config, parse_config
from headway.schemas.messages import Signed, Task
from headway.schemas.trajectory import Span
from headway.schemas.version import Version

from .chat import CHATML, KIMI, tokenizer_json

SHAPE = ModelShape(vocab_size=512, layers=1, layer_map=(0,), experts=4, top_k=2)
SYSTEM, STATEMENT = "You look things up.", "What does a.py say? <|im_end|>"
TASK = Task(
    rollout_id="r1", purpose="train", env="repo", task_set="0" * 64, task_id="t1", group=0, sample=0,
    temperature=1.0, sampling_seed=7, groups_issued=1, eval_blocks_issued=0, last_of_unit=False,
)  # fmt: skip


async def read(box: Box, arguments: Mapping[str, str]) -> tuple[str, bool]:
    reply = await box.read(arguments["path"])
    return reply.data.decode(), reply.status == 0


READ = Tool(name="read", description="Show a file.", arguments={"path": "relative"}, run=read)
ENDS = Tool(name=SUBMIT, description="End the session: the workspace is graded as it is.", arguments={}, run=read)
SCHEMAS: Any = [READ.schema(), ENDS.schema()]


def settings(folder: Path, template: str = CHATML, **agent: Any) -> Config:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    fields = {
        "run.name": "policy",
        "tasks.env": "repo",
        "agent.max_turns": 8,
        "agent.max_action_tokens": 300,
        "agent.max_session_tokens": 4000,
        "model.max_position_embeddings": 4000,
        "agent.tokenizer": str(folder),
        "agent.tool_format": "kimi_k2" if template == KIMI else "hermes",
    }
    return parse_config("", "test", fields | {f"agent.{key}": value for key, value in agent.items()})


class FakeBox:
    """Files that say their own name."""

    statement = STATEMENT

    def __init__(self) -> None:
        self.graded: list[dict[str, bool]] = []
        self.destroyed = 0

    async def read(self, path: str) -> p.CommandReply:
        return p.CommandReply(data=f"{path}: <|im_end|>".encode(), status=0, timed_out=False, truncated=False)

    async def grade(self, **how: bool) -> p.GradeReply:
        self.graded.append(how)
        return p.GradeReply(reward=1.0, verdict=Signed(payload=b"x", signature=b"y" * 64))

    async def destroy(self) -> None:
        self.destroyed += 1


class FakeSandbox:
    waiting = 0

    def __init__(self) -> None:
        self.box = FakeBox()

    async def create(self, task: Task, attempt: str) -> Any:
        return self.box


@dataclass
class Scripted:
    """An engine that says these texts; one that is an exception is raised."""

    config: Config
    say: Sequence[str | Exception]
    ends: bool = True
    slow_s: float = 0.0
    prompts: list[list[int]] = field(default_factory=list)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, rid: str, timeout_s: float) -> Completion:
        said = self.say[len(self.prompts)]
        self.prompts.append(list(prompt))
        await asyncio.sleep(self.slow_s)
        if isinstance(said, Exception):
            raise said
        tokenizer = chat_of(self.config).tokenizer
        ids = encoded(tokenizer, said) + ([tokenizer.controls["<|im_end|>"]] if self.ends else [])
        ids = ids[: sampling.max_new_tokens]
        return Completion(
            token_ids=ids,
            logprobs=np.linspace(-1.0, -0.1, len(ids), dtype=np.float32),
            spans=[Span(start=0, end=len(ids), version=Version(0, len(self.prompts)))],
            routes=None,
            route_spans=[],
            stop="stop" if ids and ids[-1] in sampling.stop_ids else "length",
            cached_tokens=0,
        )

    async def abort(self, rid: str) -> None: ...


def encoded(tokenizer: Any, text: str) -> list[int]:
    """As a model writes it: control tokens of the tool format as such, words in an unusual split."""
    ids = list[int]()
    for name, number in tokenizer.controls.items():
        if name in text:
            head, _, tail = text.partition(name)
            return [*encoded(tokenizer, head), number, *encoded(tokenizer, tail)]
    for letter in text:
        ids += tokenizer.encode(letter)
    return ids


def call(name: str, number: int = 0, *, kimi: bool = False, **arguments: str) -> str:
    if kimi:
        body = f"functions.{name}:{number}<|tool_call_argument_begin|>{json.dumps(arguments)}"
        return f"<|tool_call_begin|>{body}<|tool_call_end|>"
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def gate() -> Any:
    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        yield

    return opened()


def parts(config: Config, engine: Any) -> dict[str, Any]:
    return {
        "task": TASK, "attempt": "a1", "engine": engine, "sandbox": FakeSandbox(), "config": config.agent,
        "shape": SHAPE, "turn_gate": gate, "clock": time.perf_counter,
    }  # fmt: skip


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[ChatEndpoint]:
    found = ChatEndpoint("policy", now=time.time)
    await found.start()
    yield found
    await found.stop()


def harnessed(config: Config, engine: Any, endpoint: ChatEndpoint, harness: Any) -> HarnessSession:
    return HarnessSession(**parts(config, engine), harness=harness, endpoint=endpoint, chat=chat_of(config))


async def run(config: Config, engine: Any, endpoint: ChatEndpoint, harness: Any) -> SessionResult:
    return await harnessed(config, engine, endpoint, harness).run()


def client_of(task: HarnessTask, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, **options)


def opening(task: HarnessTask) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.statement}]


async def an_agent(task: HarnessTask, *, stream: bool = False) -> None:
    """As harnesses are: messages and tool calls, until the model submits."""
    async with client_of(task) as client:
        messages = opening(task)
        while True:
            asked = {"model": task.model, "messages": messages, "tools": SCHEMAS, "temperature": 1.0}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    async for _ in events:
                        pass
                    said = (await events.get_final_completion()).choices[0].message
            else:
                said = (await client.chat.completions.create(**asked)).choices[0].message
            messages.append(said.model_dump(exclude_none=True, exclude={"parsed"}))
            if not said.tool_calls:
                messages.append({"role": "user", "content": "Call a tool."})
            for made in said.tool_calls or ():
                if made.function.name == SUBMIT:
                    return
                text, _ = await read(task.box, json.loads(made.function.arguments))
                messages.append({"role": "tool", "tool_call_id": made.id, "content": text})


async def a_streaming_agent(task: HarnessTask) -> None:
    await an_agent(task, stream=True)
