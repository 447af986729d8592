"""P7 on the engine's side: a token is a function of seed and position, its log-probability that of the
full forward under the version that sampled it, whatever else was in the batch and however it got there."""

from __future__ import annotations

import asyncio
import base64
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.decoder import forward_full, logits, token_logprob
from headway.kernels.weights import prepare
from headway.rollout_agent.engine.sampling import draw

from .conftest import TINY, Engine, running_engine, tiny_weights

PROMPT = [256, *b"fix f.py\n>"]


def routes_of(reply: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
    flat = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4")
    return flat.reshape(-1, TINY.num_hidden_layers, TINY.num_experts_per_tok)


def assert_replays(
    prompt: list[int], reply: dict[str, Any], versions: dict[str, dict[str, Tensor]], dtype: torch.dtype = torch.float32
) -> None:
    """Every log-probability and every route row, bit for bit, from one full forward a version."""
    tokens, meta = [*prompt, *reply["output_ids"]], reply["meta_info"]
    given = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]], dtype=torch.float32)
    routes, seen = routes_of(reply), 0
    assert len(routes) == len(tokens) - 1
    full = {}
    for version, weights in versions.items():
        prepared = prepare(weights, TINY, dtype)
        full[version] = (prepared, forward_full(prepared, TINY, torch.tensor([tokens]), torch.tensor([len(tokens)])))
    for span in meta["weight_versions"]:
        prepared, out = full[span["version"]]
        at = torch.arange(span["start"], span["end"]) + len(prompt)
        expected, _ = token_logprob(prepared, out.hidden[0, at - 1], torch.tensor(tokens)[at], 1.0)
        assert torch.equal(given[span["start"] : span["end"]], expected)
        assert span["start"] == seen
        seen = span["end"]
    assert seen == len(reply["output_ids"])
    for span in meta["routed_experts_versions"]:
        expected_routes = full[span["version"]][1].routes[0, span["start"] : span["end"]]
        assert np.array_equal(routes[span["start"] : span["end"]], expected_routes.numpy())
    assert meta["routed_experts_versions"][-1]["end"] == len(routes)


async def test_tokens_depend_on_seed_and_position_alone(engine: Engine) -> None:
    alone = [await engine.generate([*PROMPT, i], seed=i, new=12) for i in range(6)]
    await engine.post("/flush_cache")
    rng = random.Random(1)
    noise = [
        engine.generate([rng.randrange(260) for _ in range(rng.randrange(1, 90))], seed=99, new=30) for _ in range(5)
    ]
    crowd = await asyncio.gather(*noise, *(engine.generate([*PROMPT, i], seed=i, new=12) for i in reversed(range(6))))
    for one, other in zip(alone, reversed(crowd[5:]), strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert one["meta_info"]["output_token_logprobs"] == other["meta_info"]["output_token_logprobs"]
        assert one["meta_info"]["routed_experts"] == other["meta_info"]["routed_experts"]
    assert len({tuple(reply["output_ids"]) for reply in alone}) > 1


async def test_each_token_is_what_its_seed_and_position_draw_from_the_full_forward(engine: Engine) -> None:
    reply = await engine.generate(PROMPT, seed=11, new=20)
    tokens = torch.tensor([*PROMPT, *reply["output_ids"]])
    prepared = prepare(tiny_weights(0), TINY, torch.float32)
    out = forward_full(prepared, TINY, tokens[None], torch.tensor([len(tokens)]))
    at = list(range(len(PROMPT), len(tokens)))
    scores = logits(prepared, out.hidden[0, len(PROMPT) - 1 : -1])
    assert draw(scores, [1.0] * 20, [11] * 20, at).tolist() == reply["output_ids"]


async def test_a_completion_cut_in_two_is_the_same_completion(engine: Engine) -> None:
    whole = await engine.generate(PROMPT, seed=4, new=12)
    first = await engine.generate(PROMPT, seed=4, new=5)
    second = await engine.generate([*PROMPT, *first["output_ids"]], seed=4, new=7)
    assert whole["output_ids"] == first["output_ids"] + second["output_ids"]
    other = await engine.generate([65, *PROMPT[1:]], seed=4, new=12)
    assert other["output_ids"] != whole["output_ids"]


async def test_logprobs_equal_the_full_forward_bit_for_bit(engine: Engine) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(260) for _ in range(rng.choice([1, 3, 17, 40, 100]))] for _ in range(12)]
    replies = await asyncio.gather(*(engine.generate(p, seed=i, new=20) for i, p in enumerate(prompts)))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert_replays(prompt, reply, {"0.0": tiny_weights(0)})


async def test_a_session_continues_in_its_slot_with_the_same_bits(engine: Engine) -> None:
    ids, last = list(PROMPT), 0
    for _ in range(4):
        reply = await engine.generate(ids, seed=5, new=7)
        assert reply["meta_info"]["cached_tokens"] == last
        assert_replays(ids, reply, {"0.0": tiny_weights(0)})
        last = len(ids) + 6
        ids = [*ids, *reply["output_ids"], *b"ok\n>"]
    await engine.post("/flush_cache")
    fresh = await engine.generate(ids[: last + 1 - 7], seed=5, new=7)
    assert fresh["meta_info"]["cached_tokens"] == 0
    assert fresh["output_ids"] == reply["output_ids"]
    assert fresh["meta_info"]["routed_experts"] == reply["meta_info"]["routed_experts"]


