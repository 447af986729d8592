"""Two repairs that SGLang 0.5.23 needs on a CPU; Python runs this file in every worker, before SGLang.

1. torchvision registers operators that its CPU build lacks; SGLang uses none of them.
2. The host buffer of routed experts is registered with CUDA, which isn't there, and needs no registration.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
HOST_POOL = "sglang.srt.mem_cache.pool_host.common"


class _HostPool(importlib.abc.MetaPathFinder):
    """Finds the module where it is, and takes the registration out once it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != HOST_POOL:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            vars(module)["_cuda_host_register"] = lambda *_, **__: None

        vars(spec.loader)["exec_module"] = exec_module
        return spec


sys.meta_path.insert(0, _HostPool())
