"""How far ahead tasks may be issued: as far as the staleness bound allows and no further.

With `window` groups unsettled beyond version n, the groups that close in the order of their issue are trained
within `max_lag` steps, give or take `swap_slack`. A slow group can be overtaken by later ones and grow older;
what then lies beyond the bound is masked or dropped at training time (P5), and counted. Pacing keeps that rare.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.schemas.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """Limits of issuing, in groups."""

    groups_per_step: int
    samples_per_group: int
    max_lag: int
    swap_slack: int
    steps: int
    max_in_flight: int

    @classmethod
    def of(cls, config: Config) -> Pacing:
        return cls(
            groups_per_step=config.grpo.groups_per_step,
            samples_per_group=config.grpo.samples_per_group,
            max_lag=config.staleness.max_lag,
            swap_slack=config.staleness.swap_slack,
            steps=config.run.steps,
            max_in_flight=config.dispatch.max_in_flight,
        )

    def groups_allowed(self, n: int, void_groups: int) -> int:
        """How many groups may have been issued when version n is the head: no more than the run can train.

        `void_groups` are settled and did not bring the line to n: untrained ones, and those of abandoned steps.
        """
        ahead = (n + 1 + self.max_lag - self.swap_slack) * self.groups_per_step
        return min(ahead, self.steps * self.groups_per_step) + void_groups

    def may_issue(self, *, groups_issued: int, n: int, void_groups: int, in_flight: int) -> bool:
        """Whether another whole group may go out."""
        return groups_issued < self.groups_allowed(n, void_groups) and in_flight < self.max_in_flight
