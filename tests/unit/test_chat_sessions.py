"""Somebody else's harness, by OpenAI's own client: the tokens of the built-in loop, and none that was not sampled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from headway.rollout_agent.chat_endpoint import ChatEndpoint
from headway.rollout_agent.client import EngineTrouble
from headway.rollout_agent.environments.chat import SUBMIT, ChatEnvironment
from headway.rollout_agent.harness import HarnessFailed, HarnessTask, chat_of, sessions_of
from headway.rollout_agent.recorder import Recorder
from headway.rollout_agent.session import Diverged, Interrupted, Session
from headway.schemas.errors import ConfigError

from .chat import CHATML, KIMI
from .chat_endpoint_stand import (
    READ,
    SHAPE,
    SYSTEM,
    Scripted,
    a_streaming_agent,
    an_agent,
    call,
    client_of,
    encoded,
    harnessed,
    opening,
    parts,
    run,
    served,
    settings,
)


@pytest.fixture
async def endpoint() -> AsyncIterator[ChatEndpoint]:
    async with served() as found:
        yield found


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


async def test_a_harness_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.harness"):
        async with sessions_of(settings(tmp_path / "m", harness="headway.nonsense:run"), time.time):
            pass
