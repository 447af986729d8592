"""On a GPU: a row's bits depend on neither its company nor on how its sequence was cut. Skips without one."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@DTYPES
def test_the_composition_of_a_batch_does_not_matter(dtype: torch.dtype) -> None:
    from headway.kernels import moe
    from headway.kernels import triton_ops as ops

    x, w, norm = _rand(300, 512, dtype=dtype), _rand(256, 512, dtype=dtype, seed=1), _rand(512, dtype=dtype, seed=2)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(300)]).cuda()
    w13 = _rand(8, 256, 512, dtype=dtype, seed=3)
    weights = torch.rand(300, 2, device="cuda")

    def mixture(part: slice) -> torch.Tensor:
        plan = moe.make_plan(ids[part], 8, ops.BLOCK_M)
        y = ops.grouped_mm(x[part][plan.token], w13, plan.ends)
        return ops.sum_slots(y, plan.rows, weights[part])

    everything = slice(0, 300)
    for part in (slice(0, 1), slice(7, 8), slice(40, 57), slice(100, 233)):
        assert torch.equal(ops.linear(x[part], w), ops.linear(x, w)[part])
        assert torch.equal(ops.rms_norm(x[part], norm, 1e-6), ops.rms_norm(x, norm, 1e-6)[part])
        assert torch.equal(mixture(part), mixture(everything)[part])


@DTYPES
def test_prefill_chunks_and_decoding_give_the_same_bits(dtype: torch.dtype) -> None:
    from headway.kernels import reference
    from headway.kernels import triton_ops as ops

    n, heads, kv, d = 300, 8, 2, 64
    q, k, v = (_rand(n, h, d, dtype=dtype, seed=i) for i, h in enumerate((heads, kv, kv)))
    rows = torch.arange(n, device="cuda")[None]
    zero, all_of_it = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.full((1,), n, device="cuda")
    keys, values = k.flatten(1), v.flatten(1)
    full = ops.attention(q, keys, values, rows, zero, all_of_it, kv, d**-0.5)
    expected = reference.attention(q.double(), k.double(), v.double(), d**-0.5)
    torch.testing.assert_close(full.double(), expected, rtol=2e-2, atol=2e-2)
    for start, length in ((0, 1), (17, 1), (n - 1, 1), (100, 37), (250, 50)):
        part = slice(start, start + length)
        begin, count = torch.full((1,), start, device="cuda"), torch.full((1,), length, device="cuda")
        assert torch.equal(ops.attention(q[part], keys, values, rows, begin, count, kv, d**-0.5), full[part])


@DTYPES
def test_engine_and_trainer_see_one_log_probability(dtype: torch.dtype) -> None:
    from headway.kernels import reference
    from headway.kernels import triton_ops as ops

    hidden, head = _rand(200, 256, dtype=dtype).requires_grad_(), _rand(5000, 256, seed=1).requires_grad_()
    targets, heat = torch.arange(200, device="cuda") * 20, torch.full((200, 1), 0.7, device="cuda")
    trained = ops.token_logprob(hidden, head, targets, heat)
    for row in (0, 31, 32, 199):
        one = slice(row, row + 1)
        with torch.no_grad():
            served = ops.token_logprob(hidden[one], head, targets[one], heat[one])
        assert all(torch.equal(a, b[one]) for a, b in zip(served, trained, strict=True))
    exact = reference.token_logprob(hidden.double(), head.double(), targets, heat[:, 0].double())
    torch.testing.assert_close(trained[0].double(), exact[0], rtol=1e-3, atol=1e-3)
    first = torch.autograd.grad(trained[0].sum(), [hidden, head], retain_graph=True)
    again = torch.autograd.grad(trained[0].sum(), [hidden, head])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@DTYPES
def test_the_decoder_serves_what_it_trains_on(dtype: torch.dtype) -> None:
    from headway.kernels.config import ModelConfig
    from headway.kernels.decoder import KVCache, forward_cached, forward_full
    from headway.kernels.weights import init_weights, prepare

    config = ModelConfig(
        vocab_size=500,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=256,
    )
    weights = {name: w.cuda() for name, w in init_weights(config, 0).items()}
    prepared = prepare(weights, config, dtype)
    ids, lengths = torch.randint(500, (3, 70), device="cuda"), torch.tensor([70, 41, 5], device="cuda")
    full = forward_full(prepared, config, ids, lengths)
    cache = KVCache.allocate(config, 15, dtype, "cuda")
    pages = torch.randperm(15, device="cuda").view(3, 5)
    for row in range(3):
        n, at = int(lengths[row]), 0
        for size in (min(33, n), *[1] * 20):
            if at + size > n:
                break
            start, count = torch.full((1,), at, device="cuda"), torch.full((1,), size, device="cuda")
            part = ids[row : row + 1, at : at + size]
            out = forward_cached(prepared, config, cache, pages[row : row + 1], start, part, count)
            assert torch.equal(out.hidden[0], full.hidden[row, at : at + size])
            assert torch.equal(out.routes[0], full.routes[row, at : at + size])
            at += size
    on_cpu = prepare({name: w.cpu() for name, w in weights.items()}, config, torch.float32)
    plain = forward_full(on_cpu, config, ids.cpu(), lengths.cpu())
    if dtype == torch.float32:
        torch.testing.assert_close(full.hidden.cpu(), plain.hidden, rtol=1e-2, atol=1e-2)
