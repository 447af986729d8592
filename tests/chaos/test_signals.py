"""P10 and a stand-still with real processes: a server that stops for a while, then SIGTERM of every service."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

STEPS = 12
SERVICES = ["dispatcher", "east-agent-0", "east-sandbox-0", "trainer", "east-engine-0"]
STOPPED_S = 4.0
"""Longer than `ack_wait_s`: the server redelivers what is being worked on when it continues."""
STOPS_MAX = 4
"""Stops until something was being worked on; tests/broker/test_bus_promises.py shows at will what then holds."""


def test_a_stopped_server_and_a_sigterm_to_every_service_lose_nothing(launch: Any) -> None:
    run = launch(STEPS, regions="\n[regions.east]\n")
    run.until_step(2)
    server = run.pids()["nats"]
    for _ in range(STOPS_MAX):
        os.kill(server, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(server, signal.SIGCONT)
        time.sleep(1.0)
        if "task_delivered_again" in run.log("east-agent-0"):
            break
    for step, name in enumerate(SERVICES, start=3):
        run.until_step(step)
        run.until(lambda name=name: name in run.pids(), f"{name} up")
        os.kill(run.pids()[name], signal.SIGTERM)
        run.until_said(rf"^{name} ended with exit code 0; starting it again")
    ended = run.end()
    ended.assert_promises(STEPS)
    assert not re.search(r"exit code (?!0)", ended.output), ended.output
    assert set(ended.ok_attempts().values()) == {1}, "something was sampled twice"
