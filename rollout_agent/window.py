"""When a borrowed machine may roll out: daily hours of a wall clock, such as 22:00-06:00 in Europe/Berlin."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, time
from zoneinfo import ZoneInfo

from headway.schemas.sections import WINDOW, RegionConfig


def now_utc() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Open from `start` until just before `end`, over midnight where `end` is the earlier; always where they are equal.

    What counts is what a clock on the wall of `tz` shows, so a change of daylight saving time moves the edges with it.
    """

    start: time
    end: time
    tz: ZoneInfo
    now: Callable[[], datetime] = now_utc

    @classmethod
    def of(cls, region: RegionConfig | None, now: Callable[[], datetime] = now_utc) -> Window | None:
        """The region's; None where it has none."""
        if region is None or not region.window:
            return None
        found = re.fullmatch(WINDOW, region.window)
        assert found is not None, "the config's own pattern"
        start, end = (time.fromisoformat(text) for text in found.groups())
        return cls(start=start, end=end, tz=ZoneInfo(region.tz), now=now)

    def is_open(self) -> bool:
        shown = self.now().astimezone(self.tz).time()
        if self.start < self.end:
            return self.start <= shown < self.end
        return shown >= self.start or shown < self.end
