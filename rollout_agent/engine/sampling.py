"""Drawing tokens. A token is a pure function of its logits, the seed and its position in the sequence.

The uniform number of (seed, position) is one output of SplitMix64 (Steele, Lea, Flood: "Fast Splittable
Pseudorandom Number Generators", 2014) read at a counter, so it doesn't depend on what else is in the
batch, on the order of arrival or on how often a sequence was restarted. Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

NDArray = np.ndarray[Any, np.dtype[Any]]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray) -> NDArray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(seeds: list[int], positions: list[int]) -> NDArray:
    """float64 [N] in [0, 1), one for each (seed below 2**63, position)."""
    counter = np.asarray(positions, np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        bits = _mix(_mix(np.asarray(seeds, np.uint64)) + counter * _GOLDEN)
    result: NDArray = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def draw(logits_NV: Tensor, temperatures: list[float], seeds: list[int], positions: list[int]) -> Tensor:
    """Token ids [N] i64 by inverse CDF in float64; temperature 0 takes the first largest logit.

    logits_NV f32. `positions` are the indices in their sequences of the tokens to draw.
    """
    greedy = logits_NV.argmax(-1)
    if not any(temperatures):
        return greedy
    heat = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64)[:, None]
    cdf = torch.softmax(logits_NV.double() / heat, -1).cumsum(-1)
    point = torch.from_numpy(uniforms(seeds, positions))[:, None] * cdf[:, -1:]
    drawn = torch.searchsorted(cdf, point, right=True)[:, 0].clamp_(max=logits_NV.shape[1] - 1)
    return torch.where(torch.tensor([t > 0 for t in temperatures]), drawn, greedy)
