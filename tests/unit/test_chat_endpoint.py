"""OpenAI's protocol, by its own client: what is answered, and what is refused in which words."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from headway.rollout_agent.chat_endpoint import ChatEndpoint
from headway.rollout_agent.harness import HarnessFailed, HarnessTask, chat_of
from headway.rollout_agent.session import SessionResult
from headway.schemas.config import Config

from .chat_endpoint_stand import (
    SCHEMAS,
    STATEMENT,
    SYSTEM,
    Scripted,
    call,
    client_of,
    opening,
    run,
    served,
    settings,
)


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with served() as found:
        yield found


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
    "a temperature beyond floats": (
        "Bearer {key}",
        b'{"model": "policy", "messages": [{"role": "user", "content": "x"}], "temperature": 1' + b"0" * 400 + b"}",
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


async def test_a_session_that_ends_while_a_request_still_arrives_answers_nothing(
    tmp_path: Path, endpoint: ChatEndpoint
) -> None:
    config, replies = settings(tmp_path / "m"), list[asyncio.Task[Any]]()
    ended = asyncio.Event()

    async def ask(task: HarnessTask) -> None:
        async def slowly() -> AsyncIterator[bytes]:
            yield b'{"model": "policy", '
            await ended.wait()
            yield b'"messages": [{"role": "user", "content": "x"}]}'

        async def late() -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {task.api_key}"}
            async with (
                aiohttp.ClientSession(headers=headers) as http,
                http.post(f"{task.base_url}/chat/completions", data=slowly()) as reply,
            ):
                return reply.status, await reply.json()

        replies.append(asyncio.create_task(late()))
        await _two_turns(task)

    await run(config, Scripted(config, ["one", "two"], slow_s=0.1), endpoint, ask)
    ended.set()
    status, body = await replies[0]
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_a_harness_that_is_cancelled_from_within_is_a_failure(tmp_path: Path, endpoint: ChatEndpoint) -> None:
    config = settings(tmp_path / "m")

    async def ask(task: HarnessTask) -> None:
        raise asyncio.CancelledError

    with pytest.raises(HarnessFailed, match="the harness failed"):
        await run(config, Scripted(config, []), endpoint, ask)
