"""Gradients: right (against transformers' autograd), deterministic, and complete under route replay."""

import pytest
import torch

from headway.kernels.decoder import forward_full, logits, token_logprob
from headway.kernels.numerics import FAST, INVARIANT
from headway.kernels.router import balance_loss
from headway.kernels.weights import prepare, round_through

LENGTHS = [1, 5, 17, 70, 130]


def _gradients(model, ids, lengths, numerics=INVARIANT, dtype=torch.float32, routes=None):
    masters = {name: w.clone().requires_grad_() for name, w in model.weights.items()}
    prepared = prepare(round_through(masters, "bfloat16"), model.config, dtype)
    out = forward_full(prepared, model.config, ids, lengths, numerics, routes)
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    logprob, entropy = token_logprob(prepared, out.hidden[real], ids.roll(-1, 1)[real], 0.9, numerics)
    weights = torch.linspace(-1, 1, logprob.numel())
    ((logprob * weights).sum() + 0.1 * entropy.sum()).backward()
    return {name: w.grad for name, w in masters.items()}, out


@pytest.fixture(scope="module")
def case(make_model, make_batch):
    model = make_model()
    return model, *make_batch(model.config, LENGTHS)


def _assert_close(a, b, tolerance):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].abs().max() > 0, name
        assert (a[name] - b[name]).norm() <= tolerance * b[name].norm(), name


def test_invariant_and_fast_gradients_agree_and_invariant_ones_are_deterministic(case):
    model, ids, lengths = case
    first, _ = _gradients(model, ids, lengths)
    again, _ = _gradients(model, ids, lengths)
    fast, _ = _gradients(model, ids, lengths, FAST)
    assert all(torch.equal(first[name], again[name]) for name in first)
    _assert_close(first, fast, 1e-4)


def test_gradients_in_bf16_compute_point_the_same_way(case):
    model, ids, lengths = case
    exact, _ = _gradients(model, ids, lengths)
    rough, _ = _gradients(model, ids, lengths, dtype=torch.bfloat16)
    joined = [torch.cat([g.flatten() for g in grads.values()]) for grads in (exact, rough)]
    assert torch.cosine_similarity(*joined, dim=0) > 0.99


def test_contexts_whose_weights_are_recomputed_have_the_same_gradients(case, monkeypatch):
    model, ids, lengths = case
    kept, _ = _gradients(model, ids, lengths)
    monkeypatch.setattr("headway.kernels.attention.KEPT_KEYS", 16)
    recomputed, _ = _gradients(model, ids, lengths)
    assert all(torch.equal(kept[name], recomputed[name]) for name in kept)


def test_padding_tokens_change_no_gradient(case):
    model, ids, lengths = case
    clean, _ = _gradients(model, ids, lengths)
    other = torch.where(torch.arange(ids.shape[1]) < lengths[:, None], ids, 66 - ids)
    other[:, 0] = ids[:, 0]
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    keep_targets = torch.zeros_like(real)
    keep_targets[torch.arange(len(LENGTHS)), lengths % ids.shape[1]] = True  # the roll reads one pad
    other = torch.where(keep_targets, ids, other)
    dirty, _ = _gradients(model, other, lengths)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_replaying_the_live_routes_changes_nothing(case):
    model, ids, lengths = case
    live, out = _gradients(model, ids, lengths)
    replayed, again = _gradients(model, ids, lengths, routes=out.routes)
    assert torch.equal(out.hidden, again.hidden)
    assert all(torch.equal(live[name], replayed[name]) for name in live)
    assert all(live[name].abs().max() > 0 for name in live if name.endswith("mlp.gate.weight"))


def test_replayed_routes_decide_which_experts_run_and_bad_ones_are_refused(case):
    model, ids, lengths = case
    out = forward_full(model.prepared(), model.config, ids, lengths)
    other = (out.routes + 1) % model.config.num_experts
    moved = forward_full(model.prepared(), model.config, ids, lengths, routes=other)
    real = torch.arange(ids.shape[1]) < lengths[:, None]
    assert torch.equal(moved.routes[real], other[real])
    assert torch.equal(moved.live[:, 0, 0], out.routes[:, 0, 0]), "the first layer's input does not depend on routes"
    assert not torch.equal(moved.hidden, out.hidden)
    with pytest.raises(ValueError, match=r"must be in 0\.\.4"):
        forward_full(model.prepared(), model.config, ids, lengths, routes=other + 5)
    with pytest.raises(ValueError, match="routes must have shape"):
        forward_full(model.prepared(), model.config, ids, lengths, routes=other[:, 1:])


def test_gradients_pass_the_rounding_unrounded():
    master = torch.tensor([1.0001, -3.3], requires_grad=True)
    rounded = round_through({"w": master}, "bfloat16")["w"]
    assert torch.equal(rounded, master.detach().bfloat16().float())
    rounded.backward(torch.tensor([0.1234567, 7.654321]))
    assert torch.equal(master.grad, torch.tensor([0.1234567, 7.654321]))


def test_balance_loss_is_k_when_balanced_and_larger_when_not(case):
    assert balance_loss([torch.full((10, 5), 0.2)], 2) == pytest.approx(2.0)
    model, ids, lengths = case
    out = forward_full(model.prepared(), model.config, ids, lengths)
    assert len(out.router_scores) == 2
    assert out.router_scores[0].shape == (sum(LENGTHS), 5)
    assert balance_loss(out.router_scores, 2) > 2.0


def test_logits_are_float32_and_independent_of_company(case):
    model, _, _ = case
    rows = torch.randn(40, 48)
    prepared = model.prepared()
    assert torch.equal(logits(prepared, rows)[3:4], logits(prepared, rows[3:4]))
    assert logits(prepared, rows.bfloat16()).dtype == torch.float32
