"""Promise: a token's bits depend on its sequence alone, not on how or beside whom it was computed."""

import pytest
import torch
import torch.nn.functional as F

from headway.kernels.decoder import KVCache, forward_cached, forward_full, token_logprob
from headway.kernels.numerics import FAST, INVARIANT, Numerics

LENGTHS = [1, 5, 16, 17, 33, 64, 70, 130]
SHAPES = {
    "grouped heads": {},
    "one head a group, top-3, unnormalised": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    },
    "tied, one key head": {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 32},
}


def _differing(model, ids, lengths, dtype, numerics, serve, seed=0):
    """Which of hidden, routes, log-probabilities differ between serving and one full forward."""
    prepared = model.prepared(dtype)
    with torch.no_grad():
        full = forward_full(prepared, model.config, ids, lengths, numerics)
        part = serve(prepared, model.config, ids, lengths, dtype, numerics, seed)
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        targets = ids.roll(-1, 1)[real]
        whole = token_logprob(prepared, full.hidden[real], targets, 0.8, numerics)
        alone = [
            token_logprob(prepared, row[None], target[None], 0.8, numerics)
            for row, target in zip(part.hidden[real], targets, strict=True)
        ]
    pairs = {
        "hidden": (full.hidden[real], part.hidden[real]),
        "routes": (full.routes[real], part.routes[real]),
        "logprob": (whole[0], torch.cat([a[0] for a in alone])),
        "entropy": (whole[1], torch.cat([a[1] for a in alone])),
    }
    return {name for name, (a, b) in pairs.items() if not torch.equal(a, b)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_serving_in_chunks_and_changing_company_gives_the_bits_of_a_full_forward(
    shape, dtype, make_model, make_batch, serve
):
    model = make_model(**SHAPES[shape])
    ids, lengths = make_batch(model.config, LENGTHS)
    for seed in range(2):
        assert not _differing(model, ids, lengths, dtype, INVARIANT, serve, seed)


def test_contexts_longer_than_a_key_block_stay_bitwise_equal(make_model, make_batch, serve):
    model = make_model()
    ids, lengths = make_batch(model.config, [380, 257, 40])
    assert not _differing(model, ids, lengths, torch.float32, INVARIANT, serve)


@pytest.mark.parametrize("numerics", [Numerics(block_attention=False), FAST], ids=repr)
def test_by_the_librarys_attention_the_bits_differ(numerics, make_model, make_batch, serve):
    model = make_model()
    ids, lengths = make_batch(model.config, LENGTHS)
    assert "hidden" in _differing(model, ids, lengths, torch.float32, numerics, serve)


@pytest.mark.usefixtures("blas_that_needs_padding")
@pytest.mark.parametrize("numerics", [Numerics(pad_rows=False), Numerics(pad_experts=False)], ids=repr)
def test_without_padding_the_bits_differ(numerics, make_model, make_batch, serve):
    model = make_model()
    ids, lengths = make_batch(model.config, LENGTHS)
    assert "hidden" in _differing(model, ids, lengths, torch.float32, numerics, serve)


def test_library_attention_differs_in_bf16_too(make_model, make_batch, serve):
    model = make_model(hidden_size=96, num_hidden_layers=3, head_dim=32)  # rounding hides most differences
    ids, lengths = make_batch(model.config, LENGTHS * 4)
    numerics = Numerics(block_attention=False)
    assert "hidden" in _differing(model, ids, lengths, torch.bfloat16, numerics, serve)


def test_the_order_and_padding_of_a_batch_do_not_matter(make_model, make_batch):
    model = make_model()
    ids, lengths = make_batch(model.config, LENGTHS)
    order = torch.tensor([3, 7, 0, 5])
    with torch.no_grad():
        a = forward_full(model.prepared(), model.config, ids, lengths)
        wider = torch.cat([ids, torch.full((8, 21), 66)], dim=1)[order]
        b = forward_full(model.prepared(), model.config, wider, lengths[order])
    t = ids.shape[1]
    assert torch.equal(a.hidden[order], b.hidden[:, :t])
    assert torch.equal(a.routes[order], b.routes[:, :t])
    assert not b.hidden[:, t:].any()
    assert (b.routes[:, t:] == -1).all()


def test_a_shared_page_continues_with_the_same_bits(make_model, make_batch):
    model = make_model()
    prepared, config = model.prepared(), model.config
    ids, _ = make_batch(config, [40])
    cache = KVCache.allocate(config, 8, torch.float32)
    first, other = torch.tensor([[5, 2, 7]]), torch.tensor([[5, 0, 1]])  # page 5 is read by both
    forward_cached(prepared, config, cache, first, torch.tensor([0]), ids[:, :25], torch.tensor([25]))
    both = forward_cached(
        prepared,
        config,
        cache,
        torch.cat([first, other]),
        torch.tensor([25, 16]),
        torch.cat([F.pad(ids[:, 25:], (0, 9)), ids[:, 16:]]),
        torch.tensor([15, 24]),
    )
    full = forward_full(prepared, config, ids, torch.tensor([40]))
    assert torch.equal(both.hidden[0, :15], full.hidden[0, 25:])
    assert torch.equal(both.hidden[1], full.hidden[0, 16:])


def test_a_temperature_per_row_equals_one_for_all(make_model):
    model = make_model()
    rows, targets = torch.randn(9, 48), torch.arange(9)
    prepared = model.prepared()
    a = token_logprob(prepared, rows, targets, 0.7)
    b = token_logprob(prepared, rows, targets, torch.full((9,), 0.7))
    assert torch.equal(a[0], b[0])
    reference = torch.log_softmax(rows @ prepared.head.T / 0.7, -1)
    torch.testing.assert_close(a[0], reference[torch.arange(9), targets])
    torch.testing.assert_close(a[1], -(reference.exp() * reference).sum(-1))


def test_requests_out_of_range_are_refused(make_model, make_batch):
    model = make_model()
    p, c = model.prepared(), model.config
    ids, lengths = make_batch(c, [4, 9])
    cache = KVCache.allocate(c, 2, torch.float32)
    pages, zero = torch.tensor([[0], [1]]), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"lengths must be in 1\.\.9"):
        forward_full(p, c, ids, torch.tensor([0, 9]))
    with pytest.raises(ValueError, match=r"token ids must be in 0\.\.66"):
        forward_full(p, c, ids + 67, lengths)
    with pytest.raises(ValueError, match="distinct"):
        forward_cached(p, c, cache, pages * 0, zero, ids, lengths)
    with pytest.raises(ValueError, match="past its 1 pages"):
        forward_cached(p, c, cache, pages, zero + 8, ids, lengths)
    with pytest.raises(ValueError, match=r"pages must be in 0\.\.1"):
        forward_cached(p, c, cache, pages + 1, zero, ids, lengths)
    with pytest.raises(ValueError, match="weights compute in"):
        forward_cached(model.prepared(torch.bfloat16), c, cache, pages, zero, ids, lengths)
    with pytest.raises(ValueError, match="at least one sequence"):
        forward_full(p, c, ids[:0], lengths[:0])
