"""The Triton kernels under Triton's interpreter: indexing, masks and order, not a GPU's rounding. fp32 alone.

They run in one process of their own, since the interpreter is chosen when Triton is imported.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

SETUP = """
import torch
from headway.kernels import moe, reference, triton_ops as ops
g = torch.Generator().manual_seed(0)
rand = lambda *shape: torch.randn(shape, generator=g)
close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
def grads(out, leaves):
    direction = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return torch.autograd.grad((out * direction).sum(), leaves, retain_graph=True)
"""

CASES = {
    "the mixture's products and their gradients": """
ids = torch.randint(3, (40, 2), generator=g)
plan = moe.make_plan(ids, 4, ops.BLOCK_M)  # nobody chose the last expert
x, w = rand(40, 20).requires_grad_(), rand(4, 40, 20).requires_grad_()
rows = x[plan.token]
ours, oracle = ops.grouped_mm(rows, w, plan.ends), reference.grouped_mm(rows, w, plan.ends)
close(ours, oracle)
for a, b in zip(grads(ours, [x, w]), grads(oracle, [x, w])):
    close(a, b)
assert not grads(ops.grouped_mm(rows, w, plan.ends), [w])[0][3].any()
""",
    "combining in slot order, with the bits of torch": """
ids = torch.randint(5, (9, 3), generator=g)
plan = moe.make_plan(ids, 5, 8)
y, weights = rand(int(plan.ends[-1]), 24), rand(9, 3)
total = torch.zeros(9, 24)
for slot in range(3):
    total = total + y[plan.rows[:, slot]] * weights[:, slot : slot + 1]
assert torch.equal(ops.sum_slots(y, plan.rows, weights), total)
""",
    "linear, whose rows do not depend on their company": """
x, w = rand(37, 40), rand(70, 40)
whole = ops.linear(x, w)
close(whole, x @ w.T)
assert torch.equal(ops.linear(x[5:6], w)[0], whole[5])
""",
    "rms_norm and its gradients": """
x, w = rand(7, 300).requires_grad_(), rand(300).requires_grad_()
ours, oracle = ops.rms_norm(x, w, 1e-6), reference.rms_norm(x, w, 1e-6)
close(ours, oracle)
for a, b in zip(grads(ours, [x, w]), grads(oracle, [x, w])):
    close(a, b)
""",
    "log-probabilities, entropies and their gradients": """
h, w = rand(35, 40).requires_grad_(), rand(150, 40).requires_grad_()
targets, heat = torch.arange(35) * 4, torch.linspace(0.5, 1.5, 35)
ours, oracle = ops.token_logprob(h, w, targets, heat[:, None]), reference.token_logprob(h, w, targets, heat)
for a, b in zip(ours, oracle):
    close(a, b)
for a, b in zip(grads(torch.stack(ours), [h, w]), grads(torch.stack(oracle), [h, w])):
    close(a, b)
alone = ops.token_logprob(h[3:4], w, targets[3:4], heat[3:4, None])
assert torch.equal(alone[0][0], ours[0][3]) and torch.equal(alone[1][0], ours[1][3])
""",
    "attention: whole sequences, chunks and decoding agree, over rows in any order": """
lengths, heads, d, u = torch.tensor([37, 20]), (4, 2), 12, 8
q, k, v = rand(57, 4, d), rand(57, 2, d), rand(57, 2, u)
rows = torch.randperm(80, generator=g)[:57]
cache_k, cache_v = torch.full((80, 2 * d), 9.0), torch.full((80, 2 * u), 9.0)
cache_k[rows], cache_v[rows] = k.flatten(1), v.flatten(1)
where = torch.zeros(2, 37, dtype=torch.int64)
where[0], where[1, :20] = rows[:37], rows[37:]
full = ops.attention(q, cache_k, cache_v, where, torch.zeros(2, dtype=torch.int64), lengths, 2, 0.3)
close(full[:37], reference.attention(q[:37], k[:37], v[:37], 0.3))
close(full[37:], reference.attention(q[37:], k[37:], v[37:], 0.3))
one = torch.tensor([36, 19])
decoded = ops.attention(q[[36, 56]], cache_k, cache_v, where, one, torch.ones(2, dtype=torch.int64), 2, 0.3)
close(decoded, full[[36, 56]])
chunk = ops.attention(q[30:37], cache_k, cache_v, where[:1], torch.tensor([30]), torch.tensor([7]), 2, 0.3)
close(chunk, full[30:37])
""",
    "the decoder calls them: a whole forward, its gradients, chunks and decoding": """
