"""What a bit-exact re-execution depends on besides inputs: builds, threads, instruction set, mesh, code.

The kernels' mode and dtype are settings and stand in the genesis.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path

import numpy
import torch

from headway.kernels.numerics import ARITHMETIC

PACKAGES = ("schemas", "bus", "kernels", "weight_sync", "trainer")
ISA_FLAGS = ("sse4_2", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")
MKL_VARIABLES = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
NOT_OF_THE_BITS = ("code", "commit", "mesh")
"""What is named and compared apart: a replay asks whether today's code gives the same bits; the mesh has no say."""


def describe() -> dict[str, str]:
    """Names and values, for the ledger."""
    built = torch.__config__.show()
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "blas": _find(r"BLAS_INFO=(\w+)", built),
        "mkl": _find(r"Math Kernel Library Version (\S+ Build \d+)", built),
        "onednn": _find(r"MKL-DNN (v\S+)", built),
        "mkl_mode": " ".join(f"{name}={os.environ[name]}" for name in MKL_VARIABLES if name in os.environ),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "isa": _isa(),
        "threads": str(torch.get_num_threads()),
        "mkldnn": str(torch.backends.mkldnn.is_available()),
        "arithmetic": ARITHMETIC,
        "mesh": str(torch.distributed.get_world_size() if _distributed() else 1),
        "code": source_digest(),
        "commit": _commit(),
    }


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else "none"


@functools.cache
def _isa() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown"
    flags = set(_find(r"(?m)^(?:flags|Features)\s*: (.*)$", text).split())
    return " ".join(
        [_find(r"(?m)^(?:vendor_id|CPU implementer)\s*: (\S+)", text), *(f for f in ISA_FLAGS if f in flags)]
    )


@functools.cache
def source_digest() -> str:
    """SHA-256 over the sources that a step runs through, first 16 digits."""
    found = hashlib.sha256()
    root = Path(__file__).parents[1]
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


@functools.cache
def _commit() -> str:
    """The git commit of the sources, marked when they differ from it; `unknown` for an installed copy."""
    command = ["git", "-C", str(Path(__file__).parents[1]), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"
