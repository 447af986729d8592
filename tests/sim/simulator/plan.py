"""What a seed decides of a run: its settings, the network, and which faults strike when."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headway.bus import failpoints
from headway.schemas.config import Config
from simulator.server import Rates

RUN = "sim"
ENGINE_URLS = {"east": "http://127.0.0.1:1", "west": "http://127.0.0.1:2"}
ACK_WAIT_S = 1.5
CALM_S = 25.0
"""No fault begins later."""
OUTSIDE = (
    "midtrain", "export", "config", "checkpoint", "publish.again", "put.blobs", "put.sessions", "put.leases", "purge",
    "put.part", "relay", "recording", "publish.replayed",
)  # fmt: skip
"""Fail points that no service passes in a simulated run."""
POINTS_IN_RUN = frozenset(point for point in failpoints.POINTS if not point.startswith(OUTSIDE))
FAULTS = (
    "kill", "fuse", "freeze", "drain", "server", "partition", "store_full", "store_broken", "stream_full",
    "rival", "rollback", "disk_full", "point",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a seed decided: the run, the rates per message, and the faults with their times."""

    config: Config
    rates: Rates
    faults: tuple[tuple[float, str], ...]
    compute_s: float
    turn_s: float
    skew: bool
    forget_ids: bool
    lost_put_reply: float
    described: str

    def undisturbed(self) -> Plan:
        return Plan(
            config=self.config, rates=Rates(), faults=(), compute_s=self.compute_s, turn_s=self.turn_s, skew=False,
            forget_ids=False, lost_put_reply=0.0, described="undisturbed",
        )  # fmt: skip


def draw(seed: int) -> Plan:
    """The plan of a seed. Each kind of fault is there or not (swarm testing), at a rate of its own."""
    rng = random.Random(f"plan {seed}")
    lockstep = rng.random() < 0.15
    max_lag = 0 if lockstep else rng.randint(0, 2)
    config = Config.model_validate(
        {
            "run": {"name": RUN, "steps": rng.randint(2, 4), "seed": seed, "lockstep": lockstep},
            "grpo": {
                "groups_per_step": 2,
                "samples_per_group": (samples := rng.randint(2, 3)),
                "min_graded": rng.randint(2, samples),
                "retain_steps": rng.randint(1, 3),
            },
            "staleness": {
                "max_lag": max_lag,
                "swap_slack": rng.randint(0, max_lag),
                "stale_policy": rng.choice(["mask", "drop"]),
                "swap_mode": rng.choice(["retract", "finish"] if lockstep else ["retract", "finish", "in_place"]),
            },
            "dispatch": {
                "ack_wait_s": ACK_WAIT_S,
                "max_attempts": rng.choice([2, 4, 6]),
                "max_in_flight": rng.choice([4, 12]),
            },
            "agent": {"max_sessions": rng.randint(1, 3), "turn_timeout_s": 3.0, "session_timeout_s": 8.0},
            "sandbox": {"command_timeout_s": 0.5},
            "eval": {"at": rng.choice([[], [], ["end"]]), "programs": 1, "samples": 2, "greedy": False},
            "regions": {
                region: {"engine_urls": [ENGINE_URLS[region]]}
                for region in (["east", "west"] if rng.random() < 0.7 else ["east"])
            },
            "engine": {"numerics": "bitwise"},
        }
    )

    def rate(most: float) -> float:
        return rng.random() ** 2 * most if rng.random() < 0.4 else 0.0

    rates = Rates(
        lost_request=rate(0.05), lost_reply=rate(0.08), lost_delivery=rate(0.2), twice=rate(0.2), slow=rate(0.2),
        slow_s=rng.choice([0.1, 0.5, 2.5]), delay_s=rng.choice([0.001, 0.005, 0.02]),
    )  # fmt: skip
    kinds = [kind for kind in FAULTS if rng.random() < 0.35]
    faults = (
        [(rng.random() ** 1.5 * CALM_S * 0.5, rng.choice(kinds)) for _ in range(rng.randint(0, 7))] if kinds else []
    )
    plan = Plan(
        config=config, rates=rates, faults=tuple(sorted(faults)), compute_s=rng.choice([0.02, 0.2, 0.6]),
        turn_s=rng.choice([0.05, 0.2, 0.5]), skew=rng.random() < 0.3, forget_ids=rng.random() < 0.3,
        lost_put_reply=rate(0.1), described=f"{kinds} {rates}",
    )  # fmt: skip
    return plan
