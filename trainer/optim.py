"""AdamW over fp32 masters, its learning-rate schedule, and the global norm that gradients are clipped to.

Everything here is a pure function of its inputs: tensors are visited in sorted name order and reduced one
by one, so the same gradients give the same masters, bit for bit (on the same build and thread count).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ADAM_EPS = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to `peak`, then linear decay to `final_fraction` of it at `total_steps`.

    With `final_fraction` 1 the rate stays at the peak, whatever `total_steps` is.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    final_fraction: float = 1.0

    def at(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        return self.peak * (1.0 - done * (1.0 - self.final_fraction))


def squared_norms(grads: Mapping[str, Tensor]) -> dict[str, float]:
    """Each tensor's squared L2 norm."""
    return {name: float(torch.linalg.vector_norm(grad, dtype=torch.float64)) ** 2 for name, grad in grads.items()}


def clip_by_norm(grads: Mapping[str, Tensor], squares: Mapping[str, float], limit: float) -> float:
    """Scale `grads` in place so that the L2 norm of all tensors, of whose squared norms `squares` tells, is at most
    `limit`; the norm before.

    `grads` may be a part of them. Raises ValueError when the norm is not finite: that must not reach the masters.
    """
    norm = float(sum(squares[name] for name in sorted(squares)) ** 0.5)
    if not norm < float("inf"):
        raise ValueError(f"the gradient norm is {norm}")
    if norm > limit:
        for name in sorted(grads):
            grads[name].mul_(limit / norm)
    return norm


def clip_by_global_norm(grads: Mapping[str, Tensor], limit: float) -> float:
    """`clip_by_norm` where `grads` are all there are."""
    return clip_by_norm(grads, squared_norms(grads), limit)


class AdamW:
    """Loshchilov & Hutter's AdamW without weight decay of vectors (norms).

    The masters are updated in place; moments are fp32 and travel as flat named tensors.
    """

    def __init__(self, masters: Mapping[str, Tensor], *, beta1: float, beta2: float, weight_decay: float = 0.0) -> None:
        self._names = sorted(masters)
        self._params = [masters[name] for name in self._names]
        if any(param.dtype != torch.float32 for param in self._params):
            raise ValueError("masters are float32")
        groups = [
            {"params": [p for p in self._params if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in self._params if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self._torch = torch.optim.AdamW(
            [group for group in groups if group["params"]], betas=(beta1, beta2), eps=ADAM_EPS, fused=True
        )

    def step(self, grads: Mapping[str, Tensor], learning_rate: float) -> None:
        """One update of the masters. A tensor without an entry in `grads` counts as gradient 0."""
        for name, param in zip(self._names, self._params, strict=True):
            grad = grads.get(name)
            param.grad = torch.zeros_like(param) if grad is None else grad
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
        self._torch.step()
        for param in self._params:
            param.grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """`exp_avg` and `exp_avg_sq`, f32 by the masters' names: the optimizer's own tensors."""
        found: dict[str, dict[str, Tensor]] = {kind: {} for kind in MOMENTS}
        for name, param in zip(self._names, self._params, strict=True):
            held = self._torch.state.get(param, {})
            for kind in MOMENTS:
                found[kind][name] = held[kind] if held else torch.zeros_like(param)
        return found

    def state(self) -> dict[str, Tensor]:
        """Copies of the moments: `exp_avg/<name>` and `exp_avg_sq/<name>`, all float32."""
        return {f"{kind}/{name}": m.clone() for kind, share in self.moments().items() for name, m in share.items()}

    def load_state(self, moments: Mapping[str, Tensor], steps_done: int) -> None:
        """Continue after `steps_done` updates. Raises KeyError or ValueError when a moment does not fit."""
        for name, param in zip(self._names, self._params, strict=True):
            own = {kind: moments[f"{kind}/{name}"].detach().clone() for kind in MOMENTS}
            if any(m.shape != param.shape or m.dtype != torch.float32 for m in own.values()):
                raise ValueError(f"the moments of {name} do not fit its shape {tuple(param.shape)}")
            step = torch.tensor(float(steps_done), device=param.device)
            self._torch.state[param] = {"step": step, **own}
