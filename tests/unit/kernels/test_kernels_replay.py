"""Route replay: which ids are used, which are refused, and that gradients and bits are those of live routing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.kernels.decoder import forward_full
from headway.kernels.router import Router, replayed, select

K = 3
ROUTER = Router(top_k=K)


def logits_of(seed: int, rows: int = 6, experts: int = 8) -> torch.Tensor:
    return 2 * torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))


def test_replayed_ids_keep_their_columns_and_weights_come_from_live_scores():
    logits = logits_of(0).requires_grad_()
    recorded = torch.stack([torch.randperm(8)[:K] for _ in range(6)])
    found = select(logits, Router(top_k=K, sigmoid=True), recorded=recorded)
    assert torch.equal(found.ids, recorded)
    assert torch.equal(found.live, logits.topk(K).indices)
    scores = logits.sigmoid().gather(1, recorded)
    torch.testing.assert_close(found.weights, scores / scores.sum(1, keepdim=True))
    (found.weights * torch.arange(1.0, K + 1)).sum().backward()
    touched = torch.zeros(6, 8, dtype=torch.bool).scatter_(1, recorded, True)
    assert torch.equal(logits.grad != 0, touched)


def test_ids_that_agree_give_the_gradient_of_live_routing_bit_for_bit():
    def gradient(recorded: torch.Tensor | None, per_slot: torch.Tensor) -> torch.Tensor:
        logits = logits_of(1).requires_grad_()
        (select(logits, ROUTER, recorded=recorded).weights * per_slot).sum().backward()
        return logits.grad

    live, per_slot = logits_of(1).topk(K).indices, torch.linspace(-1, 1, 18).view(6, K)
    assert torch.equal(gradient(None, per_slot), gradient(live, per_slot))
    other_order = gradient(live.flip(1), per_slot.flip(1))
    torch.testing.assert_close(other_order, gradient(None, per_slot))
    assert not torch.equal(other_order, gradient(None, per_slot)), "the order of the columns is part of the bits"


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_the_filter_replaces_what_is_implausible_by_the_best_unused_live_id(seed, plausibility):
    """Against a plain loop over rows."""
    scores = logits_of(seed).softmax(-1)
    rng = torch.Generator().manual_seed(seed)
    recorded = torch.stack([torch.randperm(8, generator=rng)[:K] for _ in range(6)])
    recorded[seed % 6, seed % K] = -1
    live = scores.topk(K).indices
    expected = []
    for row, own, best in zip(recorded.tolist(), scores.tolist(), live.tolist(), strict=True):
        if min(row) < 0:
            expected.append(best)
            continue
        floor = plausibility * min(own[e] for e in best)
        kept = [e if own[e] >= floor else None for e in row]
        for slot, e in enumerate(kept):
            if e is None:
                kept[slot] = next(b for b in best if b not in kept)
        expected.append(kept)
    found = replayed(scores, live, recorded, plausibility)
    assert found.tolist() == expected
    assert all(len(set(row)) == K for row in found.tolist())
    if plausibility == 1.0:
        assert torch.equal(found.sort(1).values, live.sort(1).values), "nothing but the live set is plausible"


def test_a_row_without_a_route_falls_back_alone(make_model, make_batch):
    model = make_model()
    ids, lengths = make_batch(model.config, [9, 5])
    with torch.no_grad():
        live = forward_full(model.prepared(), model.config, ids, lengths)
        other = (live.routes + 1) % model.config.num_experts
        other[0, 4, 1] = -1
        moved = forward_full(model.prepared(), model.config, ids, lengths, routes=other)
    real = torch.arange(9) < lengths[:, None]
    differs = (moved.routes != other).any(-1)
    assert differs[real].nonzero().tolist() == [[4, 1]]
    assert torch.equal(moved.routes[0, 4, 1], moved.live[0, 4, 1])
