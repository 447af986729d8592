"""P4 on the engine's side: a checkpoint is taken whole or not at all."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from headway.bus.blobs import ObstoreBlobs
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.quant import RolloutDtype, to_rollout
from headway.kernels.weights import init_weights, prepare, round_through
from headway.schemas import signing
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.weight_sync.changes import FILE, read_changes, write_changes
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.publisher import Publisher
from headway.weight_sync.torch_apply import raw_tensors, root
from headway.weight_sync.transfer import Retrier, TransferLimits

from .conftest import TINY, Engine, tiny_weights

PROMPT = [256, *b"fix f.py\n>"]
ONE = "model.layers.1.mlp.experts.2.up_proj.weight"


def partial(engine: Engine, tensors: dict[str, Tensor], name: str = "partial") -> dict[str, object]:
    folder = engine.folder / name
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(TINY.to_hf()))
    return {"model_path": str(folder), "weight_version": "0.9"}


async def test_the_checksum_root_is_that_of_the_loaded_bytes(engine: Engine) -> None:
    status, reply = await engine.post("/weights_checker", {"action": "checksum"})
    assert status == 200
    assert reply["root"] == root(tiny_weights(0))
    assert reply["weight_version"] == "0.0"
    assert set(reply["checksums"]) == set(TINY.tensor_shapes())


async def test_a_partial_checkpoint_changes_exactly_its_tensors(engine: Engine) -> None:
    before = await engine.generate(PROMPT, new=10)
    changed = {ONE: torch.randn(TINY.moe_intermediate_size, TINY.hidden_size).bfloat16()}
    assert (await engine.post("/update_weights_from_disk", partial(engine, changed)))[0] == 200
    assert await engine.root() == root(tiny_weights(0) | changed)
    after = await engine.generate(PROMPT, new=10)
    assert after["meta_info"]["output_token_logprobs"] != before["meta_info"]["output_token_logprobs"]
    await engine.load("0.0", tiny_weights(0))
    assert (await engine.generate(PROMPT, new=10))["output_ids"] == before["output_ids"]


async def test_a_prepared_checkpoint_is_proven_before_it_is_served_and_not_read_again(engine: Engine) -> None:
    changed = {ONE: torch.randn(TINY.moe_intermediate_size, TINY.hidden_size).bfloat16()}
    body = partial(engine, changed)
    status, _ = await engine.post("/prepare_weights_from_disk", body)
    assert status == 200
    assert await engine.root() == root(tiny_weights(0)), "preparing changed what is served"
    shutil.rmtree(body["model_path"])
    status, reply = await engine.post("/update_weights_from_disk", body)
    assert (status, reply["root"]) == (200, root(tiny_weights(0) | changed))
    assert await engine.root() == reply["root"]
    assert (await engine.post("/update_weights_from_disk", body))[0] == 400, "prepared once, exchanged once"


async def test_what_was_prepared_upon_other_weights_is_read_again(engine: Engine) -> None:
    changed = {ONE: torch.randn(TINY.moe_intermediate_size, TINY.hidden_size).bfloat16()}
    body = partial(engine, changed)
    assert (await engine.post("/prepare_weights_from_disk", body))[0] == 200
    await engine.load("0.5", tiny_weights(5))
    status, reply = await engine.post("/update_weights_from_disk", body)
    assert (status, "root" in reply) == (200, False)
    assert await engine.root() == root(tiny_weights(5) | changed)


def wrong_shape(folder: Path) -> None:
    save_file({ONE: torch.zeros(3, 3, dtype=torch.bfloat16)}, folder / "model.safetensors")


def unknown_name(folder: Path) -> None:
    save_file({"model.layers.9.wrong": torch.zeros(1, dtype=torch.bfloat16)}, folder / "model.safetensors")


def wrong_dtype(folder: Path) -> None:
    save_file({ONE: tiny_weights(1)[ONE].float()}, folder / "model.safetensors")


def half_wrong(folder: Path) -> None:
    good = tiny_weights(1)
    save_file({**good, ONE: torch.zeros(3, 3, dtype=torch.bfloat16)}, folder / "model.safetensors")


def cut_off(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}")


def no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def twice(folder: Path) -> None:
    save_file({ONE: tiny_weights(1)[ONE]}, folder / "other.safetensors")


def other_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(TINY.to_hf() | {"num_experts_per_tok": 1}))


def no_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize(
    "spoil",
    [wrong_shape, unknown_name, wrong_dtype, half_wrong, cut_off, huge_header, no_file, twice, other_model, no_config],
)
async def test_a_bad_checkpoint_is_refused_and_the_old_weights_serve_on(
    engine: Engine, spoil: Callable[[Path], None]
) -> None:
    before = await engine.generate(PROMPT, new=10)
    body = partial(engine, {ONE: tiny_weights(1)[ONE]})
    spoil(Path(str(body["model_path"])))
    status, reply = await engine.post("/update_weights_from_disk", body)
    assert status == 400
    assert reply["message"]
    assert await engine.root() == root(tiny_weights(0))
    after = await engine.generate(PROMPT, new=10)
    assert after["output_ids"] == before["output_ids"]
    assert after["meta_info"]["weight_version"] == "0.0"


async def test_the_first_checkpoint_must_be_whole(bare: Engine) -> None:
    status, reply = await bare.post("/update_weights_from_disk", partial(bare, {ONE: tiny_weights(0)[ONE]}))
    assert status == 400
    assert "missing" in reply["message"]
    assert (await bare.get("/ready"))[0] == 503


async def test_weights_are_not_swapped_under_running_requests(engine: Engine) -> None:
    request = asyncio.create_task(engine.generate(PROMPT, new=240))
    await engine.until_sampled(3)
    body = {"model_path": engine.save("next", tiny_weights(1)), "weight_version": "0.1"}
    assert (await engine.post("/update_weights_from_disk", body))[0] == 400
    await engine.post("/pause_generation", {"mode": "in_place"})
    assert (await engine.post("/update_weights_from_disk", body))[0] == 400, "flush_cache under in_place"
    assert await engine.root() == root(tiny_weights(0))
    assert (await engine.post("/update_weights_from_disk", body | {"flush_cache": False}))[0] == 200
    await engine.post("/continue_generation")
    await request


async def test_what_was_loaded_does_not_follow_its_file(engine: Engine) -> None:
    file = engine.folder / "v0.0" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000:] = bytes(1000)
    file.write_bytes(data)
    assert await engine.root() == root(tiny_weights(0))


async def test_weights_that_overflow_fail_their_requests_and_nothing_else(engine: Engine) -> None:
    broken = tiny_weights(0)
    broken["lm_head.weight"] = torch.full_like(broken["lm_head.weight"], float("inf"))
    await engine.load("0.1", broken)
    status, reply = await engine.post("/generate", {"input_ids": PROMPT})
    assert status == 500
    assert "non-finite" in reply["error"]["message"]
    await engine.load("0.2", tiny_weights(0))
    await engine.generate(PROMPT)


@pytest.mark.parametrize("rollout", ["float16", "fp8", "int4"])
async def test_quantised_weights_serve_the_bits_of_the_trainers_forward(bare: Engine, rollout: RolloutDtype) -> None:
    model = dataclasses.replace(TINY, moe_intermediate_size=32)
    masters = init_weights(model, 0)
    stored = to_rollout(masters, rollout)
    folder = bare.folder / rollout
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.to_hf()))
    body = {"model_path": str(folder), "weight_version": "0.0"}
    assert (await bare.post("/update_weights_from_disk", body))[0] == 200
    assert await bare.root() == root(stored)
    reply = await bare.generate(PROMPT, new=20)
    tokens = torch.tensor([*PROMPT, *reply["output_ids"]])
    prepared = prepare(round_through(masters, rollout), model, torch.float32)
    out = forward_full(prepared, model, tokens[None], torch.tensor([len(tokens)]))
    at = torch.arange(len(PROMPT), len(tokens))
    expected, _ = token_logprob(prepared, out.hidden[0, at - 1], tokens[at])
    assert torch.equal(torch.tensor([e[0] for e in reply["meta_info"]["output_token_logprobs"]]), expected)
    scale = next((name for name in stored if "scale" in name), None)
    if scale is not None:
        save_file({**stored, scale: stored[scale].new_ones(3, 3)}, folder / "model.safetensors")
        assert (await bare.post("/update_weights_from_disk", body))[0] == 400


async def stage_changes(
    engine: Engine, before: dict[str, Tensor], after: dict[str, Tensor], name: str
) -> dict[str, object]:
    """A request for the step from one set to the other, as an agent writes it."""
    store = ObstoreBlobs.open("memory://")
    publisher = Publisher(store=store, keys=Keys("run"), private_key=bytes(32))
    mirror = HostMirror(engine.folder / f"mirror-{name}", signing.public_key(bytes(32)), fsync=False)
    retrier = Retrier(limits=TransferLimits(attempts_max=1), rng=random.Random(0))
    fetcher = Fetcher(store=store.once(), keys=Keys("run"), public_key=signing.public_key(bytes(32)), retrier=retrier)
    head = None
    for n, tensors in enumerate((before, after)):
        head, _ = await publisher.publish(Version(0, n), raw_tensors(tensors), head)
        staged = await fetcher.stage(head.version, head.digest, mirror)
        if n:
            write_changes(engine.folder / name, staged, mirror.fresh(staged))
        else:
            mirror.commit(staged)
    return {"model_path": str(engine.folder / name), "weight_version": "0.9"}


def stepped(before: dict[str, Tensor]) -> dict[str, Tensor]:
    """A few elements of most tensors moved, one tensor new as a whole, one that stays."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    for name in sorted(after)[1:]:
        after[name].view(-1)[::97] += 0.5
    after[ONE] = torch.randn(before[ONE].shape).bfloat16()
    return after


