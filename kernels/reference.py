"""What each op means, in plain torch and without a thought for speed: the oracle that tests compare with.

Shapes as in the modules of the ops; everything may be given in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.router import Router


def select(logits: Tensor, router: Router, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Row by row and expert by expert: ids and weights, [N, k]."""
    ids, weights = [], []
    for row in logits:
        scores = row.sigmoid() if router.sigmoid else row.softmax(0)
        ranked = scores if bias is None else scores + bias
        groups = ranked.view(router.groups, -1)
        if router.groups > 1:
            strength = [group.sort(descending=True).values[:2].sum() for group in groups]
            best = sorted(range(router.groups), key=lambda g: -strength[g].item())[: router.top_groups]
        else:
            best = [0]
        offered = [g * groups.shape[1] + e for g in best for e in range(groups.shape[1])]
        chosen = sorted(offered, key=lambda e: -ranked[e].item())[: router.top_k]
        weight = scores[chosen]
        ids.append(torch.tensor(chosen))
        weights.append((weight / weight.sum() if router.normalise else weight) * router.scale)
    return torch.stack(ids), torch.stack(weights)


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    starts = [0, *ends.tolist()[:-1]]
    return torch.cat([x[a:b] @ w[e].T for e, (a, b) in enumerate(zip(starts, ends.tolist(), strict=True))])


def swiglu_mlp(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = (x @ w13.T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ w2.T


def moe(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    rows = []
    for row, chosen, weight in zip(x, ids.tolist(), weights, strict=True):
        rows.append(sum(g * swiglu_mlp(row, w13[e], w2[e]) for e, g in zip(chosen, weight, strict=True)))
    return torch.stack(rows)  # type: ignore[arg-type]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, start: int = 0) -> Tensor:
    """One sequence: q [T, H, D] at positions start.., k [S, K, D], v [S, K, U] -> [T, H, U]."""
    group, outs = q.shape[1] // k.shape[1], []
    for t in range(q.shape[0]):
        seen = slice(0, start + t + 1)
        heads = []
        for h in range(q.shape[1]):
            weights = (k[seen, h // group] @ q[t, h] * scale).softmax(0)
            heads.append(weights @ v[seen, h // group])
        outs.append(torch.stack(heads))
    return torch.stack(outs)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def token_logprob(hidden: Tensor, head: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """One row at a time."""
    chosen, entropy = [], []
    for row, target, heat in zip(hidden, targets, temperature, strict=True):
        logp = (head @ row / heat).log_softmax(0)
        chosen.append(logp[target])
        entropy.append(-(logp.exp() * logp).sum())
    return torch.stack(chosen), torch.stack(entropy)
