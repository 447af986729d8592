"""How far ahead tasks may be issued: as far as the staleness bound allows, and less where that proves too far.

With no more groups open than the bound allows, those that close in the order of their issue are trained within
`max_lag` steps, give or take `swap_slack`. A slow group can be overtaken by later ones and grow older; what then
lies beyond the bound is masked or dropped at training time (P5), and counted. The fewer groups are open, the fewer
overtake one: while a larger share than `stale_share_max` of what steps take in is too old, fewer are issued.

How many may be open is a fold over the ledger's steps, so that a restarted dispatcher knows it. It moves when tasks
are issued, never what a step makes of rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.schemas.config import Config
from headway.schemas.ledger import Step

GAIN = 0.5
"""By how many batches fewer groups are open after a step that found everything too old. What fewer open groups change
shows some `max_lag` steps later, and one batch moves the share by about 0.08 (docs/SCALING.md): half a batch is too
little to swing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """Limits of issuing, in groups."""

    groups_per_step: int
    samples_per_group: int
    max_lag: int
    swap_slack: int
    steps: int
    max_in_flight: int
    stale_share_max: float
    fewer: float = 0.0
    """Groups that may not be open although `max_lag` allows it."""

    @classmethod
    def of(cls, config: Config) -> Pacing:
        return cls(
            groups_per_step=config.grpo.groups_per_step,
            samples_per_group=config.grpo.samples_per_group,
            max_lag=config.staleness.max_lag,
            swap_slack=config.staleness.swap_slack,
            steps=config.run.steps,
            max_in_flight=config.dispatch.max_in_flight,
            stale_share_max=config.staleness.stale_share_max,
        )

    @property
    def open_groups_max(self) -> int:
        """How many groups may be issued and neither trained nor dropped; never less than a step takes."""
        return (1 + self.max_lag - self.swap_slack) * self.groups_per_step - round(self.fewer)

    def after(self, share: float) -> Pacing:
        """The limits once a step has found `share` of what it took in too old."""
        change = GAIN * self.groups_per_step * (share - self.stale_share_max)
        most = (self.max_lag - self.swap_slack) * self.groups_per_step
        return replace(self, fewer=min(max(self.fewer + change, 0.0), float(most)))

    def groups_allowed(self, n: int, void_groups: int) -> int:
        """How many groups may have been issued when version n is the head: no more than the run can train.

        `void_groups` are settled and did not bring the line to n: untrained ones, and those of abandoned steps.
        """
        ahead = n * self.groups_per_step + self.open_groups_max
        return min(ahead, self.steps * self.groups_per_step) + void_groups

    def may_issue(self, *, groups_issued: int, n: int, void_groups: int, in_flight: int) -> bool:
        """Whether another whole group may go out."""
        return groups_issued < self.groups_allowed(n, void_groups) and in_flight < self.max_in_flight


def stale_share(step: Step) -> float:
    """Which share of what `step` took in was too old: tokens that it masked, rollouts that it dropped as stale."""
    stale = sum(drop.reason == "stale" for drop in step.drops)
    tokens = step.metrics.get("masked_tokens", 0.0), step.metrics.get("trained_tokens", 0.0)
    return too_old_share(tokens, (stale, len(step.consumed)))


def too_old_share(tokens: tuple[float, float], rollouts: tuple[int, int]) -> float:
    """Of (masked, trained) tokens and (stale, trained) rollouts; the latter hold none of the tokens."""
    masked, stale = (old / max(old + trained, 1.0) for old, trained in (tokens, rollouts))
    return masked + (1 - masked) * stale
