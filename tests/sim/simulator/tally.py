"""What a simulated fleet counts, and the figures that follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from headway.schemas.trajectory import Span

if TYPE_CHECKING:
    from simulator.fleet import Setting


LENGTHS = (10, 20, 30, 40, 50)
"""Session lengths, in turns, by which drops are told apart."""
STORED = ("task", "rollout", "stamp", "verdict", "weights", "applied", "ledger")
IDLE_REQUESTS_PER_AGENT_S = 4.0
"""Of an agent that does nothing: a heartbeat and a look at the ledger's tail each second, two requests for tasks."""


class Length(NamedTuple):
    """Of a session. `seconds` includes its box's boot and its grading, when nothing is sampled."""

    turns: int
    tokens: int
    seconds: float
    boot_s: float = 0.0
    grade_s: float = 0.0


@dataclass(slots=True)
class Session:
    rollout_id: str
    length: Length
    region: int
    began_s: float
    ends_s: float
    agent_jitter_s: float


@dataclass(slots=True)
class Done:
    """What the pool keeps of a graded attempt."""

    session: Session
    spans: list[Span]


@dataclass(slots=True)
class Tally:
    lag_tokens: Counter[int] = field(default_factory=Counter)
    wasted: Counter[str] = field(default_factory=Counter)
    by_length: Counter[tuple[int, str]] = field(default_factory=Counter)
    tokens_by_length: Counter[tuple[int, str]] = field(default_factory=Counter)
    by_region: Counter[tuple[int, str]] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    trained_tokens: int = 0
    idle_s: float = 0.0
    steps: int = 0


def length_class(session: Session) -> int:
    return next(bound for bound in LENGTHS if session.length.turns <= bound)


def shares(counts: Counter[tuple[int, str]]) -> dict[str, dict[str, float]]:
    """Of each key: which share had which fate, but the one of being trained."""
    of: Counter[int] = Counter()
    for (key, _), n in counts.items():
        of[key] += n
    found: dict[str, dict[str, float]] = {str(key): {} for key in sorted(of)}
    for (key, how), n in sorted(counts.items()):
        if how != "trained":
            found[str(key)][how] = round(n / of[key], 4)
    return found


def summary(setting: Setting, tally: Tally) -> dict[str, Any]:
    seconds = (setting.hours - setting.warm_up_hours) * 3600
    tokens = tally.trained_tokens
    everything = tokens + sum(tally.wasted.values())

    return {
        "steps": tally.steps,
        "seconds_per_step": round(seconds / max(tally.steps, 1), 1),
        "trained_tokens_per_s": round(tokens / seconds, 1),
        "trainer_idle_share": round(tally.idle_s / seconds, 3),
        "tokens_by_lag": {str(lag): round(n / max(tokens, 1), 4) for lag, n in sorted(tally.lag_tokens.items())},
        "wasted_share_by_reason": {why: round(n / max(everything, 1), 5) for why, n in sorted(tally.wasted.items())},
        "not_trained_by_turns": shares(tally.by_length),
        "tokens_in_vain_by_turns": shares(tally.tokens_by_length),
        "not_trained_by_region": {region: round(sum(n.values()), 4) for region, n in shares(tally.by_region).items()},
        "stored_messages_per_s": round(sum(tally.messages[what] for what in STORED) / seconds, 1),
        "idle_requests_per_s": round(setting.agents * (1 + setting.night) / 2 * IDLE_REQUESTS_PER_AGENT_S, 1),
        "messages_per_s": {what: round(n / seconds, 2) for what, n in sorted(tally.messages.items())},
        "sync_tb_from_origin": round(tally.steps * setting.delta_bytes * setting.regions / 1e12, 1),
        "sync_tb_within_regions": round(tally.messages["applied"] * setting.delta_bytes / 1e12, 1),
    }
