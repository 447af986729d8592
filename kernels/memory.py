"""Keep glibc from giving large freed buffers back to the kernel.

By default every large tensor is a fresh mapping, whose page faults cost 10-30% of a small model's training
step on a CPU.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from glibc's malloc.h


def keep_freed_memory(trim_bytes: int = 1 << 30) -> bool:
    """Serve all allocations from the heap and trim it only above trim_bytes of free top. False off glibc.

    Process-wide; call it once, at start. It changes speed and resident memory, never results.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, trim_bytes))
