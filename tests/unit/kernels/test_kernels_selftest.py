"""The start-up self-test passes here, and names the op when a measure is missing or an op misbehaves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headway.kernels import selftest
from headway.kernels.blas import VARIABLE
from headway.kernels.numerics import FAST, Numerics

CPUINFO = Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_this_machine_keeps_the_promise(make_model, dtype):
    assert selftest.refusal(make_model().config, dtype) is None


def test_by_the_librarys_attention_the_refusal_names_it(make_model):
    refused = selftest.refusal(make_model().config, torch.float32, Numerics(block_attention=False))
    assert refused.startswith("attention")
    assert "threads" in refused
    assert selftest.refusal(make_model().config, torch.float32, FAST) is not None


@pytest.mark.usefixtures("blas_that_needs_padding")
@pytest.mark.parametrize(
    ("numerics", "culprit"),
    [(Numerics(pad_rows=False), "linear"), (Numerics(pad_experts=False), "expert matmul"), (FAST, "linear")],
)
def test_without_padding_the_refusal_names_the_op(make_model, numerics, culprit):
    assert culprit in selftest.refusal(make_model().config, torch.float32, numerics)


@pytest.mark.skipif("GenuineIntel" not in CPUINFO, reason="MKL needs no asking on this processor")
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512"])
def test_on_intel_the_promise_holds_because_mkl_is_asked(instructions):
    """With AVX2, too, which is all that most laptops have; and not where somebody has set it otherwise."""
    code = (
        "import torch; from headway.kernels import selftest; from headway.kernels.config import ModelConfig\n"
        "torch.set_num_threads(1)\n"
        "config = ModelConfig(vocab_size=67, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,\n"
        "  num_key_value_heads=2, head_dim=16, moe_intermediate_size=40, num_experts=5, num_experts_per_tok=2,\n"
        "  max_position_embeddings=400)\n"
        "print(selftest.refusal(config))"
    )
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}

    def said(**more):
        env = kept | {"MKL_ENABLE_INSTRUCTIONS": instructions} | more
        done = subprocess.run([sys.executable, "-P", "-c", code], env=env, check=True, capture_output=True, text=True)
        return done.stdout

    assert said() == "None\n"
    assert "linear" in said(MKL_CBWR="AUTO")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [8, 16])
def test_tiles_and_threads_are_judged_by_what_they_compute(make_model, monkeypatch, threads, rows):
    monkeypatch.setattr("headway.kernels.numerics.ROW_TILE", rows)
    monkeypatch.setattr("headway.kernels.moe.ROW_TILE", rows)
    x, w = (torch.randn(n, 256, generator=torch.Generator().manual_seed(n)) for n in (1024, 128))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alike = torch.equal(x[:rows] @ w.T, (x @ w.T)[:rows])
        refused = selftest.refusal(make_model(hidden_size=256).config)
    finally:
        torch.set_num_threads(before)
    assert alike or "linear" in refused
    assert refused is None or f"{threads} threads" in refused
    assert refused is None or threads > 1


def test_key_sums_that_the_blas_splits_are_noticed(make_model, monkeypatch):
    monkeypatch.setattr("headway.kernels.attention.KV_BLOCK", 1 << 20)
    assert selftest.refusal(make_model().config).startswith("attention")


def test_an_error_that_no_single_op_shows_is_caught_end_to_end(make_model, monkeypatch):
    real = selftest.forward_cached

    def off_by_one_ulp(*args, **kwargs):
        out = real(*args, **kwargs)
        out.hidden[-1].copy_(torch.nextafter(out.hidden[-1], torch.tensor(9.0)))
        return out

    monkeypatch.setattr(selftest, "forward_cached", off_by_one_ulp)
    assert selftest.refusal(make_model().config).startswith("decoder")
