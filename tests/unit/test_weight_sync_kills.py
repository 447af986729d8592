"""kill -9 at every fail point of publishing and applying weights: the next life ends with exactly the right bytes."""

import json
import subprocess
import sys
from pathlib import Path

from headway.bus.failpoints import POINTS

PROGRAM = Path(__file__).parent / "faults" / "weight_kills.py"


def test_a_kill_at_any_point_of_publishing_and_applying_costs_only_time(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", PROGRAM, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == [], done.stderr[-2000:]
    due = {name for name in POINTS if name.startswith(("mirror.", "put.shard.", "put.manifest.", "weights.rename."))}
    assert set(found["passes"]) == due
