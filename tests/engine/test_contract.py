"""One contract for every engine: what an agent relies on, of the local engine and of SGLang alike.

docs/SGLANG.md lists where the two differ and what the agent does about it; those places say so here.
HEADWAY_TEST_ENGINE_URL runs it against an engine that is up already, such as one on a GPU host, whose model must
be that of `servers.SMALL`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from torch import Tensor

from headway.deploy import sglang_server
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.weights import init_weights, prepare
from headway.rollout_agent.client import Completion, EngineClient, EngineInfo, Load, Sampling
from headway.rollout_agent.engine.service import model_config
from headway.rollout_agent.engine_writer import EngineWriter, Unproven
from headway.rollout_agent.model_shape import ModelShape, hf_config
from headway.schemas.errors import ConfigError, InputError, WireError
from headway.schemas.trajectory import Span
from headway.schemas.version import Version

from .servers import Trainer, running, small

CONFIG = small("local")
SHAPE, GEOMETRY = ModelShape.from_hf(hf_config(CONFIG.model)), model_config(CONFIG)
PROMPT = [256, *b"fix f.py\n>"]
CONTEXT = CONFIG.agent.max_session_tokens
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
CLOSE = 0.03
"""How far nine in ten log-probabilities may be from the trainer's fp32 forward: bf16 rounds, and a route may flip."""
_weights: dict[int, dict[str, Tensor]] = {}


def weights(seed: int) -> dict[str, Tensor]:
    """bf16, and large enough that attention and routing are far from uniform."""
    if seed not in _weights:
        _weights[seed] = {n: w.bfloat16() for n, w in init_weights(GEOMETRY, seed).items()}
    return _weights[seed]


