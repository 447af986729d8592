"""A few seeds of tests/sim, so that a change which the simulator cannot follow shows at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SIM = Path(__file__).parents[1] / "sim"
CODE = """if True:
    from simulator.models import installed
    from simulator.world import shared_folder, simulate
    with installed(), shared_folder() as folder:
        print(sum(simulate(seed, folder).report.trained for seed in range(4)))
"""


def test_the_simulator_runs_the_services_as_they_are() -> None:
    env = {**os.environ, "PYTHONPATH": str(SIM)}
    done = subprocess.run([sys.executable, "-P", "-c", CODE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 20
