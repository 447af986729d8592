"""Promise P7 with compiled decoding: what an engine records is what the trainer's forward computes, bit for bit."""

import threading
from pathlib import Path

import pytest
import torch

from headway.kernels.config import ModelConfig
from headway.kernels.decoder import forward_full, token_logprob
from headway.kernels.hf import save_folder
from headway.kernels.numerics import INVARIANT
from headway.kernels.weights import init_weights
from headway.rollout_agent.engine.core import CoreSettings, EngineCore, Finished
from headway.rollout_agent.engine.requests import Generate
from headway.rollout_agent.engine.weights import load_weights

pytest.importorskip("numba", reason="the extra `fast` is not installed")
pytestmark = pytest.mark.usefixtures("compiled_decoding")

MODEL = ModelConfig(
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
TEMPERATURE, WAIT_S = 0.9, 120


def test_recorded_log_probabilities_and_routes_are_those_of_the_full_forward(tmp_path: Path) -> None:
    save_folder(tmp_path, MODEL, {name: w.bfloat16() for name, w in init_weights(MODEL, 0).items()})
    weights, _ = load_weights(tmp_path, "0.0", None, torch.float32)
    assert weights.packed is not None
    settings = CoreSettings(
        slots=8,
        max_batch=8,
        prefill_tokens=50,
        context_tokens=256,
        threads=1,
        compute_dtype=torch.float32,
        numerics=INVARIANT,
    )
    fatal: list[BaseException] = []
    core, left, found = EngineCore(settings, fatal.append), threading.Semaphore(0), list[Finished]()
    core.start()
    core.call(lambda: core.swap(weights, True)).result(WAIT_S)
    rng = torch.Generator().manual_seed(0)
    for i in range(12):
        request = Generate(
            rid=str(i),
            input_ids=torch.randint(90, (3 + 11 * i,), generator=rng).tolist(),
            max_new_tokens=10 + 5 * i,
            temperature=TEMPERATURE,
            stop_ids=frozenset(),
            seed=i,
            return_logprob=True,
            routes_start=0,
        )
        core.submit(request, lambda one: (found.append(one), left.release()))
    assert all(left.acquire(timeout=WAIT_S) for _ in range(12))
    core.stop()
    assert not fatal
    for one in found:
        ids = torch.tensor([one.request.input_ids + one.output_ids])
        first = len(one.request.input_ids)
        with torch.no_grad():
            out = forward_full(weights.prepared, MODEL, ids, torch.tensor([ids.shape[1]]))
            due, _ = token_logprob(weights.prepared, out.hidden[0, first - 1 : -1], ids[0, first:], TEMPERATURE)
        assert torch.equal(due, torch.tensor(one.logprobs))
        assert torch.equal(out.routes[0, :-1], torch.from_numpy(one.routes).long())
