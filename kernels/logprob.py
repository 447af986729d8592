"""Log-probabilities of given tokens without a [N, V] matrix: rows in chunks, in both directions.

One function serves engine and trainer, so that a token's log-probability is computed in one way only.
Shapes: N rows, d hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.kernels.numerics import INVARIANT, ROW_TILE, Numerics, linear

CHUNK_SCORES = 1 << 24  # scores computed at once: 64 MB


def chunk_rows(vocabulary: int) -> int:
    """Rows computed at once: a multiple of ROW_TILE that depends on the vocabulary alone."""
    return max(ROW_TILE, CHUNK_SCORES // vocabulary // ROW_TILE * ROW_TILE)


def log_probabilities(scores: Tensor, heat: Tensor) -> Tensor:
    """scores [n, V] f32 (divided by heat [n, 1] in place) -> [n, V]."""
    return torch.log_softmax(scores.div_(heat), dim=-1)


def _log_softmax(hidden: Tensor, head: Tensor, heat: Tensor, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """The log-probabilities [n, V], and their buffer's twin to write into."""
    scores = linear(hidden, head, numerics)
    return log_probabilities(scores, heat), scores


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, heat: Tensor, numerics: Numerics
    ) -> tuple[Tensor, Tensor]:
        n, rows = hidden.shape[0], chunk_rows(head.shape[0])
        ctx.set_materialize_grads(False)
        chosen, entropy, kept = heat.new_empty(n), heat.new_empty(n), None
        for at in range(0, n, rows):
            part = slice(at, at + rows)
            logp, twin = _log_softmax(hidden[part].float(), head, heat[part], numerics)
            chosen[part] = logp.gather(1, targets[part, None])[:, 0]
            entropy[part] = torch.exp(logp, out=twin).mul_(logp).sum(-1).neg_()
            kept = logp if n <= rows else None  # a single chunk isn't computed twice
        ctx.save_for_backward(hidden, head, targets, heat, entropy, kept)
        ctx.numerics = numerics
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = backward(ctx.saved_tensors, grads, ctx.needs_input_grad[1], ctx.numerics)
        return d_hidden, d_head, None, None, None


def backward(
    saved: tuple[Any, ...], grads: tuple[Tensor | None, ...], wants_head: bool, numerics: Numerics = INVARIANT
) -> tuple[Tensor, Tensor | None]:
    """Gradients of hidden and head from those of the log-probabilities and entropies (or None), chunk by chunk."""
    hidden, head, targets, heat, entropy, kept = saved
    to_chosen, to_entropy = torch.zeros_like(entropy) if grads[0] is None else grads[0], grads[1]
    n, rows = hidden.shape[0], chunk_rows(head.shape[0])
    d_hidden, d_head = torch.empty_like(hidden), torch.zeros_like(head) if wants_head else None
    for at in range(0, n, rows):
        part = slice(at, at + rows)
        x = hidden[part].float()
        logp = kept if kept is not None else _log_softmax(x, head, heat[part], numerics)[0]
        d_chosen = slope = to_chosen[part, None] / heat[part]
        # d entropy = -p (log p + entropy); d chosen = onehot - p
        if to_entropy is not None:
            slope = (logp + entropy[part, None]).mul_(to_entropy[part, None] / heat[part]).add_(d_chosen)
        d_scores = logp.exp().mul_(slope).neg_()
        d_scores.scatter_add_(1, targets[part, None], d_chosen)
        d_hidden[part] = (d_scores @ head).to(hidden.dtype)
        if d_head is not None:
            d_head.addmm_(d_scores.T, x)
    return d_hidden, d_head


def token_logprob(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: Tensor | float = 1.0,
    numerics: Numerics = INVARIANT,
) -> tuple[Tensor, Tensor]:
    """Log-probability of targets [N] i64 under log_softmax(hidden @ head.T / temperature), and the entropy.

    hidden [N, d], head [V, d] f32; temperature [N] or a number, > 0. Returns ([N] f32, [N] f32), one row's bits
    independent of the others. Memory beyond the arguments and their gradients is about three chunks.
    """
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=hidden.device).expand(hidden.shape[0])[:, None]
    if numerics.on_gpu(hidden):
        from headway.kernels import triton_ops

        return triton_ops.token_logprob(hidden, head, targets, heat)
    return _TokenLogprob.apply(hidden, head, targets, heat, numerics)  # type: ignore[no-any-return]
