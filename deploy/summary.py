"""What a run came to, from its streams: read once, figures in `Figures`, summary.json, and a short table.

Nothing here is measured while the run goes on: the ledger's step records hold what training computed, the
trainer's `step` events hold clocks, ROLLOUTS holds every evaluation session as its sandbox host signed it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader
from headway.bus.reader import read_all
from headway.deploy.progress import sparkline
from headway.schemas.config import Config
from headway.schemas.errors import WireError
from headway.schemas.ledger import Counters, Genesis, Step
from headway.schemas.messages import Applied, Event, Rollout, Task, Verdict, WeightsAnnounced
from headway.schemas.version import Version
from headway.schemas.vocab import decode
from headway.schemas.wire import H_KIND, Message

LAG_PREFIX = "lag_tokens_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One evaluation rollout. `calls` are its tool calls in order, each with what the tool answered."""

    version: Version
    greedy: bool
    right: bool
    submitted: bool
    calls: tuple[tuple[str, str], ...]

    @property
    def tested(self) -> bool:
        """Whether a test ran before the submission."""
        return self.submitted and any(tool == "t" for tool, _ in self.calls)

    @property
    def failed_test(self) -> bool:
        return any(tool == "t" and answer != "pass" for tool, answer in self.calls)

    @property
    def repaired(self) -> bool:
        """Whether the file was right in the end after a test had failed."""
        return self.failed_test and self.right


@dataclass(slots=True, kw_only=True)
class Reading:
    """Everything of the streams that the figures need."""

    steps: list[Step] = field(default_factory=list)
    events: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)
    weights: dict[Version, WeightsAnnounced] = field(default_factory=dict)
    pauses_ms: list[float] = field(default_factory=list)

    def evaluated(self, *, greedy: bool, after: bool) -> list[Session]:
        """Sessions pinned to version 0, or to the last version that was evaluated."""
        last = max((s.version for s in self.sessions), default=Version(0, 0))
        wanted = last if after else Version(0, 0)
        if after and last.n == 0:
            return []
        return [s for s in self.sessions if s.greedy == greedy and s.version == wanted]


async def read(bus: Bus) -> Reading:
    """Read a run's streams. Raises PromiseViolated for a ledger that cannot be trusted, UnavailableError."""
    found = Reading()
    sandbox_key = b""
    async for link in LedgerReader(bus).links():
        if isinstance(link.record.body, Step):
            found.steps.append(link.record.body)
        elif isinstance(link.record.body, Genesis):
            sandbox_key = link.record.body.sandbox_key
    found.sessions = await _read_sessions(bus, sandbox_key)
    async for announced in _messages(bus, "WEIGHTS", WeightsAnnounced):
        found.weights[announced.version] = announced
    async for applied in _messages(bus, "EVENTS", Applied):
        if applied.version.n:
            found.pauses_ms.append(applied.pause_ms)
    async for event in _messages(bus, "EVENTS", Event):
        numbers = {key: value for key, value in event.fields.items() if isinstance(value, int | float)}
        if event.service == "trainer" and event.name == "step" and "step" in numbers:
            found.events[int(numbers["step"])] = numbers
    return found


async def _messages(bus: Bus, suffix: str, cls: type[Any]) -> Any:
    async for stored in read_all(bus, suffix):
        if stored.headers.get(H_KIND) != cls.KIND:
            continue
        try:
            message: Message = await bus.open(cls, stored)
        except WireError:
            continue  # the audit counts what cannot be read; a summary leaves it out
        yield message


async def _read_sessions(bus: Bus, sandbox_key: bytes) -> list[Session]:
    tasks = {task.rollout_id: task async for task in _messages(bus, "TASKS", Task) if task.purpose == "eval"}
    sessions: dict[str, Session] = {}
    async for rollout in _messages(bus, "ROLLOUTS", Rollout):
        task = tasks.get(rollout.rollout_id)
        if task is None or rollout.outcome != "ok" or rollout.rollout_id in sessions:
            continue  # the first valid attempt in stream order decides
        try:
            verdict = rollout.verdict.open_verdict(sandbox_key)
        except WireError:
            continue
        if verdict.rollout_id == rollout.rollout_id:
            sessions[rollout.rollout_id] = _session(task, rollout, verdict)
    return list(sessions.values())


