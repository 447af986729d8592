import dataclasses

import pytest
import torch

from headway.kernels.config import ModelConfig
from headway.kernels.decoder import KVCache, Output, forward_cached
from headway.kernels.numerics import PAGE
from headway.kernels.weights import init_weights, prepare

SMALL = ModelConfig(
    vocab_size=67,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=40,
    num_experts=5,
    num_experts_per_tok=2,
    max_position_embeddings=400,
)


def padding_needed() -> bool:
    """Whether this BLAS sums a single row otherwise than one of many, so that order-stability needs padded rows."""
    x, w = (torch.randn(64, 48, generator=torch.Generator().manual_seed(n)) for n in range(2))
    return not torch.equal(x[:1] @ w.T, (x @ w.T)[:1])


@pytest.fixture
def blas_that_needs_padding() -> None:
    """Skips where there is nothing to show: elsewhere, and without `kernels/blas.py`, it is needed."""
    if not padding_needed():
        pytest.skip("this BLAS was asked to sum a row alike in any company, and does")


@dataclasses.dataclass
class Model:
    config: ModelConfig
    weights: dict[str, torch.Tensor]  # fp32, bf16-representable

    def prepared(self, dtype: torch.dtype = torch.float32):
        with torch.no_grad():
            return prepare(self.weights, self.config, dtype)


@pytest.fixture(scope="session")
def make_model():
    def make(seed: int = 0, gain: float = 1.0, **changes) -> Model:
        config = dataclasses.replace(SMALL, **changes)
        rng = torch.Generator().manual_seed(seed + 1)
        weights = {}
        for name, w in init_weights(config, seed).items():
            w = w * gain if w.dim() > 1 else w + 0.2 * torch.randn(w.shape, generator=rng)
            weights[name] = w.bfloat16().float()
        return Model(config, weights)

    return make


@pytest.fixture(scope="session")
def make_batch():
    def make(config: ModelConfig, lengths: list[int], seed: int = 0):
        rng = torch.Generator().manual_seed(seed)
        ids = torch.randint(config.vocab_size, (len(lengths), max(lengths)), generator=rng)
        return ids, torch.tensor(lengths)

    return make


@pytest.fixture(scope="session")
def serve():
    """Serve sequences as an engine would: chunked prefill, then decoding in ever changing company."""

    def run(prepared, config, ids, lengths, dtype, numerics, seed: int) -> Output:
        rng = torch.Generator().manual_seed(seed)
        b, t = ids.shape
        each = -(-t // PAGE)
        cache = KVCache.allocate(config, (b + 4) * each, dtype)
        cache.kv.copy_(torch.randn(cache.kv.shape, generator=rng) * 50)  # garbage from earlier sequences
        pages = torch.randperm(cache.pages, generator=rng).view(-1, each)[:b]
        hidden = torch.full((b, t, config.hidden_size), float("nan"), dtype=dtype)
        routes = torch.full((b, t, len(config.sparse_layers), config.num_experts_per_tok), -1)
        done = torch.zeros(b, dtype=torch.int64)
        while (done < lengths).any():
            live = (done < lengths).nonzero().flatten()
            live = live[torch.randperm(live.numel(), generator=rng)]
            live = live[: int(torch.randint(1, live.numel() + 1, (), generator=rng))]
            longest = 1 if done.float().mean() > 8 else 19
            size = torch.randint(1, longest + 1, (live.numel(),), generator=rng)
            size = torch.minimum(size, lengths[live] - done[live])
            chunk = torch.randint(config.vocab_size, (live.numel(), int(size.max()) + 3), generator=rng)
            for row, seq in enumerate(live.tolist()):
                chunk[row, : size[row]] = ids[seq, done[seq] : done[seq] + size[row]]
            out = forward_cached(prepared, config, cache, pages[live], done[live], chunk, size, numerics)
            for row, seq in enumerate(live.tolist()):
                span = slice(int(done[seq]), int(done[seq] + size[row]))
                hidden[seq, span] = out.hidden[row, : size[row]]
                routes[seq, span] = out.routes[row, : size[row]]
            done[live] += size
        return Output(hidden=hidden, routes=routes, live=routes, router_scores=())

    return run
