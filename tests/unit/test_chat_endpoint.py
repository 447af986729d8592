"""Somebody else's harness, by OpenAI's own client: the tokens of the built-in loop, and none that was not sampled."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from headway.rollout_agent.chat_endpoint import ChatEndpoint
from headway.rollout_agent.client import Completion, EngineTrouble, Sampling
from headway.rollout_agent.environments.chat import SUBMIT, ChatEnvironment, Tool
from headway.rollout_agent.harness import HarnessFailed, HarnessSession, HarnessTask, chat_of, sessions_of
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.recorder import Recorder
from headway.rollout_agent.session import Diverged, Interrupted, Session, SessionResult
from headway.rollout_agent.tools import Box
from headway.schemas import expr_protocol as p
from headway.schemas.config import Config, parse_config
from headway.schemas.errors import ConfigError
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


async def _read(box: Box, arguments: Mapping[str, str]) -> tuple[str, bool]:
    reply = await box.read(arguments["path"])
    return reply.data.decode(), reply.status == 0


READ = Tool(name="read", description="Show a file.", arguments={"path": "relative"}, run=_read)
ENDS = Tool(name=SUBMIT, description="End the session: the workspace is graded as it is.", arguments={}, run=_read)
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


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
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
                text, _ = await _read(task.box, json.loads(made.function.arguments))
                messages.append({"role": "tool", "tool_call_id": made.id, "content": text})


async def a_streaming_agent(task: HarnessTask) -> None:
    await an_agent(task, stream=True)


@pytest.mark.parametrize("harness", [an_agent, a_streaming_agent])
@pytest.mark.parametrize("template", [CHATML, KIMI])
async def test_what_a_harness_asks_for_is_recorded_as_the_built_in_loop_would_have(
    tmp_path: Path, endpoint: ChatEndpoint, template: str, harness: Any
) -> None:
    kimi, config = template == KIMI, settings(tmp_path / "m", template)
    say = [
        "Two at once: " + call("read", 0, kimi=kimi, path="a.py") + call("read", 1, kimi=kimi, path="b.py"),
        call("read", 2, kimi=kimi, path="c.py"),
        call(SUBMIT, 3, kimi=kimi),
    ]
    environment = ChatEnvironment.of(config, SYSTEM, [READ])
    built_in = await Session(**parts(config, Scripted(config, say)), environment=environment).run()
    engine = Scripted(config, say)
    found = await run(config, engine, endpoint, harness)
    assert found.trajectory.turns == 3
    for name in ("token_ids", "loss_mask", "logprobs", "spans", "turns", "stop_reason", "turn_stops", "temperature"):
        assert np.array_equal(getattr(found.trajectory, name), getattr(built_in.trajectory, name)), name
    sampled = found.trajectory.token_ids[found.trajectory.loss_mask == 1].tolist()
    tokenizer = chat_of(config).tokenizer
    assert sampled == [t for said in say for t in [*encoded(tokenizer, said), tokenizer.controls["<|im_end|>"]]]
    assert tokenizer.encode(say[0]) != encoded(tokenizer, say[0])[:-1], "encoding the text again would not show"


async def test_a_reply_has_content_calls_usage_and_logprobs_of_what_was_sampled(
    tmp_path: Path, endpoint: ChatEndpoint
) -> None:
    config, seen = settings(tmp_path / "m"), list[Any]()

    async def ask(task: HarnessTask) -> None:
        async with client_of(task) as client:
            seen.append(await client.models.list())
            seen.append(
                await client.chat.completions.create(
                    model=task.model, messages=opening(task), tools=SCHEMAS, logprobs=True, max_completion_tokens=200
                )
            )

    result = await run(config, Scripted(config, ["Look: " + call("read", path="a.py")]), endpoint, ask)
    models, completion = seen
    assert [model.id for model in models.data] == ["policy"]
    choice, usage = completion.choices[0], completion.usage
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Look: ")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"path": "a.py"}
    mask = result.trajectory.loss_mask == 1
    assert usage.completion_tokens == mask.sum() == len(choice.logprobs.content)
    assert usage.prompt_tokens == int(np.argmax(mask))
    assert [entry.logprob for entry in choice.logprobs.content] == result.trajectory.logprobs[mask].tolist()
    assert "".join(entry.token for entry in choice.logprobs.content).startswith("Look: <tool_call>")


async def test_a_turn_that_is_cut_off_says_so_and_the_session_goes_on(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    config, reasons = settings(tmp_path / "m"), list[str]()

    async def ask(task: HarnessTask) -> None:
        async with client_of(task) as client:
            messages = opening(task)
            for most in (5, 50):
                found = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=most)
                reasons.append(found.choices[0].finish_reason)
                messages += [found.choices[0].message.to_dict(), {"role": "user", "content": "Go on."}]

    result = await run(config, Scripted(config, ["A long answer", "The end"]), endpoint, ask)
    assert reasons == ["length", "stop"]
    assert result.trajectory.turn_stops == ["length", "stop"]


Asking = Callable[[Any, HarnessTask], Awaitable[Any]]


async def refusal(
    config: Config, endpoint: ChatEndpoint, ask: Asking, say: Sequence[str] = ("one", "two")
) -> tuple[openai.APIStatusError, SessionResult, Scripted]:
    """How the second request was refused; a third one then goes on as if it had not been."""
    caught, engine = list[openai.APIStatusError](), Scripted(config, say)

    async def harness(task: HarnessTask) -> None:
        async with client_of(task) as client:
            messages = opening(task)
            first = await client.chat.completions.create(model=task.model, messages=messages, tools=SCHEMAS)
            messages.append(first.choices[0].message.to_dict())
            with pytest.raises(openai.APIStatusError) as error:
                await ask(client, task)
            caught.append(error.value)
            messages.append({"role": "user", "content": "Go on."})
            await client.chat.completions.create(model=task.model, messages=messages, tools=SCHEMAS)

    result = await run(config, engine, endpoint, harness)
    assert result.trajectory.turns == len(engine.prompts) == 2
    return caught[0], result, engine


def asking(messages: Sequence[Any] | None = None, **options: Any) -> Asking:
    async def ask(client: openai.AsyncOpenAI, task: HarnessTask) -> None:
        said = {"role": "assistant", "content": "one"}
        more = [*opening(task), said, {"role": "user", "content": "Again."}]
        fields: Any = {"model": task.model, "messages": messages or more, "tools": SCHEMAS, **options}
        await client.chat.completions.create(**fields)

    return ask


SYSTEM_MESSAGE, USER_MESSAGE = {"role": "system", "content": SYSTEM}, {"role": "user", "content": STATEMENT}
SAID, AGAIN = {"role": "assistant", "content": "one"}, {"role": "user", "content": "Again."}
FORKS = {
    "another system prompt": ([{"role": "system", "content": "x"}, USER_MESSAGE, SAID, AGAIN], "messages[0].content"),
    "another answer": (
        [SYSTEM_MESSAGE, USER_MESSAGE, {"role": "assistant", "content": "ONE"}, AGAIN],
        "messages[2].content",
    ),
    "a shortened history": ([SYSTEM_MESSAGE, AGAIN], "messages[1].content"),
    "a call that was not made": (
        [
            SYSTEM_MESSAGE,
            USER_MESSAGE,
            SAID | {"tool_calls": [{"id": "x", "type": "function", "function": {"name": "read", "arguments": "{}"}}]},
            AGAIN,
        ],
        "messages[2].tool_calls",
    ),
}


@pytest.mark.parametrize(("messages", "where"), FORKS.values(), ids=FORKS.keys())
async def test_messages_that_do_not_extend_the_session_are_refused_by_name(
    tmp_path: Path, endpoint: ChatEndpoint, messages: list[Any], where: str
) -> None:
    error, _, _ = await refusal(settings(tmp_path / "m"), endpoint, asking(messages))
    assert (error.status_code, error.code, error.param) == (400, "conversation_forked", where)
    assert where in error.message


REFUSED: dict[str, dict[str, Any]] = {
    "another temperature": {"temperature": 0.5},
    "a nucleus": {"top_p": 0.9},
    "two samples": {"n": 2},
    "a seed": {"seed": 1},
    "a stop": {"stop": ["x"]},
    "a bias": {"logit_bias": {"5": 1}},
    "a penalty": {"presence_penalty": 0.5},
    "a forced tool": {"tool_choice": "required"},
    "a grammar": {"response_format": {"type": "json_object"}},
    "alternatives": {"logprobs": True, "top_logprobs": 3},
    "no tokens": {"max_tokens": 0},
    "an unknown key": {"extra_body": {"best_of": 3}},
    "another model": {"model": "gpt-9"},
    "other tools": {"tools": SCHEMAS[:1]},
    "a control token in a tool": {"tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]},
    "a strict tool": {"tools": [{"type": "function", "function": {"name": "read", "strict": True}}]},
    "tools that are text": {"tools": "read"},
    "no messages": {"extra_body": {"messages": []}},
    "a role nobody has": {"messages": [{"role": "judge", "content": "x"}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "nothing new": {"extra_body": {"messages": [SYSTEM_MESSAGE, USER_MESSAGE, SAID]}},
    "words put into its mouth": {"messages": [SYSTEM_MESSAGE, USER_MESSAGE, SAID, AGAIN, SAID]},
    "a result of no call": {
        "messages": [SYSTEM_MESSAGE, USER_MESSAGE, SAID, {"role": "tool", "tool_call_id": "x", "content": "y"}]
    },
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED.keys())
async def test_what_cannot_be_recorded_is_refused_and_changes_nothing(
    tmp_path: Path, endpoint: ChatEndpoint, options: dict[str, Any]
) -> None:
    config = settings(tmp_path / "m")
    error, result, _ = await refusal(config, endpoint, asking(**options))
    assert error.status_code in (400, 404)
    assert error.type == "invalid_request_error"
    assert error.message
    calm = await run(config, Scripted(config, ("one", "two")), endpoint, _two_turns)
    assert result.trajectory.token_ids.tolist() == calm.trajectory.token_ids.tolist()


async def _two_turns(task: HarnessTask) -> None:
    async with client_of(task) as client:
        messages = opening(task)
        for _ in range(2):
            found = await client.chat.completions.create(model=task.model, messages=messages, tools=SCHEMAS)
            messages += [found.choices[0].message.to_dict(), {"role": "user", "content": "Go on."}]


async def test_every_call_must_be_answered(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    config, errors = settings(tmp_path / "m"), list[str]()

    async def ask(task: HarnessTask) -> None:
        async with client_of(task) as client:
            messages = opening(task)
            found = await client.chat.completions.create(model=task.model, messages=messages, tools=SCHEMAS)
            said = found.choices[0].message
            assert said.tool_calls is not None
            messages.append(said.to_dict())
            answers = [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in said.tool_calls]
            for more in (answers[:1], [answers[0], answers[0]], [{"role": "user", "content": "x"}]):
                with pytest.raises(openai.BadRequestError) as error:
                    await client.chat.completions.create(model=task.model, messages=[*messages, *more], tools=SCHEMAS)
                errors.append(error.value.message)

    await run(config, Scripted(config, [call("read", path="a") + call("read", path="b")]), endpoint, ask)
    assert ["was not answered" in e or "no open call" in e for e in errors] == [True] * 3


async def test_asking_again_gets_the_same_answer_and_samples_nothing(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    config, said = settings(tmp_path / "m"), list[str | None]()

    async def ask(task: HarnessTask) -> None:
        async with client_of(task) as client:
            messages = opening(task)
            for _ in range(3):
                found = await client.chat.completions.create(model=task.model, messages=messages)
                said.append(found.choices[0].message.content)

    result = await run(config, Scripted(config, ["once"]), endpoint, ask)
    assert said == ["once"] * 3
    assert result.trajectory.turns == 1


async def test_a_client_that_hangs_up_loses_nothing_that_was_sampled(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    config, engine = settings(tmp_path / "m"), list[Scripted]()
    engine.append(Scripted(config, ["slowly"], slow_s=0.5))

    async def ask(task: HarnessTask) -> None:
        async with client_of(task, max_retries=0, timeout=0.2) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model=task.model, messages=opening(task))
        async with client_of(task) as client:
            found = await client.chat.completions.create(model=task.model, messages=opening(task))
            assert found.choices[0].message.content == "slowly"

    result = await run(config, engine[0], endpoint, ask)
    assert (result.trajectory.turns, len(engine[0].prompts)) == (1, 1)


@pytest.mark.parametrize(
    ("agent", "code", "reason"),
    [({"max_turns": 1}, "turn_limit", "turn_limit"), ({"max_session_tokens": 90}, "context_length_exceeded", "length")],
)
async def test_a_limit_ends_the_session_and_it_is_graded(
    tmp_path: Path, endpoint: ChatEndpoint, agent: dict[str, int], code: str, reason: str
) -> None:
    config, codes = settings(tmp_path / "m", **agent), list[str | None]()

    async def ask(task: HarnessTask) -> None:
        async with client_of(task) as client:
            messages = opening(task)
            for _ in range(9):
                try:
                    found = await client.chat.completions.create(model=task.model, messages=messages)
                except openai.BadRequestError as error:
                    codes.append(error.code)
                    raise
                messages += [found.choices[0].message.to_dict(), {"role": "user", "content": "Go on, please."}]

    result = await run(config, Scripted(config, ["word"] * 9), endpoint, ask)
    assert codes == [code]
    assert result.trajectory.stop_reason == reason


async def test_a_harness_that_fails_or_an_engine_that_does_is_no_reward(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    config = settings(tmp_path / "m")

    async def crash(task: HarnessTask) -> None:
        raise RuntimeError("scripted")

    async def idle(task: HarnessTask) -> None: ...

    async def ask(task: HarnessTask) -> None:
        async with client_of(task) as client:
            await client.chat.completions.create(model=task.model, messages=opening(task))

    async def ask_for_ever(task: HarnessTask) -> None:
        with contextlib.suppress(openai.APIStatusError):
            await ask(task)
        await asyncio.sleep(60)

    for harness, kind in ((crash, HarnessFailed), (idle, HarnessFailed)):
        with pytest.raises(kind):
            await run(config, Scripted(config, ["x"]), endpoint, harness)
    for harness in (ask, ask_for_ever):
        with pytest.raises(EngineTrouble):
            await run(config, Scripted(config, [EngineTrouble("scripted")]), endpoint, harness)


async def test_a_session_that_must_leave_ends_although_its_harness_would_go_on(
    tmp_path: Path, endpoint: ChatEndpoint
) -> None:
    config = settings(tmp_path / "m")
    session = harnessed(config, Scripted(config, ["a", "b"]), endpoint, None)

    async def ask(task: HarnessTask) -> None:
        async with client_of(task) as client:
            messages = opening(task)
            for _ in range(2):
                found = await client.chat.completions.create(model=task.model, messages=messages)
                messages += [found.choices[0].message.to_dict(), {"role": "user", "content": "Go on."}]
                await session.leave()

    session.harness = ask
    with pytest.raises(Interrupted, match="told to leave"):
        await session.run()
    assert session.recorder.turns == 1


async def test_a_saved_session_goes_on_with_what_was_sampled(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    config = settings(tmp_path / "m")
    say = [call("read", path="a.py"), call("read", path="b.py"), call(SUBMIT)]
    whole = await run(config, Scripted(config, say), endpoint, an_agent)
    first = harnessed(config, Scripted(config, [*say[:2], EngineTrouble("scripted")]), endpoint, an_agent)
    with pytest.raises(EngineTrouble):
        await first.run()
    saved = first.recorder.saved(SHAPE, 1.0)
    engine = Scripted(config, say[2:])
    second = harnessed(config, engine, endpoint, an_agent)
    second.recorder = Recorder.resumed(saved)
    found = await second.run()
    assert len(engine.prompts) == 1
    assert found.trajectory.token_ids.tolist() == whole.trajectory.token_ids.tolist()
    assert found.trajectory.loss_mask.tolist() == whole.trajectory.loss_mask.tolist()

    async def another(task: HarnessTask) -> None:
        async with client_of(task) as client:
            await client.chat.completions.create(model=task.model, messages=[{"role": "user", "content": "else"}])

    third = harnessed(config, Scripted(config, []), endpoint, another)
    third.recorder = Recorder.resumed(saved)
    with pytest.raises(Diverged):
        await third.run()


HOSTILE = {
    "no key": (None, b"{}", 401),
    "a wrong key": ("Bearer wrong", b"{}", 401),
    "another scheme": ("Basic {key}", b"{}", 401),
    "no JSON": ("Bearer {key}", b"{", 400),
    "deep": ("Bearer {key}", b"[" * 100_000, 400),
    "a list": ("Bearer {key}", b"[]", 400),
    "NaN": ("Bearer {key}", b'{"temperature": NaN}', 400),
    "no UTF-8": ("Bearer {key}", b"\xff\xfe", 400),
    "half a character": (
        "Bearer {key}",
        b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
        400,
    ),
    "tools too deep": (
        "Bearer {key}",
        b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", '
        b'"function": {"name": "f", "parameters": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}}]}",
        400,
    ),
    "too large": ("Bearer {key}", b" " * (17 << 20), 413),
}


@pytest.mark.parametrize(("header", "data", "status"), HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_requests_are_refused_in_openais_shape(
    tmp_path: Path, endpoint: ChatEndpoint, header: str | None, data: bytes, status: int
) -> None:
    config, seen = settings(tmp_path / "m"), list[Any]()

    async def ask(task: HarnessTask) -> None:
        headers = {"Authorization": header.format(key=task.api_key)} if header else {}
        async with aiohttp.ClientSession(base_url=task.base_url + "/", headers=headers) as http:
            async with http.post("chat/completions", data=io.BytesIO(data)) as reply:
                seen.append((reply.status, await reply.json()))
            async with http.get("nonsense") as reply:
                seen.append((reply.status, await reply.json()))
        await _two_turns(task)

    await run(config, Scripted(config, ["one", "two"]), endpoint, ask)
    assert seen[0][0] == status
    for _, body in seen:
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert body["error"]["message"]


async def test_a_key_is_one_sessions_and_dies_with_it(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    config, tasks = settings(tmp_path / "m"), list[HarnessTask]()

    async def ask(task: HarnessTask) -> None:
        tasks.append(task)
        await _two_turns(task)

    results = await asyncio.gather(
        *(run(config, Scripted(config, [f"{n} one", f"{n} two"], slow_s=0.01), endpoint, ask) for n in range(3))
    )
    decode = chat_of(config).tokenizer.decode
    for n, result in enumerate(results):
        sampled = decode(result.trajectory.token_ids[result.trajectory.loss_mask == 1].tolist())
        assert sampled.count(f"{n} ") == 2
    assert len({task.api_key for task in tasks}) == 3
    async with client_of(tasks[0], max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    assert endpoint.base_url.startswith("http://127.0.0.1:")


async def test_a_harness_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.harness"):
        async with sessions_of(settings(tmp_path / "m", harness="headway.nonsense:run"), time.time):
            pass
