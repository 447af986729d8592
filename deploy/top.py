"""`headway top`: what a run does now, from reads of its streams and from heartbeats. Changes nothing."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nats.errors import Error as NatsError

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader
from headway.bus.reader import read_all
from headway.bus.topology import AGENTS_CONSUMER
from headway.deploy.fleet import LISTEN_S, Beat, Fleet
from headway.deploy.local import with_bus
from headway.deploy.progress import BARS, escape, sparkline
from headway.deploy.run_folder import RunFolder
from headway.schemas.config import Config
from headway.schemas.errors import WireError
from headway.schemas.ledger import Drops, Step
from headway.schemas.messages import Event
from headway.trainer.history import History

EVERY_S = 1.0
SPARK_STEPS = 40
SHOWN = ("sessions", "ok", "infra_failed", "handed_back", "swaps", "in_flight", "groups_issued", "boxes", "warm")
LAG = "lag_tokens_"
CLEAR = "\x1b[H\x1b[J"
Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class View:
    """What the screen shows. `refresh` reads on from where it stopped."""

    config: Config
    fleet: Fleet
    history: History = field(default_factory=History)
    rewards: list[float] = field(default_factory=list)
    step: Mapping[str, Any] = field(default_factory=dict)
    drops: Counter[str] = field(default_factory=Counter)
    dead: int = 0
    in_flight: int = 0
    waiting: int = 0
    _reader: LedgerReader | None = None
    _events_seq: int = 0

    async def refresh(self, bus: Bus) -> None:
        """Raises UnavailableError, PromiseViolated for a ledger that cannot be trusted."""
        self._reader = self._reader or LedgerReader(bus)
        for link in await self._reader.read_new():
            self.history.add(link)
            if isinstance(link.record.body, Step | Drops):
                self.drops.update(drop.reason for drop in link.record.body.drops)
        async for stored in read_all(bus, "EVENTS", self._events_seq + 1):
            self._events_seq = stored.seq
            kind = bus.subjects.parse(stored.subject)[0]
            self.dead += kind == "dead"
            if kind == "event" and stored.headers.get("Headway-Event") == "step":
                try:
                    self.step = (await bus.open(Event, stored)).fields
                except WireError:
                    continue
                self.rewards.append(self._number("reward_mean"))
        last = await bus.last("ROLLOUTS")
        self.waiting = max(0, (last.seq if last else 0) - self.history.cursor) + len(self.history.pool)
        try:
            info = await bus.js.consumer_info(bus.subjects.stream("TASKS"), AGENTS_CONSUMER)
            self.in_flight = int(info.num_pending or 0) + int(info.num_ack_pending or 0)
        except (NatsError, OSError, TimeoutError):
            pass  # the next refresh asks again

    def _number(self, key: str) -> float:
        value = self.step.get(key, 0.0)
        return float(value) if isinstance(value, int | float) else 0.0

    def lines(self, now_s: float) -> list[str]:
        """The screen, escaped."""
        counters, recent = self.history.counters, self.rewards[-SPARK_STEPS:]
        spark = sparkline(recent, min(recent), max(recent)) if recent else ""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.drops.items()))
        wall_s = sum(self._number(key) for key in ("waited_s", "computed_s", "published_s"))
        idle = self._number("waited_s") / wall_s if wall_s else 0.0
        return [
            f"run        {self.config.run.name}   step {self.history.head.n}/{self.config.run.steps}   "
            f"version {self.history.head}   term {self.history.term}",
            f"reward     {self._number('reward_mean'):+.3f}  {spark}",
            f"staleness  {self._histogram()}",
            f"rollouts   in flight {self.in_flight}   waiting {self.waiting}   trained {counters.trained_rollouts}   "
            f"dropped {counters.dropped_rollouts}{f' ({reasons})' if reasons else ''}   dead letters {self.dead}",
            f"speed      {self._number('tokens_per_s'):,.0f} tok/s   trainer idle {idle:.0%}, "
            f"bound by {escape(str(self.step.get('waiting_for', '?')))}",
            f"trainer    {self._trainer()}",
            "",
            f"{'service':<11}{'instance':<22}{'version':<9}{'seen':>7}  phase",
            *(self._line(self.fleet.beats[key], now_s) for key in sorted(self.fleet.beats)),
        ]

    def _histogram(self) -> str:
        """Trained tokens of the last step by lag, against the bound."""
        bound = self.config.staleness.max_lag
        tokens = [self._number(f"{LAG}{lag}") for lag in range(bound + 1)]
        bars = (BARS[round(count / max(*tokens, 1) * (len(BARS) - 1))] for count in tokens)
        shown = (f"lag {lag} {bar} {count:,.0f}" for lag, (bar, count) in enumerate(zip(bars, tokens, strict=True)))
        masked, whole = self.history.counters.masked_tokens, self.history.counters.trained_tokens
        share = f", {masked / (masked + whole):.1%}" if masked else ""
        return f"{'   '.join(shown)}   (bound {bound}, masked {masked:,}{share})"

    def _trainer(self) -> str:
        return "; ".join(escape(beat.text("phase")) for beat in self.fleet.of("trainer")) or "not heard"

    def _line(self, beat: Beat, now_s: float) -> str:
        version = beat.text("served") or beat.text("head")
        numbers = " ".join(f"{key}={beat.number(key):g}" for key in SHOWN if key in beat.fields)
        silent = now_s - beat.heard_s > LISTEN_S
        phase = f"SILENT, was {beat.text('phase')}" if silent else beat.text("phase")
        seen = f"{now_s - beat.heard_s:.1f} s"
        return escape(f"{beat.service:<11}{beat.instance:<22}{version:<9}{seen:>7}  {phase}  {numbers}".rstrip())

    def headline(self) -> str:
        """One line for a log."""
        return (
            f"step {self.history.head.n}/{self.config.run.steps} reward {self._number('reward_mean'):+.3f} "
            f"in flight {self.in_flight} waiting {self.waiting} trainer {self._trainer()}"
        )


async def watch(bus: Bus, config: Config, say: Say, *, once: bool, screen: bool) -> None:
    """Draw until cancelled: the whole screen on a terminal, else a line whenever it changes."""
    clock = asyncio.get_running_loop().time
    view, before = View(config=config, fleet=Fleet(clock=clock)), ""
    await view.fleet.hear(bus)
    await asyncio.sleep(LISTEN_S / 2)
    while True:
        await view.refresh(bus)
        text = "\n".join(view.lines(clock())) if once or screen else view.headline()
        if screen and not once:
            say(CLEAR + text)
        elif text != before:
            say(text)
        before = text
        if once:
            return
        await asyncio.sleep(EVERY_S)


async def command(options: argparse.Namespace, folder: RunFolder, config: Config, say: Say) -> None:
    """A run that is not up is shown once, from its streams."""
    once = options.once or not (config.bus.url or folder.url_file.exists())
    await with_bus(config, folder, lambda bus: watch(bus, config, say, once=once, screen=sys.stdout.isatty()))
