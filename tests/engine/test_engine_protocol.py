"""The engine speaks SGLang's protocol and refuses what it must."""

from __future__ import annotations

import asyncio
import base64
import math
import threading
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from headway.rollout_agent.engine.service import check_exposure
from headway.schemas.errors import ConfigError

from .conftest import TINY, Engine, running_engine, tiny_weights

PROMPT = [256, *b"fix f.py\n>"]


async def test_a_reply_has_the_shapes_of_sglang(engine: Engine) -> None:
    reply = await engine.generate(PROMPT, new=6, rid="r1")
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == meta["completion_tokens"] == 6
    assert meta["id"] == "r1"
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["cached_tokens"] == 0
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["weight_version"] == "0.0"
    assert meta["weight_versions"] == [{"version": "0.0", "start": 0, "end": 6}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[t, None] for t in reply["output_ids"]]
    assert all(math.isfinite(entry[0]) and entry[0] <= 0 for entry in meta["output_token_logprobs"])
    rows = len(PROMPT) + 6 - 1
    routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
    routes = routes.reshape(rows, TINY.num_hidden_layers, TINY.num_experts_per_tok)
    assert routes.min() >= 0
    assert routes.max() < TINY.num_experts
    assert meta["routed_experts_versions"] == [{"version": "0.0", "start": 0, "end": rows}]