@pytest.fixture(scope="module", params=["local", "sglang"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an engine without weights."""
    given = os.environ.get("HEADWAY_TEST_ENGINE_URL")
    if given and request.param == "sglang":
        yield given
        return
    if request.param == "sglang":
        try:
            sglang_server.find()
        except ConfigError as error:
            pytest.skip(f"SGLang's environment is missing: {error.hint}")
    with running(small(request.param), tmp_path_factory.mktemp(request.param)) as (url, _):
        yield url


@dataclasses.dataclass
class Bench:
    """An engine, what the agent keeps beside it, and the weights it serves."""

    client: EngineClient
    writer: EngineWriter
    trainer: Trainer
    served: dict[str, Tensor]

    @property
    def info(self) -> EngineInfo:
        assert self.writer.info is not None
        return self.writer.info

    @property
    def midway_s(self) -> float:
        """After it a request for 200 tokens has some and not all: SGLang takes about 3 ms a token here, ours 1."""
        return 0.05 if self.info.kind == "headway" else 0.2

    async def serve(self, tensors: dict[str, Tensor]) -> None:
        """Swap as an agent does."""
        staged = self.trainer.stage(tensors)
        await self.writer.write(await self.writer.prepare(self.trainer.mirror, staged))
        self.trainer.mirror.commit(staged)
        self.served = tensors

    async def generate(self, prompt: list[int] = PROMPT, **options: Any) -> Completion:
        sampling = Sampling(
            max_new_tokens=options.pop("new", 8),
            temperature=options.pop("temperature", 1.0),
            seed=options.pop("seed", 1),
            stop_ids=tuple(options.pop("stop_ids", ())),
        )
        return await self.client.generate(prompt, sampling, rid=f"r{time.monotonic_ns()}", timeout_s=60, **options)

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as http, http.post(self.client.url + path, json=body) as reply:
            return reply.status, await reply.json(content_type=None)


@pytest.fixture
async def bench(server: str, tmp_path: Path) -> AsyncIterator[Bench]:
    """An engine that serves a fresh version of weights(0), proven."""
    async with aiohttp.ClientSession() as http:
        client = EngineClient(http, server, SHAPE)
        writer = EngineWriter(
            engine=client, model_config=hf_config(CONFIG.model), scratch=tmp_path / "staged", clock=time.perf_counter
        )
        found = Bench(client, writer, Trainer(tmp_path / "mirror"), {})
        await found.serve(weights(0))
        await writer.allow_sparse(found.trainer.mirror)
        yield found


def forward(tensors: dict[str, Tensor], tokens: list[int]) -> tuple[Any, Any]:
    prepared = prepare(tensors, GEOMETRY, torch.float32)
    return prepared, forward_full(prepared, GEOMETRY, torch.tensor([tokens]), torch.tensor([len(tokens)]))


def assert_close(given: Any, due: Tensor) -> None:
    """Of three quarters of the tokens: an engine in bf16 may route one elsewhere, which moves it and its successors."""
    assert np.quantile(np.abs(due.numpy() - given), 0.75) < CLOSE


def assert_true(prompt: list[int], found: Completion, tensors: dict[str, Tensor], temperature: float = 1.0) -> None:
    """Log-probabilities and routes are those of the trainer's own forward."""
    tokens = [*prompt, *found.token_ids]
    prepared, out = forward(tensors, tokens)
    at = torch.arange(len(prompt), len(tokens))
    due, _ = token_logprob(prepared, out.hidden[0, at - 1], torch.tensor(tokens)[at], temperature)
    assert_close(found.logprobs, due)
    assert found.routes is not None
    assert found.routes.shape == (len(tokens) - 1, GEOMETRY.num_hidden_layers, GEOMETRY.num_experts_per_tok)
    same = found.routes == out.routes[0, :-1].numpy()
    assert same.all(axis=-1).mean() > 0.9, "routes in another order, or of other tokens"


async def test_ids_logprobs_routes_and_counts_are_those_of_the_trainers_forward(bench: Bench) -> None:
    prompts = [[*PROMPT, *range(n)] for n in (1, 17, 60)]
    for prompt, found in zip(
        prompts, await asyncio.gather(*(bench.generate(p, seed=n) for n, p in enumerate(prompts))), strict=True
    ):
        assert len(found.token_ids) == 8
        assert found.stop == "length"
        assert [(s.start, s.end) for s in found.spans] == [(0, 8)]
        assert_true(prompt, found, bench.served)


async def test_a_logprob_is_of_the_logits_divided_by_the_temperature(bench: Bench) -> None:
    assert_true(PROMPT, await bench.generate(temperature=0.6), bench.served, 0.6)


async def test_seeds_decide_what_is_drawn(bench: Bench) -> None:
    one, other = await bench.generate(seed=5, new=16), await bench.generate(seed=6, new=16)
    assert one.token_ids != other.token_ids
    again = await bench.generate(seed=5, new=16)
    if bench.info.kind == "headway":
        assert again.token_ids == one.token_ids
    else:
        assert again.token_ids  # SGLang heeds `sampling_seed` in deterministic mode alone


async def test_a_stop_id_ends_the_output_and_stays_in_it(bench: Bench) -> None:
    greedy = await bench.generate(temperature=0.0, new=12)
    stop = greedy.token_ids[4]
    found = await bench.generate(temperature=0.0, new=12, stop_ids=[stop])
    assert found.token_ids == greedy.token_ids[: greedy.token_ids.index(stop) + 1]
    assert found.stop == "stop"


async def test_routes_can_begin_at_a_row_and_cover_rows_from_the_prefix_cache(bench: Bench) -> None:
    first = await bench.generate(new=8)
    longer = [*PROMPT, *first.token_ids, 65, 66]
    second = await bench.generate(longer, new=4)
    assert second.cached_tokens > 0
    assert_true(longer, second, bench.served)
    assert first.routes is not None
    assert second.routes is not None
    assert np.array_equal(first.routes, second.routes[: len(first.routes)])
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.0},
        "return_routed_experts": True,
    }
    whole, tail = [
        (await bench.post("/generate", body | {"routed_experts_start_len": start}))[1]["meta_info"]["routed_experts"]
        for start in (0, 5)
    ]
    a_row = GEOMETRY.num_hidden_layers * GEOMETRY.num_experts_per_tok * 4 * 4 // 3
    assert len(whole) - len(tail) == pytest.approx(5 * a_row, abs=4)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_spans_tell_which_weights_wrote_which_token(bench: Bench, mode: str) -> None:
    before = Version(0, bench.trainer.mirror.head.version.n)  # type: ignore[union-attr]
    staged = bench.trainer.stage(weights(1))
    plan, after = await bench.writer.prepare(bench.trainer.mirror, staged), staged.manifest.version
    running = asyncio.create_task(bench.generate(new=230))
    await asyncio.sleep(bench.midway_s)
    await bench.writer.write(plan, in_place=mode == "in_place")
    found = await running
    assert [span.version for span in found.spans] == [before, after]
    old = found.spans[0].end
    tokens = [*PROMPT, *found.token_ids]
    prepared, out = forward(weights(0), tokens)
    at = torch.arange(len(PROMPT), len(PROMPT) + old)
    due, _ = token_logprob(prepared, out.hidden[0, at - 1], torch.tensor(tokens)[at], 1.0)
    assert_close(found.logprobs[:old], due)
    rows, first_new = len(tokens) - 1, len(PROMPT) - 1 + old
    kept = [Span(start=0, end=first_new, version=before), Span(start=first_new, end=rows, version=after)]
    assert found.route_spans == (kept if mode == "in_place" else [Span(start=0, end=rows, version=after)])
    if mode == "retract":
        prepared, out = forward(weights(1), tokens)
        at = torch.arange(len(PROMPT) + old, len(tokens))
        due, _ = token_logprob(prepared, out.hidden[0, at - 1], torch.tensor(tokens)[at], 1.0)
        assert_close(found.logprobs[old:], due)


