"""Stands in for SGLang's CUDA kernel wheel on a CPU: what is imported by name and never called there.

It defines neither `scalar_type` nor `allreduce`, by whose absence SGLang takes its paths in plain torch.
"""

from typing import Any, NoReturn

__version__ = "0.4.10"


def _absent(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError("this kernel is not part of Headway's CPU stand-in for sgl_kernel")


copy_all_layer_kv_cache_cpu = _absent
assign_req_to_token_pool_cpu = _absent
build_tree_kernel_efficient_cpu = _absent
verify_tree_greedy_cpu = _absent
assign_draft_cache_locs_contiguous_cpu = _absent
assign_extend_cache_locs_cpu = _absent
fill_accept_out_cache_loc_cpu = _absent
fill_bonus_tokens_cpu = _absent