async def test_changes_are_written_into_copies_of_the_tensors_that_are_served(engine: Engine) -> None:
    before = tiny_weights(0)
    after = stepped(before)
    body = await stage_changes(engine, before, after, "changes")
    found = read_changes(engine.folder / "changes")
    assert {positions is None for positions, _ in found.values()} == {True, False}
    assert sorted(found) == sorted(after)[1:]
    assert (await engine.post("/prepare_weights_from_disk", body))[0] == 200
    assert await engine.root() == root(before), "preparing changed what is served"
    status, reply = await engine.post("/update_weights_from_disk", body)
    assert (status, reply["root"]) == (200, root(after))
    assert await engine.root() == root(after)


async def test_changes_upon_other_weights_are_seen_by_the_root(engine: Engine) -> None:
    before = tiny_weights(1)
    body = await stage_changes(engine, before, stepped(before), "changes")
    assert (await engine.post("/prepare_weights_from_disk", body))[0] == 200
    _, reply = await engine.post("/update_weights_from_disk", body)
    assert reply["root"] != root(stepped(before))


@pytest.mark.parametrize(
    "arrays",
    [
        {f"{ONE}.positions": np.array([0, 1 << 30], np.int32), f"{ONE}.values": np.zeros(2, np.uint16)},
        {f"{ONE}.positions": np.array([-1], np.int32), f"{ONE}.values": np.zeros(1, np.uint16)},
        {f"{ONE}.positions": np.array([0], np.int32), f"{ONE}.values": np.zeros(2, np.uint16)},
        {f"{ONE}.positions": np.array([0.0], np.float32), f"{ONE}.values": np.zeros(1, np.uint16)},
        {f"{ONE}.positions": np.array([0], np.int32), f"{ONE}.values": np.zeros(1, np.uint32)},
        {f"{ONE}.positions": np.array([0], np.int32)},
        {f"{ONE}.whole": np.zeros(3, np.uint8)},
        {"other.whole": np.zeros(3, np.uint8)},
        {"strange": np.zeros(3, np.uint8)},
        None,
    ],
)
async def test_changes_that_do_not_fit_are_refused_and_the_old_weights_serve_on(engine: Engine, arrays: Any) -> None:
    folder = engine.folder / "bad"
    folder.mkdir()
    if arrays is None:
        (folder / FILE).write_bytes(b"no safetensors")
    else:
        save_arrays(arrays, folder / FILE)
    body = {"model_path": str(folder), "weight_version": "0.9"}
    assert (await engine.post("/update_weights_from_disk", body))[0] == 400
    assert await engine.root() == root(tiny_weights(0))
