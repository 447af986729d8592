"""The Triton products on a GPU against torch's grouped_mm and the chip's own large matmul. Skips without a GPU.

python -P tests/bench/gpu.py     bf16, d 2048, f 768, 128 experts, top 8, 16,384 tokens; ends in one JSON object
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

D, WIDTH, EXPERTS, K, TOKENS, ROUNDS = 2048, 768, 128, 8, 16_384, 20


def milliseconds(run: Callable[[], object]) -> float:
    """Median of CUDA-event times."""
    found = []
    for round_ in range(ROUNDS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if round_ >= 3:
            found.append(begin.elapsed_time(end))
    return statistics.median(found)


def main() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        print(json.dumps({"name": "gpu", "skipped": "triton is not installed"}))
        return
    if not torch.cuda.is_available():
        print(json.dumps({"name": "gpu", "skipped": "there is no CUDA GPU"}))
        return
    from headway.kernels import moe, triton_ops

    torch.manual_seed(0)
    ids = torch.rand(TOKENS, EXPERTS, device="cuda").topk(K).indices
    plan = moe.make_plan(ids, EXPERTS, triton_ops.BLOCK_M)
    x = torch.randn(plan.token.numel(), D, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(EXPERTS, WIDTH, D, device="cuda", dtype=torch.bfloat16)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    took = {
        "triton_ms": milliseconds(lambda: triton_ops.grouped_mm(x, w, plan.ends)),
        "torch_ms": milliseconds(lambda: F.grouped_mm(x, w.transpose(1, 2), offs=plan.ends)),
        "matmul_ms": milliseconds(lambda: square @ square),
    }
    rate = 2e-9 * x.shape[0] * D * WIDTH / took["triton_ms"]
    chip = 2e-9 * 8192**3 / took["matmul_ms"]
    figures = took | {"triton_tflops": rate, "matmul_tflops": chip, "device": torch.cuda.get_device_name()}
    print(
        f"grouped_mm: triton {took['triton_ms']:.2f} ms, torch {took['torch_ms']:.2f} ms; {rate / chip:.0%} of a matmul"
    )
    print(json.dumps({"name": "gpu", "figures": figures, "targets": {}}))


if __name__ == "__main__":
    main()
