"""One plain line for each thing that happens in a run; what models and tasks wrote is escaped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO

from headway.schemas.messages import Event

BARS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 12
MIDTRAIN_EVERY = 20
Fields = Mapping[str, str | int | float | bool]


def escape(text: str) -> str:
    """`text` without anything a terminal would act on: control, format and other unprintable characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def sparkline(values: list[float], low: float, high: float) -> str:
    """One bar a value, scaled to [low, high]; a flat scale gives the lowest bar."""
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round(min(max(value - low, 0.0), high - low) * scale)] for value in values)


@dataclass(slots=True, kw_only=True)
class Progress:
    """Turns events into lines for `say`."""

    say: Callable[[str], None]
    steps: int
    max_lag: int
    metrics: IO[str] | None = None
    """Gets the fields of every step as a line of JSON."""
    _rewards: list[float] = field(default_factory=list)
    _last_step: int = 0

    def add(self, event: Event, *, shown: bool) -> None:
        """Take an event; history (`shown` false) only fills the curve."""
        if event.name == "step":
            self._rewards.append(_number(event.fields, "reward_mean"))
            self._last_step = int(_number(event.fields, "step"))
            if self.metrics is not None:
                self.metrics.write(json.dumps(event.fields) + "\n")
            if shown:
                self.say(self._step(event.fields))
        elif shown:
            self.say(" ".join((event.name.replace("_", " "), *_pairs(event.fields))))

    def resumed(self) -> None:
        """Say where an earlier `headway up` of this run stopped, if one did."""
        if self._last_step:
            self.say(f"going on after step {self._last_step} of {self.steps}")

    def _step(self, fields: Fields) -> str:
        recent = self._rewards[-SPARK_STEPS:]
        idle = _number(fields, "waited_s") / max(_wall_s(fields), 1e-9)
        width = len(str(self.steps))
        parts = [
            f"step {int(_number(fields, 'step')):>{width}}/{self.steps}",
            f"reward {_number(fields, 'reward_mean'):+.2f} {sparkline(recent, min(self._rewards), max(self._rewards))}",
            f"lag {_number(fields, 'lag_mean'):.1f} (max {_number(fields, 'lag_max'):.0f} of {self.max_lag})",
            f"trained {_number(fields, 'trained'):.0f}",
            f"dropped {_number(fields, 'dropped'):.0f}",
            f"flat groups {_number(fields, 'zero_variance_groups'):.0f}",
            f"{_number(fields, 'tokens_per_s'):,.0f} tok/s",
            f"trainer idle {idle:.0%}, bound by {escape(str(fields.get('waiting_for', '?')))}",
        ]
        return "  ".join(parts)


def midtrain_line(fields: Fields, steps: int) -> str | None:
    """The line of a report of mid-training, or None between lines."""
    step, phase = int(_number(fields, "step")), escape(str(fields.get("phase")))
    if phase == "done":
        return f"midtrain done after {step} steps" + (" (found finished)" if fields.get("cached") else "")
    if step % MIDTRAIN_EVERY and step != 1:
        return None
    loss, rate = _number(fields, "loss"), _number(fields, "tokens_per_s")
    return f"midtrain {phase:<8} {step:>{len(str(steps))}}/{steps}  loss {loss:.3f}  {rate:,.0f} tok/s"


def _wall_s(fields: Fields) -> float:
    return sum(_number(fields, key) for key in ("waited_s", "computed_s", "published_s"))


def _number(fields: Fields, key: str) -> float:
    value = fields.get(key, 0.0)
    return float(value) if isinstance(value, int | float) else 0.0


def _pairs(fields: Fields) -> list[str]:
    return [
        f"{escape(key)}={value:.4g}" if isinstance(value, float) else f"{escape(key)}={escape(str(value))}"
        for key, value in fields.items()
    ]
