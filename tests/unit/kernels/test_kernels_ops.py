"""Each op equals its definition in plain torch, forward and backward, and its gradients are deterministic."""

import subprocess
import sys

import pytest
import torch

from headway.kernels import logprob, moe, numerics, reference
from headway.kernels.attention import FullAttention
from headway.kernels.norms import qk_norm_rotary, rms_norm
from headway.kernels.numerics import FAST, INVARIANT, linear
from headway.kernels.router import Router, select

ROUTERS = {
    "qwen": Router(top_k=3),
    "qwen, unnormalised": Router(top_k=3, normalise=False),
    "deepseek": Router(top_k=3, sigmoid=True, groups=4, top_groups=2, scale=2.5),
    "kimi": Router(top_k=4, sigmoid=True, scale=2.827),
}


def _rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _agree(op, oracle, inputs, rtol=1e-4, atol=1e-5):
    """op in fp32 against oracle in fp64: results and gradients; gradients twice with the same bits."""
    results = []
    for fn, dtype in ((op, torch.float32), (op, torch.float32), (oracle, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        outs = fn(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        loss = sum((o * _rand(*o.shape, seed=7).to(o.dtype)).sum() for o in outs)
        results.append((*outs, *torch.autograd.grad(loss, leaves)))
    for one, again, exact in zip(*results, strict=True):
        assert torch.equal(one, again)
        torch.testing.assert_close(one.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_selection_is_what_its_definition_says(name):
    router = ROUTERS[name]
    bias = _rand(16, seed=3) if router.sigmoid else None
    found = select(_rand(50, 16), router, bias)
    ids, _ = reference.select(_rand(50, 16).double(), router, None if bias is None else bias.double())
    assert torch.equal(found.ids, ids)
    _agree(lambda x: select(x, router, bias).weights, lambda x: reference.select(x, router, bias)[1], [_rand(50, 16)])


@pytest.mark.parametrize("name", ROUTERS)
def test_replayed_ids_are_weighed_by_live_scores_and_reach_the_router(name):
    router, logits = ROUTERS[name], _rand(50, 16).requires_grad_()
    live = select(logits, router)
    again = select(logits, router, recorded=live.ids)
    direction = _rand(50, router.top_k)
    one, two = (torch.autograd.grad((s.weights * direction).sum(), logits)[0] for s in (live, again))
    assert torch.equal(live.weights, again.weights)
    assert torch.equal(one, two)
    other = select(logits, router, recorded=(live.ids + 1) % 16)
    assert not torch.equal(other.weights, live.weights)
    assert torch.autograd.grad((other.weights * direction).sum(), logits)[0].abs().max() > 0


def test_the_bias_moves_the_choice_and_never_the_weights():
    router, logits = Router(top_k=2, sigmoid=True, normalise=False), _rand(30, 8)
    bias = torch.zeros(8).index_fill_(0, torch.tensor([5]), 10.0).requires_grad_()
    found = select(logits, router, bias)
    assert (found.ids[:, 0] == 5).all()
    assert torch.equal(found.weights, logits.sigmoid().gather(1, found.ids))
    assert not found.weights.requires_grad


def test_a_plan_keeps_every_assignment_and_pads_segments():
    ids = torch.randint(6, (40, 3), generator=torch.Generator().manual_seed(1))
    plan = moe.make_plan(ids, 7, 16)
    assert (plan.ends % 16 == 0).all()
    assert int(plan.ends[-1]) == int(plan.ends[-2])  # nobody chose the last expert
    expert = torch.searchsorted(plan.ends, torch.arange(int(plan.ends[-1])), right=True)
    assert torch.equal(expert[plan.rows], ids)
    assert torch.equal(plan.source[plan.rows.flatten()], torch.arange(120))
    assert (plan.source >= 0).sum() == 120
    assert torch.equal(plan.token[plan.rows], torch.arange(40)[:, None].expand(-1, 3))


@pytest.mark.parametrize("numerics", [FAST, INVARIANT], ids=["fast", "invariant"])
def test_the_mixture_equals_a_loop_over_rows_and_experts(numerics):
    x, w13, w2 = _rand(40, 24), _rand(5, 32, 24, seed=1) / 5, _rand(5, 24, 16, seed=2) / 4
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(40)])
    _agree(
        lambda x, g, a, b: moe.moe_forward(x, ids, g, a, b, numerics),
        lambda x, g, a, b: reference.moe(x, ids, g, a, b),
        [x, _rand(40, 3, seed=3), w13, w2],
    )


def test_grouped_products_take_expanded_gradients():
    ends = torch.tensor([3, 3, 10], dtype=torch.int32)
    x, w = _rand(10, 8).requires_grad_(), _rand(3, 8, 8, seed=1).requires_grad_()
    _agree(lambda x, w: moe.grouped_mm(x, w, ends), lambda x, w: reference.grouped_mm(x, w, ends), [x, w])
    moe.grouped_mm(x, w, ends).sum().backward()
    assert not w.grad[1].any()


def test_combining_in_bf16_adds_in_fp32_in_slot_order():
    ids = torch.randint(6, (40, 6), generator=torch.Generator().manual_seed(1))
    plan = moe.make_plan(ids, 6)
    y, weights = _rand(240, 16).bfloat16(), _rand(40, 6, seed=2)
    total = torch.zeros(40, 16)
    for slot in range(6):
        total = torch.addcmul(total, y[plan.rows[:, slot]].float(), weights[:, slot : slot + 1])
    assert torch.equal(moe.combine(y, weights, plan), total.bfloat16())


def test_linear_and_rms_norm_equal_their_definitions():
    _agree(lambda x, w: linear(x, w), lambda x, w: x @ w.T, [_rand(9, 24), _rand(10, 24, seed=1)])
    _agree(
        lambda x, w: rms_norm(x, w, 1e-6),
        lambda x, w: reference.rms_norm(x, w, 1e-6),
        [_rand(9, 24), _rand(24, seed=1)],
    )


@pytest.mark.parametrize(("heads", "latent"), [((4, 2), False), ((4, 4), False), ((4, 1), True)], ids=str)
def test_attention_equals_its_definition(heads, latent):
    lengths, widths = torch.tensor([3, 70, 17]), (24, 16)
    n = 96  # six rows are padding
    q, k = _rand(n, heads[0], widths[0]), _rand(n, heads[1], widths[0], seed=1)
    v = _rand(n, heads[1], widths[1], seed=2)

    def ours(q, k, v):
        attention = FullAttention(lengths, n, heads, 0.3)
        return attention(0, q, k, k[..., : widths[1]] if latent else v)[:90]

    def oracle(q, k, v):
        parts, at = [], 0
        for length in lengths.tolist():
            s = slice(at, at + length)
            parts.append(reference.attention(q[s], k[s], k[s, :, : widths[1]] if latent else v[s], 0.3).flatten(1))
            at += length
        return torch.cat(parts)

    if latent:
        _agree(lambda q, k: ours(q, k, None), lambda q, k: oracle(q, k, None), [q, k])
    else:
        _agree(ours, oracle, [q, k, v])


@pytest.mark.parametrize("chunk", [1 << 24, 500], ids=["one chunk", "chunks of 16"])
def test_log_probabilities_equal_their_definition_in_chunks_too(chunk, monkeypatch):
    monkeypatch.setattr(logprob, "CHUNK_SCORES", chunk)
    targets, heat = torch.arange(53) % 30, torch.linspace(0.5, 1.5, 53)
    _agree(
        lambda h, w: logprob.token_logprob(h, w, targets, heat),
        lambda h, w: reference.token_logprob(h, w, targets, heat.double()),
        [_rand(53, 24), _rand(30, 24, seed=1)],
    )


def test_chunks_give_the_bits_of_single_rows(monkeypatch):
    hidden, head, targets = _rand(53, 24), _rand(30, 24, seed=1), torch.arange(53) % 30
    whole = logprob.token_logprob(hidden, head, targets, 0.7)
    alone = [logprob.token_logprob(hidden[i : i + 1], head, targets[i : i + 1], 0.7) for i in range(53)]
    monkeypatch.setattr(logprob, "CHUNK_SCORES", 500)
    chunked = logprob.token_logprob(hidden, head, targets, 0.7)
    for at in range(2):
        assert torch.equal(whole[at], torch.cat([one[at] for one in alone]))
        assert torch.equal(whole[at], chunked[at])


PEAK = """
import re, torch
from headway.kernels import logprob
from headway.kernels.logprob import token_logprob
logprob.CHUNK_SCORES = 1 << 20
n, v, d = 4096, 16_000, 16
h, w = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
def peak():
    # ru_maxrss would begin at that of whoever started this process
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
token_logprob(h[:64], w, torch.zeros(64, dtype=torch.long))[0].sum().backward()
before = peak()
{}
print(peak() - before)
"""
OURS = "token_logprob(h, w, torch.zeros(n, dtype=torch.long))[0].sum().backward()"
WHOLE = "torch.log_softmax(h @ w.T, -1).gather(1, torch.zeros(n, 1, dtype=torch.long)).sum().backward()"


def test_log_probabilities_never_hold_all_scores():
    ours, whole = (
        int(subprocess.run([sys.executable, "-P", "-c", PEAK.format(body)], capture_output=True, check=True).stdout)
        for body in (OURS, WHOLE)
    )
    assert whole > 300_000  # kB: two matrices of 4096 x 16,000, less what was there before
    assert ours < whole / 4


def test_passing_over_activations_in_blocks_keeps_the_bits(monkeypatch):
    ids, turns = torch.randint(4, (100, 2)), torch.polar(torch.ones(100, 1, 4), _rand(100, 1, 4))

    def everything(x, weight, w13, w2, qkv, qk_weight):
        mixed = moe.moe_forward(x, ids, x[:, :2].abs(), w13, w2)
        return rms_norm(x, weight, 1e-6), mixed, *qk_norm_rotary(qkv, qk_weight, turns, 1e-6)

    shapes = ((100, 24), (24,), (4, 32, 24), (4, 24, 16), (100, 4, 8), (3, 8))
    leaves = [_rand(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    results = []
    for elements in (1, 1 << 20):
        monkeypatch.setattr(numerics, "BLOCK_ELEMENTS", elements)
        outs = everything(*leaves)
        results.append((outs, torch.autograd.grad(sum((out * out.detach().cos()).sum() for out in outs), leaves)))
    assert len(list(numerics.in_blocks(24, leaves[0]))) == 1
    (outs, grads), (whole, whole_grads) = results
    assert all(torch.equal(a, b) for a, b in zip(outs, whole, strict=True))
    for a, b in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
