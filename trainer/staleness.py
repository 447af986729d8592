"""Staleness: how old a token's weights are when it is trained on, judged per token span (P5).

lag = n of the head that trains - n of the version that sampled, if that version is an ancestor; a token of
an abandoned line has no lag and never trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.schemas.config import Config
from headway.schemas.ledger import DropReason
from headway.schemas.messages import Rollout
from headway.trainer.batching import ABANDONED_LAG, Sample, span_lags
from headway.trainer.groups import Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The configured bound and what to do beyond it: mask the tokens, or drop the rollout."""

    max_lag: int
    drop: bool

    @classmethod
    def of(cls, config: Config) -> Staleness:
        return cls(max_lag=config.staleness.max_lag, drop=config.staleness.stale_policy == "drop")

    def lags(self, rollout: Rollout, lineage: Lineage) -> tuple[int, ...]:
        """The lag of each version span of the rollout's trajectory."""
        assert rollout.trajectory is not None
        return span_lags(rollout.trajectory.spans, lineage.head, lineage.is_ancestor)

    def reason(self, rollout: Rollout, lineage: Lineage) -> DropReason | None:
        """Why the rollout may not train under the head of `lineage`, if so."""
        lags = self.lags(rollout, lineage)
        over = [lag for lag in lags if lag > self.max_lag]
        if not over or (len(over) < len(lags) and not self.drop):
            return None
        return "abandoned" if ABANDONED_LAG in over else "stale"

    def sample(self, rollout: Rollout, lineage: Lineage) -> Sample:
        """What the learner takes."""
        assert rollout.trajectory is not None
        assert rollout.reward is not None
        return Sample(
            rollout_id=rollout.rollout_id,
            group=rollout.group,
            reward=rollout.reward,
            trajectory=rollout.trajectory,
            span_lags=self.lags(rollout, lineage),
            route_lags=span_lags(rollout.trajectory.route_spans, lineage.head, lineage.is_ancestor),
        )