async def test_a_pause_of_mode_abort_returns_what_was_sampled(bench: Bench) -> None:
    running = asyncio.create_task(bench.generate(new=200))
    await asyncio.sleep(bench.midway_s)
    await bench.client.pause("abort")
    found = await running
    await bench.client.resume()
    assert found.stop == "abort"
    assert 0 < len(found.token_ids) == len(found.logprobs) < 200


async def test_an_aborted_request_returns_what_was_sampled(bench: Bench) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "rid": "doomed"}
    running = asyncio.create_task(bench.post("/generate", body))
    await asyncio.sleep(bench.midway_s)
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{bench.client.url}/abort_request", json={"rid": "doomed"}) as reply,
    ):
        assert reply.status == 200
    status, found = await running
    assert status == 200
    assert found["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(found["output_ids"]) < 200


async def test_a_paused_engine_is_ready_and_lets_new_requests_wait(bench: Bench) -> None:
    await bench.client.pause("retract")
    waiting = asyncio.create_task(bench.generate())
    try:
        assert await bench.client.served() == str(bench.trainer.mirror.head.version)  # type: ignore[union-attr]
        await asyncio.sleep(0.2)
        assert not waiting.done()
    finally:
        await bench.client.resume()
    await waiting


async def test_an_engine_tells_how_full_its_cache_is(bench: Bench) -> None:
    async def loaded(running: bool) -> Load:
        async with asyncio.timeout(20):
            while True:
                found = await bench.client.load()
                assert found is not None
                if bool(found.tokens) == bool(found.running) == running:  # SGLang's may differ for a moment
                    return found
                await asyncio.sleep(0.01)

    idle = await loaded(False)
    assert (idle.running, idle.waiting) == (0, 0)
    assert idle.capacity_tokens >= CONTEXT
    asked = [asyncio.create_task(bench.generate(new=200)) for _ in range(2)]
    busy = await loaded(True)
    assert 1 <= busy.running <= 2
    assert 0 < busy.occupancy < 1
    assert busy.capacity_tokens == idle.capacity_tokens
    await asyncio.gather(*asked)
    again = await loaded(False)
    assert again.prefilled_tokens > idle.prefilled_tokens


async def test_a_flush_forgets_prefixes_and_so_does_another_salt(bench: Bench) -> None:
    ids = list(PROMPT)

    async def cached_of_a_next_turn() -> int:
        nonlocal ids
        found = await bench.generate(ids, new=2)
        ids = [*ids, *found.token_ids, 65]
        return found.cached_tokens

    await cached_of_a_next_turn()
    assert await cached_of_a_next_turn() > 0
    bench.client.salt = "another"
    assert await cached_of_a_next_turn() == 0
    assert await cached_of_a_next_turn() > 0
    async with aiohttp.ClientSession() as http, http.post(f"{bench.client.url}/flush_cache") as reply:
        assert reply.status == 200
    assert await cached_of_a_next_turn() == 0


async def test_a_prompt_over_the_context_is_refused_and_harms_nobody(bench: Bench) -> None:
    with pytest.raises(InputError):
        await bench.generate([1] * (CONTEXT + 1))
    await bench.generate()


async def test_an_id_outside_the_vocabulary_never_reaches_the_engine(bench: Bench) -> None:
    for prompt in ([256, GEOMETRY.vocab_size], [256, -1], []):
        with pytest.raises(InputError):
            await bench.generate(prompt)
    await bench.generate()


async def test_an_unknown_sampling_option_is_refused(bench: Bench) -> None:
    status, _ = await bench.post("/generate", {"input_ids": PROMPT, "sampling_params": {"best_off": 2}})
    assert status == 400


async def test_a_partial_checkpoint_changes_exactly_its_tensors(bench: Bench) -> None:
    changed = {**weights(0), EXPERT: weights(1)[EXPERT]}
    staged = bench.trainer.stage(changed)
    plan = dataclasses.replace(await bench.writer.prepare(bench.trainer.mirror, staged))
    assert set(staged.patches) == {EXPERT}
    await bench.writer.write(plan)
    assert_true(PROMPT, await bench.generate(), changed)


async def test_weights_never_change_under_running_requests_unless_paused(bench: Bench) -> None:
    """The local engine refuses; SGLang loads when the batch has ended. Either way no token is of both."""
    staged = bench.trainer.stage(weights(1))
    plan = await bench.writer.prepare(bench.trainer.mirror, staged)
    running = asyncio.create_task(bench.generate(new=200))
    await asyncio.sleep(bench.midway_s)
    update = asyncio.create_task(bench.client.update(plan.folder, staged.manifest.version, flush=True))
    found = await running
    assert {span.version for span in found.spans} == {bench.trainer.mirror.head.version}  # type: ignore[union-attr]
    assert_true(PROMPT, found, weights(0))
    (outcome,) = await asyncio.gather(update, return_exceptions=True)
    assert isinstance(outcome, InputError) if bench.info.kind == "headway" else outcome is None


async def test_our_loader_writes_sparse_changes_in_place_where_the_engine_offers_it(bench: Bench) -> None:
    changed = {name: tensor.clone() for name, tensor in weights(0).items()}
    rng = torch.Generator().manual_seed(3)
    for tensor in changed.values():
        flat = tensor.view(-1)
        where = torch.randperm(len(flat), generator=rng)[: max(1, len(flat) // 100)]
        flat[where] += 0.125
    staged = bench.trainer.stage(changed)
    plan = await bench.writer.prepare(bench.trainer.mirror, staged)
    assert plan.way == ("sparse" if bench.info.loader else "disk")
    await bench.writer.write(plan)
    assert_true(PROMPT, await bench.generate(), changed)


async def test_weights_of_another_shape_or_name_never_reach_the_engine(bench: Bench) -> None:
    before = await bench.client.checksums()
    wrong_shape = {**weights(0), EXPERT: torch.zeros(3, 3, dtype=torch.bfloat16)}
    unknown = {**weights(0), "model.layers.9.wrong": torch.zeros(1, dtype=torch.bfloat16)}
    for wrong in (wrong_shape, unknown):
        staged = bench.trainer.stage(wrong)
        with pytest.raises((WireError, InputError)):
            await bench.writer.write(await bench.writer.prepare(bench.trainer.mirror, staged))
        await bench.client.resume()
        assert await bench.client.checksums() == before
    await bench.generate()


async def test_an_update_that_says_less_than_it_changed_is_not_believed(bench: Bench) -> None:
    """An engine whose bytes are not the version's stays paused, and its next write is a whole checkpoint."""
    staged = bench.trainer.stage(weights(1))
    plan = await bench.writer.prepare(bench.trainer.mirror, staged)
    lie = bench.trainer.stage({**weights(1), EXPERT: weights(2)[EXPERT]})
    due = (await bench.writer.prepare(bench.trainer.mirror, lie)).sums
    plan = await bench.writer.prepare(bench.trainer.mirror, staged)
    with pytest.raises(Unproven):
        await bench.writer.write(dataclasses.replace(plan, sums=due))
    assert bench.writer.holds is None
    again = await bench.writer.prepare(bench.trainer.mirror, staged)
    assert again.way == "full"
    await bench.writer.write(again)
    assert_true(PROMPT, await bench.generate(), weights(1))


async def test_an_engine_that_already_holds_the_version_is_adopted(bench: Bench) -> None:
    await bench.client.pause("retract")
    assert await bench.writer.adopt(bench.trainer.mirror)
    await bench.generate()
    bench.trainer.mirror.commit(bench.trainer.stage(weights(1)))
    assert not await bench.writer.adopt(bench.trainer.mirror)
