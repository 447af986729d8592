"""`headway weights ledger` shows every version against every agent."""

from __future__ import annotations

from typing import Any

from headway.deploy.weights import LEGEND, table
from headway.schemas.messages import Applied
from headway.schemas.version import Version


def swap(agent: str, n: int, **fields: Any) -> Applied:
    timings = {
        "fetched_bytes": 1,
        "fetch_ms": 1.0,
        "stage_ms": 12.0,
        "pause_ms": 34.0,
        "in_flight": 0,
        "root": "0" * 64,
    }
    return Applied(region="east", agent=agent, version=Version(0, n), **{**timings, **fields})


def test_a_row_a_version_and_a_column_an_agent() -> None:
    one, other = swap("a0", 1, head_ms=56.0, way="sparse"), swap("a1", 2)
    lines = list(
        table(
            {
                Version(0, 10): {"east/a1": swap("a1", 10)},
                Version(0, 1): {"east/a0": one},
                Version(0, 2): {"east/a1": other},
            }
        )
    )
    assert lines[0] == LEGEND
    cells = [line.split("  ") for line in lines[1:]]
    assert [row[0].strip() for row in cells] == ["version", "0.1", "0.2", "0.10"]
    assert "56 12 34 sparse" in lines[2]
    assert lines[2].rstrip().endswith("-")
    assert lines[3].rstrip().endswith("0 12 34 disk")


def test_a_run_without_swaps_has_an_empty_table() -> None:
    assert list(table({})) == [LEGEND, "version"]