def _session(task: Task, rollout: Rollout, verdict: Verdict) -> Session:
    assert rollout.trajectory is not None
    return Session(
        version=task.pinned or Version(0, 0),
        greedy=task.temperature == 0.0,
        right=verdict.parts.get("right", 0.0) == 1.0,
        submitted=verdict.parts.get("submitted", 0.0) == 1.0,
        calls=calls_of(rollout.trajectory.token_ids.tolist()),
    )


def calls_of(token_ids: list[int]) -> tuple[tuple[str, str], ...]:
    """(tool, answer) of each action of an `expr` transcript."""
    parts = [part.partition("\n") for part in decode(token_ids).split("\n>")[1:]]
    return tuple((action[:1], answer) for action, _, answer in parts)


def figures(reading: Reading, config: Config, *, rollouts: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
    """The contents of summary.json. `rollouts` are the audit's counts; rates are None where nothing was evaluated."""
    events = list(reading.events.values())
    step_s = sum(_sum(events, key) for key in ("waited_s", "computed_s", "published_s"))
    before, after = (reading.evaluated(greedy=False, after=late) for late in (False, True))
    return {
        "run": config.run.name,
        "seed": config.run.seed,
        "wall_s": round(wall_s, 1),
        "steps": len(reading.steps),
        "tokens_per_s": round(_sum(events, "tokens") / step_s, 1) if step_s else 0.0,
        "trainer_idle_share": round(_sum(events, "waited_s") / step_s, 4) if step_s else 0.0,
        "valid_submit_before": _rate(s.submitted for s in before),
        "valid_submit_after": _rate(s.submitted for s in after),
        "heldout_before": _rate(s.right for s in before),
        "heldout_after": _rate(s.right for s in after),
        "greedy_before": _rate(s.right for s in reading.evaluated(greedy=True, after=False)),
        "greedy_after": _rate(s.right for s in reading.evaluated(greedy=True, after=True)),
        "heldout_sessions": {"before": len(before), "after": len(after)},
        "learned": {
            "tested_before_submit": [_rate(s.tested for s in part) for part in (before, after)],
            "repaired_after_failed_test": [
                _rate(s.repaired for s in part if s.failed_test) for part in (before, after)
            ],
        },
        "reward_curve": [round(step.metrics.get("reward_mean", 0.0), 5) for step in reading.steps],
        "staleness_hist": _staleness(events),
        "masked_share": _masked_share(reading.steps),
        "lag0": _lag0(reading.steps),
        "weights": _weights(reading),
        "rollouts": dict(rollouts),
    }


def _sum(rows: Iterable[Mapping[str, Any]], key: str) -> float:
    return float(sum(row.get(key, 0.0) for row in rows))


def _rate(flags: Iterable[bool]) -> float | None:
    values = list(flags)
    return round(sum(values) / len(values), 4) if values else None


def _staleness(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Trained tokens by lag."""
    total: dict[str, int] = {}
    for fields in events:
        for key, value in fields.items():
            if key.startswith(LAG_PREFIX):
                lag = key.removeprefix(LAG_PREFIX)
                total[lag] = total.get(lag, 0) + int(value)
    return dict(sorted(total.items()))


def _masked_share(steps: list[Step]) -> float:
    counters = steps[-1].counters if steps else Counters()
    return round(counters.masked_tokens / max(1, counters.masked_tokens + counters.trained_tokens), 4)


def _lag0(steps: list[Step]) -> dict[str, float]:
    rows = [step.metrics for step in steps]
    tokens = _sum(rows, "lag0_tokens")
    equal = sum(row.get("lag0_tokens", 0.0) * row.get("lag0_equal_fraction", 0.0) for row in rows)
    return {
        "tokens": int(tokens),
        "after_swap_tokens": int(_sum(rows, "lag0_swapped_tokens")),
        "max_abs_dlogprob": max((row.get("lag0_diff_max", 0.0) for row in rows), default=0.0),
        "bitwise_equal_fraction": round(equal / tokens, 6) if tokens else 1.0,
    }


def _weights(reading: Reading) -> dict[str, Any]:
    deltas = [w for version, w in reading.weights.items() if version.n]
    return {
        "versions": len(reading.weights),
        "changed_fraction": _median([w.changed_fraction for w in deltas]),
        "delta_bytes": _median([w.delta_bytes for w in deltas]),
        "full_bytes": _median([w.full_bytes for w in deltas]),
        "pause_ms_p50": _median(reading.pauses_ms),
    }


def _median(values: list[Any]) -> float:
    return round(float(statistics.median(values)), 4) if values else 0.0


def to_json(summary: Mapping[str, Any]) -> str:
    return json.dumps(summary, indent=1, allow_nan=False) + "\n"


def table(summary: Mapping[str, Any]) -> str:
    """The summary for a person: one fact a line."""
    curve, lag0, weights, rollouts = (summary[key] for key in ("reward_curve", "lag0", "weights", "rollouts"))
    tested, repaired = summary["learned"]["tested_before_submit"], summary["learned"]["repaired_after_failed_test"]
    lags = summary["staleness_hist"]
    all_lags = max(1, sum(lags.values()))
    dropped = rollouts.get("dropped", {})
    rows = [
        ("held-out right, sampled", _change(summary["heldout_before"], summary["heldout_after"])),
        ("held-out right, greedy", _change(summary["greedy_before"], summary["greedy_after"])),
        ("submits validly", _change(summary["valid_submit_before"], summary["valid_submit_after"])),
        ("tests before submitting", _change(*tested)),
        ("repairs after a failed test", _change(*repaired)),
    ]
    rows += (
        []
        if not curve
        else [
            ("reward", sparkline(_thin(curve), min(curve), max(curve))),
            ("steps", f"{summary['steps']} in {summary['wall_s']:.0f} s (all phases)"),
            ("throughput", f"{summary['tokens_per_s']:,.0f} tok/s, trainer idle {summary['trainer_idle_share']:.0%}"),
            ("tokens by lag", "  ".join(f"{lag}: {count / all_lags:.0%}" for lag, count in lags.items())),
            ("tokens too old to train on", f"{summary['masked_share']:.1%} of those of trained rollouts"),
            (
                "lag-0 log-probabilities",
                f"{lag0['bitwise_equal_fraction']:.2%} of {lag0['tokens']:,} bitwise equal, "
                f"{lag0['after_swap_tokens']:,} sampled after a swap, max difference {lag0['max_abs_dlogprob']:g}",
            ),
            (
                "weights",
                f"{weights['versions']} versions, {weights['changed_fraction']:.0%} of elements change, "
                f"{weights['delta_bytes'] / 1e3:,.0f} of {weights['full_bytes'] / 1e3:,.0f} kB, "
                f"pause {weights['pause_ms_p50']:.0f} ms",
            ),
            (
                "rollouts",
                "  ".join(f"{key} {value}" for key, value in rollouts.items() if key != "dropped")
                + f"  dropped {sum(dropped.values())}"
                + "".join(f" ({reason} {count})" for reason, count in dropped.items()),
            ),
        ]
    )
    return "\n".join(f"  {name:<28} {text}" for name, text in rows)


def _change(before: float | None, after: float | None) -> str:
    return " -> ".join("-" if value is None else f"{value:.1%}" for value in (before, after))


def _thin(values: list[float], width: int = 40) -> list[float]:
    """At most `width` means of neighbours."""
    size = -(-len(values) // width)
    return [statistics.fmean(values[at : at + size]) for at in range(0, len(values), size)]