from headway.kernels.config import ModelConfig
from headway.kernels.decoder import KVCache, forward_cached, forward_full, token_logprob
from headway.kernels.numerics import Numerics
from headway.kernels.weights import init_weights, prepare
on = Numerics(pad_rows=False, triton=True)
programs = 0
for name, kernel in vars(ops).items():
    if name.endswith("_kernel"):
        def counting(grid, run=kernel.__getitem__):
            global programs
            programs += torch.tensor(grid).prod().item()
            return run(grid)
        setattr(ops, name, type("Counting", (), {"__getitem__": lambda self, grid, c=counting: c(grid)})())
config = ModelConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, moe_intermediate_size=16, num_experts=3, num_experts_per_tok=2,
    max_position_embeddings=64)
weights = {name: w.requires_grad_() for name, w in init_weights(config, 0).items()}
prepared = prepare(weights, config, torch.float32)
ids, lengths = torch.randint(40, (2, 3), generator=g), torch.tensor([3, 2])
ours, plain = forward_full(prepared, config, ids, lengths, on), forward_full(prepared, config, ids, lengths)
close(ours.hidden, plain.hidden)
assert torch.equal(ours.routes, plain.routes)
with torch.no_grad():
    cache, pages = KVCache.allocate(config, 4, torch.float32), torch.tensor([[2]])
    cache.kv.fill_(3.0)
    steps = [forward_cached(prepared, config, cache, pages, torch.tensor([at]), ids[:1, at : at + n],
        torch.tensor([n]), on) for at, n in ((0, 2), (2, 1))]
    assert torch.equal(torch.cat([step.hidden[0] for step in steps]), ours.hidden[0])
    logprob = token_logprob(prepared, ours.hidden[0], ids[0], 0.8, on)
    close(logprob[0], token_logprob(prepared, plain.hidden[0], ids[0], 0.8)[0])
    assert torch.equal(token_logprob(prepared, ours.hidden[0, 1:2], ids[0, 1:2], 0.8, on)[0], logprob[0][1:2])
assert 60 < programs <= 100, programs
leaves = [w for name, w in weights.items() if "lm_head" not in name]
for a, b in zip(grads(ours.hidden, leaves), grads(plain.hidden, leaves)):
    close(a, b)
""",
    "latent attention in the decoder, too": """
from headway.kernels.config import ModelConfig
from headway.kernels.decoder import KVCache, forward_cached, forward_full
from headway.kernels.numerics import Numerics
from headway.kernels.weights import init_weights, prepare
on = Numerics(pad_rows=False, triton=True)
config = ModelConfig(model_type="deepseek_v3", vocab_size=40, hidden_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=4,
    num_experts_per_tok=2, max_position_embeddings=64, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=12, intermediate_size=24, first_k_dense_replace=1, n_shared_experts=1, n_group=2,
    topk_group=1, routed_scaling_factor=2.5)
with torch.no_grad():
    prepared = prepare(init_weights(config, 0), config, torch.float32)
    ids, lengths = torch.randint(40, (1, 3), generator=g), torch.tensor([3])
    ours, plain = forward_full(prepared, config, ids, lengths, on), forward_full(prepared, config, ids, lengths)
    close(ours.hidden, plain.hidden)
    cache, pages = KVCache.allocate(config, 2, torch.float32), torch.tensor([[1]])
    steps = [forward_cached(prepared, config, cache, pages, torch.tensor([at]), ids[:, at : at + n],
        torch.tensor([n]), on) for at, n in ((0, 2), (2, 1))]
    assert torch.equal(torch.cat([step.hidden[0] for step in steps]), ours.hidden[0])
""",
}


RUN = """
import traceback
for name, body in CASES.items():
    try:
        exec(body, dict(globals()))
        print("passed", name, flush=True)
    except Exception:
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def output() -> str:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    program = f"{SETUP}\nCASES = {CASES!r}\n{RUN}"
    done = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_under_the_interpreter(case: str, output: str) -> None:
    assert f"passed {case}" in output.splitlines(), output[-3000:]
