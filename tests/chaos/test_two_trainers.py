"""P3 with real processes: a second trainer of a run fences the first one out, which ends with 75."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any


def test_the_older_of_two_trainers_ends_with_75_and_the_run_can_go_on(launch: Any) -> None:
    steps = 10
    run = launch(steps)
    run.until_step(2)
    first = run.pids()["trainer"]
    command = Path(f"/proc/{first}/cmdline").read_text().rstrip("\0").split("\0")
    env = dict(line.split("=", 1) for line in Path(f"/proc/{first}/environ").read_text().split("\0") if "=" in line)
    log = run.output_file.with_suffix(".second")
    os.kill(first, signal.SIGSTOP)  # a zombie: it believes that it is the trainer when it wakes
    with log.open("wb") as out:
        second = subprocess.Popen(command, env=env | {"HEADWAY_INSTANCE": "second"}, stdout=out, stderr=out)
    try:
        run.until(lambda: "term_opened" in log.read_text(), "second term")
        os.kill(first, signal.SIGCONT)
        assert run.up.wait(120) == 75
    finally:
        second.kill()
        second.wait(10)
    assert re.search(r"headway: trainer ended with exit code 75", run.output), run.output
    seen = run.read(75).report
    assert (seen.violations, seen.lost, seen.trained_twice, seen.terms) == ([], 0, 0, 2)
    run.start()
    run.end().assert_promises(steps)
