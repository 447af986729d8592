"""The shapes of SGLang's replies, plus the versions of route rows, which SGLang doesn't tell."""

from __future__ import annotations

import base64
from typing import Any

from headway.kernels.numerics import PAGE
from headway.rollout_agent.engine.core import Counters, Finished, Loads
from headway.rollout_agent.engine.pages import SpanRow


def _spans(spans: list[SpanRow]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for start, end, version in spans]


def generate_reply(finished: Finished, weight_version: str) -> dict[str, Any]:
    """The body of a successful `/generate`.

    `weight_versions` are spans over output tokens. `routed_experts` is base64 of C-order i32
    [prompt + completion - 1 - start, layers, k], -1 where no token was routed; `routed_experts_versions`
    are spans over sequence positions, row t routing input token t.
    """
    request = finished.request
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finished.reason,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(finished.output_ids),
        "cached_tokens": finished.cached_tokens,
        "weight_version": finished.spans[-1][2] if finished.spans else weight_version,
        "weight_versions": _spans(finished.spans),
    }
    if request.return_logprob:
        pairs = zip(finished.logprobs, finished.output_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    if finished.routes is not None:
        meta["routed_experts"] = base64.b64encode(finished.routes.tobytes()).decode()
        meta["routed_experts_versions"] = _spans(finished.route_spans)
    return {"text": "", "output_ids": finished.output_ids, "meta_info": meta}


def loads_reply(loads: Loads, counters: Counters, max_batch: int) -> dict[str, Any]:
    """The body of `/v1/loads`: what SGLang tells of its one data-parallel rank, as far as it means something here."""
    used, capacity = loads.pages_busy * PAGE, loads.pages * PAGE
    rank = {
        "dp_rank": 0,
        "num_running_reqs": loads.running,
        "num_waiting_reqs": loads.waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + loads.waiting_tokens,
        "max_total_num_tokens": capacity,
        "max_running_requests": max_batch,
        "token_usage": used / capacity,
        "total_prefill_uncached_tokens": counters.prefilled_tokens,
    }
    return {"loads": [rank]}
