"""Options of the simulator: `--seed N` runs one seed, `--seeds M` the first M."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulator.models import installed
from simulator.world import shared_folder


@pytest.fixture
def shared() -> Iterator[Path]:
    """Everything a world needs, with the stand-ins in place."""
    with installed(), shared_folder() as folder:
        yield folder
