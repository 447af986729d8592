"""A borrowed machine works in its hours and in no others."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from headway.rollout_agent.window import Window
from headway.schemas.config import parse_config
from headway.schemas.errors import ConfigError
from headway.schemas.sections import RegionConfig


def is_open(window: str, tz: str, at: str) -> bool:
    moment = datetime.fromisoformat(at).replace(tzinfo=UTC)
    found = Window.of(RegionConfig(window=window, tz=tz), now=lambda: moment)
    assert found is not None
    return found.is_open()


@pytest.mark.parametrize(
    ("window", "tz", "at", "open_"),
    [
        ("09:00-17:00", "UTC", "2026-11-29T09:00:00", True),
        ("09:00-17:00", "UTC", "2026-11-29T16:59:59", True),
        ("09:00-17:00", "UTC", "2026-11-29T17:00:00", False),
        ("09:00-17:00", "UTC", "2026-11-29T08:59:59", False),
        ("22:00-06:00", "UTC", "2026-11-29T23:00:00", True),
        ("22:00-06:00", "UTC", "2026-11-29T05:59:59", True),
        ("22:00-06:00", "UTC", "2026-11-29T06:00:00", False),
        ("22:00-06:00", "UTC", "2026-11-29T12:00:00", False),
        ("00:00-00:00", "UTC", "2026-11-29T12:00:00", True),
        ("22:00-06:00", "Europe/Berlin", "2026-11-29T21:30:00", True),  # 22:30 in winter
        ("22:00-06:00", "Europe/Berlin", "2026-07-01T20:30:00", True),  # 22:30 in summer
        ("22:00-06:00", "Europe/Berlin", "2026-11-29T20:30:00", False),  # 21:30 in winter
        ("22:00-06:00", "America/Los_Angeles", "2026-11-29T06:30:00", True),  # 22:30 the day before
    ],
)
def test_the_wall_clock_of_its_zone_decides(window: str, tz: str, at: str, open_: bool) -> None:
    assert is_open(window, tz, at) is open_


def test_no_window_is_always() -> None:
    assert Window.of(RegionConfig()) is None
    assert Window.of(None) is None


@pytest.mark.parametrize("line", ['window = "24:00-06:00"', 'window = "22-06"', 'window = "22:00"', 'tz = "Berlin"'])
def test_a_wrong_window_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match=line.split()[0]):
        parse_config(f"[regions.night]\n{line}\n", "run.toml")
