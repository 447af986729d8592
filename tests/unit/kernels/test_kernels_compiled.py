"""Promise: compiled decoding has the bits of the other path, or is not used."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from headway.kernels import compiled, selftest
from headway.kernels.decoder import KVCache, forward_cached, forward_full
from headway.kernels.numerics import FAST, INVARIANT, PAGE
from headway.kernels.weights import prepare

WIDTHS = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}

pytest.importorskip("numba", reason="the extra `fast` is not installed")
pytestmark = pytest.mark.usefixtures("compiled_decoding")


def pack(prepared, config):
    return compiled.pack(prepared, config, selftest.compiled_decoding(config, torch.float32, INVARIANT))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_experts": 20, "num_experts_per_tok": 4, "num_key_value_heads": 1},
        {"num_attention_heads": 2, "head_dim": 64, "norm_topk_prob": False, "tie_word_embeddings": True},
        {"hidden_size": 224, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 256, "num_experts": 11},
    ],
    ids=["plain", "many experts, one key head", "wide heads", "widths that are summed in halves"],
)
def test_decoding_along_a_sequence_gives_the_bits_of_a_full_forward(make_model, make_batch, changes):
    model = make_model(gain=2.0, **(WIDTHS | changes))
    prepared, config = model.prepared(), model.config
    packed, lengths = pack(prepared, config), [1, 17, 40, 150, 165]
    ids, sizes = make_batch(config, lengths)
    full = forward_full(prepared, config, ids, sizes)
    each = -(-max(lengths) // PAGE)
    cache = KVCache.allocate(config, len(lengths) * each, torch.float32)
    cache.kv.normal_(generator=torch.Generator().manual_seed(0))
    pages = torch.randperm(cache.pages, generator=torch.Generator().manual_seed(1)).view(len(lengths), each)
    for at in range(max(lengths)):
        live = (sizes > at).nonzero().flatten().flip(0)
        where, one = torch.full_like(live, at), torch.ones_like(live)
        out = forward_cached(prepared, config, cache, pages[live], where, ids[live, at, None], one, packed=packed)
        assert torch.equal(out.hidden[:, 0], full.hidden[live, at])
        assert torch.equal(out.routes[:, 0], full.routes[live, at])


def test_the_self_test_approves_and_notices_one_wrong_bit(make_model, monkeypatch):
    config = make_model(**WIDTHS).config
    assert selftest.compiled_decoding.__wrapped__(config, torch.float32, INVARIANT) in compiled.ORDERS
    right = compiled.pack

    def wrong(*args):
        packed = right(*args)
        packed.weights[0].view("int32")[0, 5] ^= 1
        return packed

    monkeypatch.setattr(compiled, "pack", wrong)
    assert "bits differ" in selftest.compiled_decoding.__wrapped__(config, torch.float32, INVARIANT)


def test_an_order_of_sums_that_is_not_this_machines_is_refused(make_model, monkeypatch):
    """The widths are such that the known orders differ."""
    config = make_model(hidden_size=224, head_dim=32, moe_intermediate_size=32).config
    found = selftest.compiled_decoding.__wrapped__(config, torch.float32, INVARIANT)
    others = tuple(order for order in compiled.ORDERS if order != found)
    assert len(others) == len(compiled.ORDERS) - 1
    monkeypatch.setattr(compiled, "ORDERS", others)
    assert "bits differ" in selftest.compiled_decoding.__wrapped__(config, torch.float32, INVARIANT)


def test_what_it_is_not_made_for_is_named(make_model):
    config = make_model(**WIDTHS).config
    assert "float32" in compiled.misfit(config, torch.bfloat16, INVARIANT)
    assert "float32" in compiled.misfit(config, torch.float32, FAST)
    assert "widths" in compiled.misfit(make_model().config, torch.float32, INVARIANT)
    assert "widths" in compiled.misfit(dataclasses.replace(config, hidden_size=416), torch.float32, INVARIANT)


def _step(model, packed, prepared):
    cache = KVCache.allocate(model.config, 2, torch.float32)
    start, one = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    ids, pages = torch.tensor([[3], [4]]), torch.tensor([[1], [0]])
    return forward_cached(prepared, model.config, cache, pages, start, ids, one, packed=packed), cache.kv


def test_a_tie_between_experts_is_settled_by_torch(make_model):
    model = make_model(**WIDTHS)
    name = "model.layers.1.mlp.gate.weight"
    model.weights[name] = model.weights[name][:1].expand(5, -1).clone()
    prepared = model.prepared()
    packed = pack(prepared, model.config)
    start = torch.zeros(2, dtype=torch.int64)
    ids, kv = torch.tensor([3, 4]), KVCache.allocate(model.config, 2, torch.float32).kv
    assert compiled.decode(packed, kv, torch.tensor([[1], [0]]), start, ids, 2) is None
    (due, due_kv), (found, found_kv) = _step(model, None, prepared), _step(model, packed, prepared)
    assert torch.equal(due.routes, found.routes)
    assert torch.equal(due.hidden, found.hidden)
    assert torch.equal(due_kv, found_kv)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.0.down_proj.weight"])
def test_what_is_not_finite_stays_so(make_model, name):
    model = make_model(num_experts=2, num_experts_per_tok=2, **WIDTHS)
    model.weights[name][0, 0] = float("nan")
    with torch.no_grad():
        prepared = prepare(model.weights, model.config, torch.float32)
    out, _ = _step(model, pack(prepared, model.config), prepared)
    assert out.hidden.isnan().any()


def test_without_numba_it_is_neither_imported_nor_used():
    code = (
        "import importlib.util as u, sys, torch\n"
        "found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'numba' else found(name, *rest)\n"
        "from headway.kernels import selftest; from headway.kernels.config import ModelConfig\n"
        "from headway.kernels.numerics import INVARIANT\n"
        "config = ModelConfig(vocab_size=9, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,\n"
        "  num_key_value_heads=1, head_dim=32, moe_intermediate_size=32, num_experts=2, num_experts_per_tok=1,\n"
        "  max_position_embeddings=64)\n"
        "assert 'fast' in selftest.compiled_decoding(config, torch.float32, INVARIANT)\n"
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