async def test_a_stop_token_ends_the_output_and_stays_in_it(engine: Engine) -> None:
    free = await engine.generate(PROMPT, seed=3, new=20)
    stop = free["output_ids"][4]
    first = free["output_ids"].index(stop)
    stopped = await engine.generate(PROMPT, seed=3, new=20, sampling={"stop_token_ids": [stop]})
    assert stopped["output_ids"] == free["output_ids"][: first + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


async def test_nothing_is_generated_before_the_first_weights(bare: Engine) -> None:
    status, reply = await bare.get("/ready")
    assert status == 503
    assert "no weights" in reply["message"]
    assert (await bare.post("/generate", {"input_ids": PROMPT}))[0] == 503
    assert (await bare.get("/health"))[0] == 200
    await bare.load("0.0", tiny_weights(0))
    assert await bare.get("/ready") == (200, {"ready": True, "weight_version": "0.0"})
    await bare.generate(PROMPT)


def sampled(**options: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": options}


BAD = {
    "no body": "",
    "no JSON": "{",
    "a list": [1],
    "deep": "[" * 100_000,
    "unknown key": {"input_ids": PROMPT, "prompt": "x"},
    "unknown sampling key": sampled(best_of=2),
    "top_p": sampled(top_p=0.9),
    "top_k": sampled(top_k=5),
    "min_p": sampled(min_p=0.1),
    "a penalty": sampled(repetition_penalty=1.1),
    "a grammar": sampled(regex="a*"),
    "two samples": sampled(n=2),
    "stream": {"input_ids": PROMPT, "stream": True},
    "no ids": {"sampling_params": {}},
    "empty ids": {"input_ids": []},
    "an id past the vocabulary": {"input_ids": [260]},
    "a negative id": {"input_ids": [-1]},
    "a bool id": {"input_ids": [True]},
    "a float id": {"input_ids": [1.5]},
    "a prompt over the context": {"input_ids": [1] * 256},
    "an output over the context": {"input_ids": [1] * 200, "sampling_params": {"max_new_tokens": 57}},
    "no new tokens": sampled(max_new_tokens=0),
    "heat": sampled(temperature=-1),
    "infinite heat": '{"input_ids": [1], "sampling_params": {"temperature": Infinity}}',
    "a huge seed": sampled(sampling_seed=1 << 63),
    "a long rid": {"input_ids": PROMPT, "rid": "x" * 1000},
    "a routes start past the prompt": {
        "input_ids": PROMPT,
        "routed_experts_start_len": 12,
        "return_routed_experts": True,
    },
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
async def test_a_bad_request_is_answered_with_400_and_harms_nobody(engine: Engine, body: Any) -> None:
    options = {"data": body} if isinstance(body, str) else {"json": body}
    status, reply = await engine.post("/generate", **options)
    assert status == 400
    assert reply["message"]
    await engine.generate(PROMPT, new=2)


@pytest.mark.parametrize(
    "path",
    ["/pause_generation", "/continue_generation", "/update_weights_from_disk", "/weights_checker", "/abort_request"],
)
async def test_control_requests_refuse_unknown_keys_and_empty_bodies(engine: Engine, path: str) -> None:
    assert (await engine.post(path, {"nonsense": 1}))[0] == 400
    assert (await engine.post(path, data=""))[0] == 400


async def test_a_rid_in_use_is_refused(engine: Engine) -> None:
    await engine.post("/pause_generation", {"mode": "retract"})
    first = asyncio.create_task(engine.generate(PROMPT, rid="twin"))
    await asyncio.sleep(0.05)
    assert (await engine.post("/generate", {"input_ids": PROMPT, "rid": "twin"}))[0] == 400
    await engine.post("/continue_generation")
    await first


async def test_abort_returns_the_partial_output(engine: Engine) -> None:
    request = asyncio.create_task(engine.generate(PROMPT, new=240, rid="long"))
    await engine.until_sampled(5)
    status, reply = await engine.post("/abort_request", {"rid": "long"})
    assert status == 200
    assert reply["message"] == "1 aborted"
    partial = await request
    meta = partial["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 5 <= len(partial["output_ids"]) == len(meta["output_token_logprobs"]) < 240
    assert meta["weight_versions"] == [{"version": "0.0", "start": 0, "end": len(partial["output_ids"])}]


async def test_a_pause_of_mode_abort_ends_what_runs(engine: Engine) -> None:
    request = asyncio.create_task(engine.generate(PROMPT, new=240))
    await engine.until_sampled(1)
    await engine.post("/pause_generation", {"mode": "abort"})
    assert (await request)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_new_requests_wait_while_paused(engine: Engine) -> None:
    await engine.post("/pause_generation", {"mode": "in_place"})
    request = asyncio.create_task(engine.generate(PROMPT))
    await asyncio.sleep(0.1)
    assert not request.done()
    assert (await engine.get("/health"))[0] == 200
    assert (await engine.get("/v1/loads"))[1]["loads"][0]["num_waiting_reqs"] == 1
    await engine.post("/continue_generation")
    await request


async def test_a_client_that_hangs_up_frees_its_place(engine: Engine) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await engine.post(
            "/generate",
            json={"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 240}},
            timeout=aiohttp.ClientTimeout(total=0.05),
        )
    await engine.until_load("num_running_reqs", 0)
    assert engine.core.counters.sampled_tokens < 240


async def test_open_requests_are_bounded(tmp_path: Path) -> None:
    async with running_engine(tmp_path, queued_max=2, max_batch=2) as engine:
        await engine.load("0.0", tiny_weights(0))
        await engine.post("/pause_generation", {"mode": "retract"})
        waiting = [asyncio.create_task(engine.generate([1], new=1)) for _ in range(4)]
        await engine.until_load("num_waiting_reqs", 4)
        assert (await engine.post("/generate", {"input_ids": [1]}))[0] == 503
        await engine.post("/continue_generation")
        await asyncio.gather(*waiting)
        await engine.generate([1], new=1)


async def test_a_key_guards_everything_but_health(tmp_path: Path) -> None:
    async with running_engine(tmp_path, key="secret") as engine:
        assert (await engine.get("/health"))[0] == 200
        assert (await engine.post("/generate", {"input_ids": PROMPT}))[0] == 401
        for given, status in (("Bearer wrong", 401), ("Bearer secret", 503)):
            headers = {"Authorization": given}
            assert (await engine.post("/generate", json={}, headers=headers))[0] == status


def test_an_engine_that_others_reach_needs_a_key() -> None:
    check_exposure("127.0.0.1", "")
    check_exposure("::1", "")
    check_exposure("0.0.0.0", "secret")
    for host in ("0.0.0.0", "10.0.0.1", "example.org", "::"):
        with pytest.raises(ConfigError, match="without a key"):
            check_exposure(host, "")


async def test_a_control_request_whose_client_has_hung_up_does_not_stop_the_engine(engine: Engine) -> None:
    blocked, go_on = threading.Event(), threading.Event()
    engine.core.call(lambda: (blocked.set(), go_on.wait(10)))
    await asyncio.to_thread(blocked.wait, 10)
    given_up = engine.core.call(engine.core.loads)
    assert given_up.cancel()
    go_on.set()
    assert (await engine.generate([1, 2, 3]))["output_ids"]
    assert engine.fatal == []
