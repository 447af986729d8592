"""Which experts a token runs through, and how much each counts.

Shapes: N rows, E experts, k experts a token. Everything is fp32; a row's choice depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TINY = 1e-20  # DeepSeek's guard against a sum of sigmoids that underflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How scores become a choice: Qwen3-MoE (softmax), DeepSeek-V3 and Kimi-K2 (sigmoid, bias, groups)."""

    top_k: int
    normalise: bool = True  # weights are divided by their sum
    sigmoid: bool = False
    groups: int = 1  # experts come in this many equal groups ..
    top_groups: int = 1  # .. of which the best are eligible, judged by the sum of their two best experts
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which experts each row uses, with which weights, and which the router itself would have used."""

    ids: Tensor  # [N, k] i64
    weights: Tensor  # [N, k] f32, with a gradient to the logits
    live: Tensor  # [N, k] i64, best first
    scores: Tensor  # [N, E] f32, with a gradient to the logits


def select(
    logits: Tensor,
    router: Router,
    bias: Tensor | None = None,
    recorded: Tensor | None = None,
    plausibility: float = 0.0,
) -> Selection:
    """Choose k experts for each row of logits [N, E] f32.

    bias [E] f32 moves the choice and never the weights (auxiliary-loss-free balancing, DeepSeek-V3 2024).
    recorded [N, k] i64 replays those ids, in their columns' order; a row with a negative id routes live. The
    weights always come from the live scores, so gradients reach the router; they are summed in slot order.
    """
    scores = torch.sigmoid(logits) if router.sigmoid else torch.softmax(logits, dim=-1)
    live = eligible(scores, router, bias).topk(router.top_k, dim=-1).indices
    ids = live if recorded is None else replayed(scores.detach(), live, recorded, plausibility)
    weights = scores.gather(1, ids)
    if router.normalise:
        total = weights[:, :1]
        for slot in range(1, router.top_k):
            total = total + weights[:, slot : slot + 1]
        weights = weights / (total + _TINY if router.sigmoid else total)
    if router.scale != 1.0:
        weights = weights * router.scale
    return Selection(ids=ids, weights=weights, live=live, scores=scores)


def eligible(scores: Tensor, router: Router, bias: Tensor | None = None) -> Tensor:
    """What experts are ranked by, [N, E]: scores + bias, and -inf in groups that are out. Carries no gradient."""
    ranked = scores.detach() if bias is None else scores.detach() + bias.detach()
    if router.groups == 1:
        return ranked
    split = ranked.unflatten(1, (router.groups, -1))
    best = split.topk(2, dim=-1).values.sum(-1).topk(router.top_groups, dim=-1).indices
    out = torch.ones(split.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
    return split.masked_fill(out[..., None], -torch.inf).flatten(1)


def replayed(scores: Tensor, live: Tensor, recorded: Tensor, plausibility: float) -> Tensor:
    """The ids to use, [N, k]: the recorded ones; the live ones in rows with a negative id.

    The plausibility filter: an id that scores below `plausibility` (0 to 1; 0 lets all pass) times the worst of
    the row's own top k is replaced by the best live id that the row does not use yet.
    """
    ids = torch.where((recorded < 0).any(1, keepdim=True), live, recorded)
    floor = plausibility * scores.gather(1, live).amin(1, keepdim=True)
    refused = scores.gather(1, ids) < floor
    if not refused.any():
        return ids
    ids = ids.masked_fill(refused, -1)
    for slot in range(ids.shape[1]):
        unused = ~(live[:, :, None] == ids[:, None, :]).any(2)  # at most k - 1 live ids are in use
        best = live.gather(1, unused.int().argmax(1, keepdim=True))[:, 0]
        ids[:, slot] = torch.where(refused[:, slot], best, ids[:, slot])
    return ids


def balance_loss(scores: Sequence[Tensor], k: int) -> Tensor:
    """Load-balance loss (Switch Transformer, Fedus et al. 2021, eq. 4-6; layers pooled as HF does).

    scores: per layer [N, E] f32 router probabilities. Returns a scalar; k at perfect balance.
    """
    pooled = torch.cat(list(scores))
    chosen = pooled.detach().topk(k, dim=-1).indices
    share = torch.bincount(chosen.flatten(), minlength=pooled.shape[1]).to(pooled.dtype) / pooled.shape[0]
    return pooled.shape[1] * (share * pooled.mean(0)).sum()
