"""A staged step, scattered into a model's fused tensors, gives the bytes that loading it whole would give."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.schemas.errors import WireError
from headway.schemas.manifest import Manifest, root_of
from headway.schemas.version import Version
from headway.weight_sync import sglang_loader
from headway.weight_sync.codec import U8
from headway.weight_sync.layouts import Fused, Layout, Rank, fuse
from headway.weight_sync.scatter import read_results, write_scatter
from headway.weight_sync.serving_sums import Kind, ServingSums, gpu_sum
from headway.weight_sync.tensors import table_of
from headway.weight_sync.torch_apply import raw_tensors

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "mlp_only_layers": [0],
}
LAYOUT = Layout.from_hf(json.dumps(CONFIG).encode())
Weights = dict[str, torch.Tensor]
RANKS = [[Rank()], [Rank(tp=2, rank=r) for r in range(2)], [Rank(tp=4, rank=r, ep=2) for r in range(4)]]


def some(seed: int) -> Weights:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng).bfloat16() for name, shape in LAYOUT.sources.items()}


def step(before: Weights, share: float) -> Weights:
    """`before` with that share of the elements of each tensor changed."""
    rng, after = torch.Generator().manual_seed(9), {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        flat = tensor.view(-1)
        flat[torch.randperm(len(flat), generator=rng)[: int(share * len(flat))]] += 1.0
    return after


def raw(weights: Weights) -> dict[str, U8]:
    return {name: found.data for name, found in raw_tensors(weights).items()}


def manifest(weights: Weights) -> Manifest:
    table = table_of(raw_tensors(weights))
    none = {"parent": None, "parent_root": None, "parent_manifest": None}
    return Manifest(version=Version(0, 1), root=root_of(table), tensors=table, shards=(), **none)


def live(fused: dict[str, Fused], weights: Weights) -> torch.nn.Module:
    """A module that holds a rank's fused tensors, under their dotted names."""
    model = torch.nn.Module()
    for name, tensor in fused.items():
        data = fuse(tensor, raw(weights), LAYOUT.sources, 2).copy()
        *path, leaf = name.split(".")
        node = model
        for part in path:
            if not hasattr(node, part):
                node.add_module(part, torch.nn.Module())
            node = getattr(node, part)
        values = torch.from_numpy(data).view(torch.bfloat16).view(tensor.shape)
        node.register_parameter(leaf, torch.nn.Parameter(values, requires_grad=False))
    return model


@pytest.mark.parametrize("ranks", RANKS, ids=["tp1", "tp2", "tp4-ep2"])
@pytest.mark.parametrize("share", [0.01, 0.9])
def test_every_rank_ends_with_its_part_of_the_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: list[Rank], share: float
) -> None:
    before, tables = some(1), [LAYOUT.fused(rank) for rank in ranks]
    after = step(before, share)
    size_bytes = write_scatter(tmp_path / "s", tables, manifest(after), raw(before), raw(after))
    if share < 0.1:
        assert size_bytes < 0.3 * sum(len(data) for data in raw(after).values()) * len(ranks)
    for rank, fused in zip(ranks, tables, strict=True):
        model = live(fused, before)
        monkeypatch.setattr(sglang_loader, "_rank", lambda rank=rank: rank.rank)
        sglang_loader.load(model, [(str(tmp_path / "s"), torch.empty(0))])
        for name, tensor in model.named_parameters():
            due = fuse(fused[name], raw(after), LAYOUT.sources, 2)
            assert np.array_equal(tensor.detach().view(-1).view(torch.uint8).numpy(), due), name
    results = read_results(tmp_path / "s", len(ranks))
    assert all(result.elements for result in results)
    due = [ServingSums().of("ours", fused, manifest(after), raw(after)) for fused in tables]
    assert [result.sums for result in results] == due


def refused(folder: Path, model: torch.nn.Module) -> str:
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    sglang_loader.load(model, [(str(folder), torch.empty(0))])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters()), "written in part"
    with pytest.raises(WireError) as caught:
        read_results(folder, 1)
    return caught.value.why


def test_a_model_that_differs_is_left_alone_and_the_server_alive(tmp_path: Path) -> None:
    before, fused = some(1), LAYOUT.fused()
    after, folder = step(before, 0.01), tmp_path / "s"
    write_scatter(folder, [fused], manifest(after), raw(before), raw(after))
    model = live(fused, before)
    del model.model.norm.weight
    assert "model.norm.weight" in refused(folder, model)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(31, dtype=torch.bfloat16), requires_grad=False)
    assert "[31]" in refused(folder, model)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(32, dtype=torch.float32), requires_grad=False)
    assert "float32" in refused(folder, model)


@pytest.mark.parametrize("size", [0, 10, 5000])
def test_a_torn_or_missing_file_is_reported_and_nothing_written(tmp_path: Path, size: int) -> None:
    before, fused = some(1), LAYOUT.fused()
    after, folder = step(before, 0.01), tmp_path / "s"
    write_scatter(folder, [fused], manifest(after), raw(before), raw(after))
    file = folder / "0.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert refused(folder, live(fused, before))
    file.unlink()
    assert refused(folder, live(fused, before))


def test_a_worker_that_says_nothing_has_not_taken_the_update(tmp_path: Path) -> None:
    with pytest.raises(WireError, match="rank 0 did not take the update"):
        read_results(tmp_path, 1)


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_sums_are_those_of_the_fused_bytes_and_follow_every_change(kind: Kind) -> None:
    before, fused, sums = some(1), LAYOUT.fused(), ServingSums()
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    first = sums.of(kind, fused, manifest(before), raw(before))
    changed = before | {name: some(2)[name]}
    second = sums.of(kind, fused, manifest(changed), raw(changed))
    assert {name for name in first if first[name] != second[name]} == {"model.layers.1.mlp.experts.w13_weight"}
    assert second == ServingSums().of(kind, fused, manifest(changed), raw(changed))


def test_the_gpu_sum_is_that_of_sglangs_kernel() -> None:
    """The values are `gpu_tensor_hash`'s of SGLang 0.5.23, its kernel run by Triton's interpreter."""
    due = {4: 10987831402866928887, 10: 16366718706372450286, 70_001: 4001569816689049934}
    for size, expected in due.items():
        assert gpu_sum(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)) == expected
