"""Deltas of quantised weights: bytes like any others, and few, because scales move as rarely as roundings do."""

import numpy as np
import pytest
import torch

from headway.kernels.quant import quantise
from headway.schemas.manifest import DTYPE_BYTES
from headway.weight_sync.codec import decode_chunk, encode_chunk
from headway.weight_sync.shard import chunk_ranges, element_width
from headway.weight_sync.torch_apply import raw_tensors

NAME = "model.layers.0.mlp.experts.0.up_proj.weight"
RNG = torch.Generator().manual_seed(0)
MASTERS = 0.02 * torch.randn(256, 512, generator=RNG)
STEP = 5.7e-7 * (0.42 * torch.randn(256, 512, generator=RNG)).clamp(-1, 1)


def delta_bytes(before, after):
    """Bytes of all deltas between two sets of tensors, each of which is decoded and compared."""
    total, old_raw = 0, raw_tensors(before)
    for name, new in raw_tensors(after).items():
        old, width = old_raw[name].data, element_width(new.dtype)
        served = old.copy()
        for a, b in chunk_ranges(new.shape, DTYPE_BYTES[new.dtype], 1 << 20):
            encoding, payload = encode_chunk(new.data[a:b], old[a:b], width)
            decode_chunk(int(encoding), payload, old[a:b], served[a:b], width)
            total += len(payload)
        assert np.array_equal(served, new.data), name
    return total


@pytest.mark.parametrize(("scheme", "scale"), [("fp8", "weight_scale_inv"), ("int4", "weight_scale")])
def test_deltas_of_quantised_weights_come_back_and_are_small(scheme, scale):
    before, after = (quantise({NAME: w}, scheme) for w in (MASTERS, MASTERS + STEP))
    full = sum(tensor.nbytes for tensor in after.values())
    assert 0 < delta_bytes(before, after) < full / 100
    name = NAME.removesuffix("weight") + scale
    assert (before[name] != after[name]).float().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8])
def test_deltas_of_every_other_dtype_come_back(dtype):
    before, after = ({NAME: (w * (1000 if dtype is torch.int8 else 1)).to(dtype)} for w in (MASTERS, MASTERS + STEP))
    delta_bytes(before, after)
