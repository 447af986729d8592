"""Rotary positions (Su et al. 2021), and their stretching to longer contexts by YaRN (Peng et al. 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Names are those of HF's `rope_parameters`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    @classmethod
    def from_hf(cls, rope: Mapping[str, Any], positions: int) -> Yarn | None:
        """From `rope_parameters` or the older `rope_scaling`; None without stretching. Raises ValueError."""
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind != "yarn" or rope.get("attention_factor") is not None or not rope.get("truncate", True):
            raise ValueError(f"model config: rope_type {kind!r} is not supported, only 'default' and plain 'yarn'")
        original = int(rope.get("original_max_position_embeddings") or positions)
        named = {name: float(rope.get(name) or 0) for name in ("mscale", "mscale_all_dim")}
        named |= {name: float(rope[name]) for name in ("beta_fast", "beta_slow") if rope.get(name)}
        factor = float(rope.get("factor") or positions / original)
        return cls(factor=factor, original_max_position_embeddings=original, **named)

    def to_hf(self) -> dict[str, Any]:
        return {"rope_type": "yarn", **{name: value for name, value in asdict(self).items() if value}}

    def _magnitude(self, strength: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * strength * math.log(self.factor) + 1.0

    @property
    def softmax_factor(self) -> float:
        """What DeepSeek multiplies attention's scale by."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @property
    def length(self) -> float:
        """Of the rotated vectors."""
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def stretch(self, frequency: Tensor, theta: float) -> Tensor:
        """frequency [D / 2], slow ones divided by the factor and fast ones kept."""
        d = 2 * frequency.numel()

        def turns_at(rotations: float) -> float:
            turn = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return d * math.log(turn) / (2 * math.log(theta))

        low = max(math.floor(turns_at(self.beta_fast)), 0)
        high = min(math.ceil(turns_at(self.beta_slow)), d - 1)
        ramp = (torch.arange(d // 2, dtype=torch.float32) - low) / (high - low or 0.001)
        slow = ramp.clamp_(0, 1)
        return frequency / self.factor * slow + frequency * (1 - slow)


def rotary_table(width: int, theta: float, positions: int, yarn: Yarn | None) -> Tensor:
    """[positions, width / 2] complex64: what adjacent pairs of columns are multiplied by."""
    frequency = theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    if yarn is not None:
        frequency = yarn.stretch(frequency, theta)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return torch.polar(torch.full_like(angles, yarn.length if yarn is not None else 1.0), angles)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """x [N, heads, D], adjacent pairs turned by rotary [N, 1, D / 2] complex64; in x's dtype. Differentiable."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotary).flatten(-2).to(x.dtype)
