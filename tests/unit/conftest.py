"""What unit tests share."""

from pathlib import Path

import pytest
import torch

from headway.kernels import selftest
from headway.kernels.config import ModelConfig
from headway.kernels.numerics import INVARIANT


@pytest.fixture(scope="session")
def compiled_decoding() -> None:
    """Skips where the self-test refuses compiled decoding, but on the processors for which it is known to be exact."""
    config = ModelConfig(
        vocab_size=90,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
    )
    found, processor = selftest.compiled_decoding(config, torch.float32, INVARIANT), Path("/proc/cpuinfo").read_text()
    known = any(vendor in processor for vendor in ("GenuineIntel", "AuthenticAMD"))
    if isinstance(found, str) and ("AVX-512" in found or not known):
        pytest.skip(found)