async def test_prefixes_are_shared_across_neither_salts_nor_versions(engine: Engine) -> None:
    first = await engine.generate(PROMPT, new=4, cache_salt="a")
    longer = [*PROMPT, *first["output_ids"], 65]
    other = await engine.generate(longer, new=1, cache_salt="b")
    assert other["meta_info"]["cached_tokens"] == 0
    same = await engine.generate(longer, new=1, cache_salt="a")
    assert same["meta_info"]["cached_tokens"] == len(PROMPT) + 3
    await engine.load("0.1", tiny_weights(1))
    moved = await engine.generate([*longer, *same["output_ids"], 66], new=4, cache_salt="a")
    assert moved["meta_info"]["cached_tokens"] == 0
    assert_replays([*longer, *same["output_ids"], 66], moved, {"0.1": tiny_weights(1)})


async def swap_midway(engine: Engine, mode: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    running = [asyncio.create_task(engine.generate(p, seed=i, new=60)) for i, p in enumerate(prompts)]
    await engine.until_sampled(20 * len(prompts))
    assert (await engine.post("/pause_generation", {"mode": mode}))[0] == 200
    assert not any(task.done() for task in running), "the pause came too late to test anything"
    await engine.load("0.1", tiny_weights(1), flush_cache=mode != "in_place")
    await engine.post("/continue_generation")
    return await asyncio.gather(*running)


async def test_a_retract_swap_keeps_tokens_and_replaces_the_prefix_routes(engine: Engine) -> None:
    prompts = [[*PROMPT, *range(i)] for i in (1, 20, 50)]
    for prompt, reply in zip(prompts, await swap_midway(engine, "retract", prompts), strict=True):
        spans = reply["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["0.0", "0.1"]
        assert [span["version"] for span in reply["meta_info"]["routed_experts_versions"]] == ["0.1"]
        assert_replays(prompt, reply, {"0.0": tiny_weights(0), "0.1": tiny_weights(1)})
    assert engine.core.counters.retracted_tokens > 0


async def test_a_retract_is_not_weakened_by_a_second_pause(engine: Engine) -> None:
    request = asyncio.create_task(engine.generate(PROMPT, new=60))
    await engine.until_sampled(10)
    for mode in ("retract", "in_place"):
        await engine.post("/pause_generation", {"mode": mode})
    await engine.load("0.1", tiny_weights(1), flush_cache=False)
    await engine.post("/continue_generation")
    assert_replays(PROMPT, await request, {"0.0": tiny_weights(0), "0.1": tiny_weights(1)})


async def test_an_in_place_swap_keeps_the_cache_and_says_so(engine: Engine) -> None:
    (reply,) = await swap_midway(engine, "in_place", [PROMPT])
    old, new = reply["meta_info"]["weight_versions"]
    assert (old["version"], new["version"]) == ("0.0", "0.1")
    rows = reply["meta_info"]["routed_experts_versions"]
    assert rows[0] == {"version": "0.0", "start": 0, "end": len(PROMPT) + old["end"] - 1}
    assert rows[1]["version"] == "0.1"
    assert engine.core.counters.retracted_tokens == 0
    follow_up = await engine.generate([*PROMPT, *reply["output_ids"], 65], new=1)
    assert follow_up["meta_info"]["cached_tokens"] == 0, "a cache of two versions was continued"


async def test_temperature_zero_takes_the_likeliest_token(engine: Engine) -> None:
    reply = await engine.generate(PROMPT, new=10, sampling={"temperature": 0})
    tokens = [*PROMPT, *reply["output_ids"]]
    prepared = prepare(tiny_weights(0), TINY, torch.float32)
    out = forward_full(prepared, TINY, torch.tensor([tokens]), torch.tensor([len(tokens)]))
    best = (out.hidden[0].float() @ prepared.head.T).argmax(-1)
    assert reply["output_ids"] == best[len(PROMPT) - 1 : -1].tolist()
    assert_replays(PROMPT, reply, {"0.0": tiny_weights(0)})


async def test_a_temperature_divides_the_logits_of_the_logprob(engine: Engine) -> None:
    reply = await engine.generate(PROMPT, new=10, sampling={"temperature": 0.7})
    tokens = torch.tensor([*PROMPT, *reply["output_ids"]])
    prepared = prepare(tiny_weights(0), TINY, torch.float32)
    out = forward_full(prepared, TINY, tokens[None], torch.tensor([len(tokens)]))
    at = torch.arange(len(PROMPT), len(tokens))
    expected, _ = token_logprob(prepared, out.hidden[0, at - 1], tokens[at], 0.7)
    given = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    assert torch.equal(given, expected)


async def test_bfloat16_keeps_the_same_promise(tmp_path: Path) -> None:
    async with running_engine(tmp_path, compute_dtype=torch.bfloat16) as engine:
        await engine.load("0.0", tiny_weights(0))
        prompts = [[*PROMPT, *range(i)] for i in (1, 9, 40, 120)]
        replies = await asyncio.gather(*(engine.generate(prompt, new=20) for prompt in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert_replays(prompt, reply, {"0.0": tiny_weights(0)}, torch.bfloat16)


async def test_a_long_prompt_is_cut_into_chunks_with_the_same_bits(engine: Engine) -> None:
    prompt = [i % 256 for i in range(200)]  # prefill_tokens is 64
    assert_replays(prompt, await engine.generate(prompt, new=5), {"0.0": tiny_weights(0)})


async def test_routes_may_be_asked_for_from_a_later_row(engine: Engine) -> None:
    whole = routes_of(await engine.generate(PROMPT, new=5))
    part = await engine.generate(PROMPT, new=5, routed_experts_start_len=7)
    assert np.array_equal(routes_of(part), whole[7:])
    assert part["meta_info"]["routed_experts_versions"] == [{"version": "0.0", "start": 7, "end": len(whole)}]
