"""Weights in 8 or 4 bits, derived from their bf16 rounding by one pure function for trainer and engine.

Scales come from the bf16-rounded weights, never from the fp32 masters: masters move at every step, their
roundings rarely, and a scale that moves drags all its elements along. So a block whose roundings stay
keeps every byte, and deltas stay small. Every operation is one correctly rounded IEEE operation per
element (a division, not a product with a reciprocal), so all devices give the same bytes.

- fp8: e4m3 in blocks of 128 x 128 with one fp32 scale each, as DeepSeek-V3 stores it: `X.weight`,
  `X.weight_scale_inv` [ceil(R/128), ceil(C/128)]; every projection.
- int4: groups of 32 inputs with one bf16 scale each, as Kimi-K2 (compressed-tensors) stores it:
  `X.weight_packed` int32 [R, C/8], value + 8 in four bits, the first lowest; `X.weight_scale` [R, C/32];
  `X.weight_shape` int64 [2]; the experts' projections only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Scheme = Literal["fp8", "int4"]
RolloutDtype = Literal["bfloat16", "float16", "fp8", "int4"]
BLOCK = 128
GROUP = 32
E4M3_MAX = 448.0
INT4_MAX = 7.0
SCALE_MIN = 2.0**-100
"""Below any weight that matters, and far enough above underflow that w / scale never meets it."""


def is_quantised(name: str, scheme: Scheme) -> bool:
    """Whether a tensor of that Hugging Face name is stored quantised; all others stay bf16."""
    return name.endswith("_proj.weight") and (scheme == "fp8" or ".experts." in name)


@torch.no_grad()
def to_rollout(weights: Mapping[str, Tensor], rollout: RolloutDtype) -> dict[str, Tensor]:
    """What engines load and weights travel as. Raises ValueError as `quantise` does."""
    if rollout in ("fp8", "int4"):
        return quantise(weights, rollout)
    dtype = torch.float16 if rollout == "float16" else torch.bfloat16
    return {name: w.detach().to(dtype) for name, w in weights.items()}


def stored_layout(
    shapes: Mapping[str, tuple[int, ...]], scheme: Scheme
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> shape and dtype of what `quantise` makes of weights of those shapes."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, shape in shapes.items():
        if not is_quantised(name, scheme):
            found[name] = shape, torch.bfloat16
        elif scheme == "fp8":
            found[name] = shape, torch.float8_e4m3fn
            found[f"{name}_scale_inv"] = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)), torch.float32
        else:
            found[f"{name}_packed"] = (shape[0], shape[1] // 8), torch.int32
            found[f"{name}_scale"] = (shape[0], shape[1] // GROUP), torch.bfloat16
            found[f"{name}_shape"] = (2,), torch.int64
    return found


@torch.no_grad()
def quantise(weights: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Tensor]:
    """What the engine loads: quantised tensors with their scales, and the bf16 rounding of all others.

    `weights` are masters or their bf16 roundings; both give the same bytes. Raises ValueError naming the
    tensor that is not finite, not a matrix, or (int4) whose width is no multiple of GROUP.
    """
    stored: dict[str, Tensor] = {}
    for name, w in weights.items():
        rounded = w.detach().to(torch.bfloat16)
        if not is_quantised(name, scheme):
            stored[name] = rounded.contiguous()
            continue
        if rounded.dim() != 2 or not rounded.isfinite().all():
            raise ValueError(f"weights: {name} {list(rounded.shape)} cannot be quantised, only a finite matrix can")
        stem = name.removesuffix("weight")
        if scheme == "fp8":
            stored[name], stored[f"{stem}weight_scale_inv"] = _to_fp8(rounded)
        else:
            if rounded.shape[1] % GROUP:
                raise ValueError(f"weights: {name} has {rounded.shape[1]} inputs, not a multiple of {GROUP}")
            stored[f"{stem}weight_packed"], stored[f"{stem}weight_scale"] = _to_int4(rounded)
            stored[f"{stem}weight_shape"] = torch.tensor(rounded.shape, dtype=torch.int64)
    return stored


@torch.no_grad()
def dequantise(stored: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights to compute with, under their original names: value x scale in fp32, rounded to dtype.

    Raises ValueError when a scale is missing or misshapen.
    """
    weights: dict[str, Tensor] = {}
    for name, raw in stored.items():
        if name.endswith(".weight_packed"):
            weights[name.removesuffix("_packed")] = _from_int4(raw, _scale(stored, name, "weight_scale")).to(dtype)
        elif raw.dtype is torch.float8_e4m3fn:
            weights[name] = _from_fp8(raw, _scale(stored, name, "weight_scale_inv")).to(dtype)
        elif not name.endswith((".weight_scale", ".weight_scale_inv", ".weight_shape")):
            weights[name] = raw.to(dtype)
    return weights


def _scale(stored: Mapping[str, Tensor], name: str, suffix: str) -> Tensor:
    rows, width = stored[name].shape
    scale_name = f"{name.rpartition('.')[0]}.{suffix}"
    expected = (rows, width * 8 // GROUP) if suffix == "weight_scale" else (-(-rows // BLOCK), -(-width // BLOCK))
    found = tuple(stored[scale_name].shape) if scale_name in stored else None
    if found != expected:
        raise ValueError(f"weights: {scale_name} has shape {found}, {name} asks for {expected}")
    return stored[scale_name]


def _to_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [R, C] and f32 [ceil(R/128), ceil(C/128)]."""
    rows, width = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, -width % BLOCK, 0, -rows % BLOCK))
    tiles = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = (tiles.abs().amax((1, 3)) / E4M3_MAX).clamp_min(SCALE_MIN)
    values = (tiles / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).view(padded.shape)
    return values[:rows, :width].contiguous().to(torch.float8_e4m3fn), scale


def _from_fp8(values: Tensor, scale: Tensor) -> Tensor:
    rows, width = values.shape
    spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :width]
    return values.float() * spread


def _to_int4(w: Tensor) -> tuple[Tensor, Tensor]:
    """int32 [R, C/8] and bf16 [R, C/32]. Values are taken against the scale as it is stored."""
    groups = w.float().view(w.shape[0], -1, GROUP)
    scale = (groups.abs().amax(2) / INT4_MAX).clamp_min(SCALE_MIN).to(torch.bfloat16)
    values = (groups / scale.float()[..., None]).round().clamp(-INT4_MAX - 1, INT4_MAX).to(torch.int32) + 8
    nibbles = values.view(w.shape[0], -1, 8)
    packed = nibbles[..., 0].clone()
    for i in range(1, 8):
        packed |= nibbles[..., i] << 4 * i
    return packed, scale


def _from_int4(packed: Tensor, scale: Tensor) -> Tensor:
    nibbles = torch.stack([(packed >> 4 * i & 15) - 8 for i in range(8)], 2)
    return (nibbles.view(*scale.shape, GROUP).float() * scale.float()[..., None]).view(packed.shape[0], -1)
