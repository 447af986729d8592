"""Asking the BLAS for sums whose order does not depend on a row's company.

MKL on Intel's processors sums a row of few otherwise than one of many (with AVX-512 up to 8 rows, with AVX2 at any
number), unless its strict mode of conditional numerical reproducibility is on (see that chapter of oneMKL's developer
guide). It keeps to the fastest instruction set and was measured to cost nothing (docs/NUMERICS.md).
On other processors it would mean another, slower instruction set, and is not needed.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"


def sum_rows_alike(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """To be called before a process's first product, which is when MKL looks. Whoever set the variable has decided."""
    try:
        intel = "GenuineIntel" in cpuinfo.read_text()
    except OSError:
        return
    if intel:
        os.environ.setdefault(VARIABLE, STRICT)
