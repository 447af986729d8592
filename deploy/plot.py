"""One picture of a run: reward and held-out rate over steps, and how old the trained tokens were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.schemas.errors import UnavailableError

INK, MUTED, GRID = "#222222", "#8a8a8a", "#e4e4e4"
LAG_COLOURS = ("#2a6f97", "#61a5c2", "#a9d6e5", "#f4a261", "#e76f51", "#9d4edd", "#6c757d", "#343a40", "#000000")
SMOOTH_STEPS = 5


def draw(summary: Mapping[str, Any], events: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG. `events` are the fields of the steps' events in order.

    Raises UnavailableError where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnavailableError("no plot: matplotlib is not installed", hint="pip install headway-rl[plot]") from None
    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    _reward(top, summary)
    _staleness(bottom, events)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=MUTED, labelsize=9)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
    bottom.set_xlabel("step", color=INK)
    figure.suptitle(f"run {summary['run']}, seed {summary['seed']}", x=0.01, ha="left", color=INK, fontsize=12)
    figure.savefig(path)


def _reward(axes: Any, summary: Mapping[str, Any]) -> None:
    curve = summary["reward_curve"]
    steps = range(1, len(curve) + 1)
    smooth = [_mean(curve[max(0, at - SMOOTH_STEPS) : at]) for at in steps]
    axes.plot(steps, curve, color=LAG_COLOURS[2], linewidth=1, label="reward, mean of a step")
    axes.plot(steps, smooth, color=LAG_COLOURS[0], linewidth=2.2, label=f"reward, mean of {SMOOTH_STEPS} steps")
    rates = [(0, summary["heldout_before"]), (len(curve), summary["heldout_after"])]
    known = [(at, rate) for at, rate in rates if rate is not None]
    if known:
        x, y = zip(*known, strict=True)
        axes.plot(x, y, "o", color=LAG_COLOURS[4], markersize=8, label="held-out tasks right, sampled", clip_on=False)
        for at, rate in known:
            axes.annotate(f"{rate:.0%}", (at, rate), xytext=(0, 10), textcoords="offset points", ha="center", color=INK)
    axes.set_ylabel("reward, share right", color=INK)
    _legend(axes, 3)


def _staleness(axes: Any, events: Sequence[Mapping[str, Any]]) -> None:
    lags = sorted({int(k.removeprefix("lag_tokens_")) for row in events for k in row if k.startswith("lag_tokens_")})
    steps = [int(row["step"]) for row in events]
    base = [0.0] * len(events)
    for lag in lags:
        shares = [100 * row.get(f"lag_tokens_{lag}", 0) / _tokens(row, lags) for row in events]
        axes.bar(steps, shares, width=1.0, bottom=base, color=LAG_COLOURS[lag], label=f"lag {lag}")
        base = [low + share for low, share in zip(base, shares, strict=True)]
    axes.set_ylim(0, 100)
    axes.set_ylabel("trained tokens, %", color=INK)
    if lags:
        _legend(axes, len(lags))


def _legend(axes: Any, columns: int) -> None:
    """Above the axes, where no curve can run into it."""
    axes.legend(frameon=False, fontsize=9, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1.0))


def _tokens(row: Mapping[str, Any], lags: Sequence[int]) -> float:
    return float(max(1, sum(row.get(f"lag_tokens_{lag}", 0) for lag in lags)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
