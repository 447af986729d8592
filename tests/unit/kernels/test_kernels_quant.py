"""Promise: quantised weights are a pure function of the bf16 rounding, the same on both sides."""

import itertools

import pytest
import torch

from headway.kernels.quant import BLOCK, GROUP, SCALE_MIN, dequantise, quantise

NAME = "model.layers.0.mlp.experts.3.gate_proj.weight"
STEM = NAME.removesuffix("weight")


def masters(rows, width, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.02


def nearest(value, levels):
    """The nearest level, of two equally near ones the one with an even index."""
    return min(levels, key=lambda pair: (abs(pair[1] - value), pair[0] % 2))[0]


E4M3 = [(i, torch.tensor([i], dtype=torch.uint8).view(torch.float8_e4m3fn).item()) for i in range(127)]


def test_fp8_is_the_nearest_value_under_the_largest_of_each_block():
    w = masters(130, 140).bfloat16()
    stored = quantise({NAME: w}, "fp8")
    values, scales = stored[NAME], stored[STEM + "weight_scale_inv"]
    assert (values.dtype, values.shape, scales.shape) == (torch.float8_e4m3fn, (130, 140), (2, 2))
    raw = values.view(torch.uint8)
    for i, j in itertools.product(range(0, 130, 3), range(0, 140, 7)):
        block = w[i // BLOCK * BLOCK :, j // BLOCK * BLOCK :][:BLOCK, :BLOCK].float()
        scale = scales[i // BLOCK, j // BLOCK]
        assert scale == block.abs().max() / 448
        ratio = (w[i, j].float() / scale).item()
        assert raw[i, j].item() == nearest(abs(ratio), E4M3) + 128 * (ratio < 0)


def test_int4_is_the_nearest_of_sixteen_levels_packed_lowest_first():
    w = masters(3, 64).bfloat16()
    stored = quantise({NAME: w}, "int4")
    packed, scales = stored[STEM + "weight_packed"], stored[STEM + "weight_scale"]
    assert (packed.dtype, packed.shape, scales.dtype, scales.shape) == (torch.int32, (3, 8), torch.bfloat16, (3, 2))
    assert stored[STEM + "weight_shape"].tolist() == [3, 64]
    for i, j in itertools.product(range(3), range(64)):
        scale = scales[i, j // GROUP]
        assert scale == (w[i, j // GROUP * GROUP :][:GROUP].float().abs().max() / 7).bfloat16()
        level = round((w[i, j].float() / scale.float()).item())
        assert (packed[i, j // 8].item() >> 4 * (j % 8) & 15) - 8 == level


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_masters_and_their_roundings_give_the_same_bytes(scheme):
    w = masters(130, 160)
    from_masters, from_rounded = quantise({NAME: w}, scheme), quantise({NAME: w.bfloat16()}, scheme)
    assert from_masters.keys() == from_rounded.keys()
    assert all(torch.equal(bits(from_masters[name]), bits(from_rounded[name])) for name in from_masters)


@pytest.mark.parametrize(("scheme", "scale"), [("fp8", "weight_scale_inv"), ("int4", "weight_scale")])
def test_no_byte_changes_where_no_rounding_does_while_masters_would_move_most_scales(scheme, scale):
    before = masters(256, 512)
    after = before * (1 + 1e-5 * torch.randn(before.shape, generator=torch.Generator().manual_seed(1)))
    after = torch.where(after.bfloat16() == before.bfloat16(), after, before)
    old, new = quantise({NAME: before}, scheme), quantise({NAME: after}, scheme)
    assert not torch.equal(before, after)
    assert all(torch.equal(bits(old[name]), bits(new[name])) for name in old)
    blocks = [w.view(2, BLOCK, 4, BLOCK).abs().amax((1, 3)) for w in (before, after)]
    assert (blocks[0] != blocks[1]).float().mean() > 0.5


@pytest.mark.parametrize(("scheme", "step"), [("fp8", 16 / 448), ("int4", 0.51 / 7)])
def test_dequantised_weights_are_within_half_a_step_in_any_dtype(scheme, step):
    w = masters(100, 96).bfloat16().float()
    stored = quantise({NAME: w, "model.norm.weight": w[0]}, scheme)
    back = dequantise(stored, torch.float32)
    assert back.keys() == {NAME, "model.norm.weight"}
    assert (back[NAME] - w).abs().max() <= step * w.abs().max()
    assert torch.equal(back["model.norm.weight"], w[0].bfloat16().float())
    assert torch.equal(dequantise(stored, torch.bfloat16)[NAME], back[NAME].bfloat16())


def test_only_projections_are_quantised_and_int4_only_those_of_experts():
    w = masters(32, 32)
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight"]
    attention = "model.layers.0.self_attn.q_proj.weight"
    weights = dict.fromkeys([*names, attention, NAME], w)
    assert all(quantise(weights, "fp8")[name].dtype is torch.bfloat16 for name in names)
    assert quantise(weights, "fp8")[attention].dtype is torch.float8_e4m3fn
    assert quantise(weights, "int4")[attention].dtype is torch.bfloat16
    assert STEM + "weight_packed" in quantise(weights, "int4")


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_zeros_and_the_smallest_numbers_stay_finite(scheme):
    w = torch.zeros(4, 32)
    w[1, 1], w[2, 2] = 1e-39, -0.0
    stored = quantise({NAME: w}, scheme)
    scale = next(t for name, t in stored.items() if "scale" in name)
    assert bool((scale == SCALE_MIN).all())
    assert torch.equal(dequantise(stored, torch.float32)[NAME], torch.zeros(4, 32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_weights_that_are_not_finite_in_bf16_are_refused_by_name(bad):
    w = masters(4, 32)
    w[1, 1] = bad
    with pytest.raises(ValueError, match="gate_proj"):
        quantise({NAME: w}, "fp8")


def test_shapes_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="40 inputs"):
        quantise({NAME: masters(4, 40)}, "int4")
    with pytest.raises(ValueError, match="matrix"):
        quantise({NAME: masters(4, 32)[0]}, "fp8")
    stored = quantise({NAME: masters(4, 64)}, "int4")
    stored[STEM + "weight_scale"] = stored[STEM + "weight_scale"][:, :1]
    with pytest.raises(ValueError, match="weight_scale has shape"):
        dequantise(stored, torch.float32)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)
