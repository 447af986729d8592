"""What becomes of a rollout whose tokens of lag 0 disagree with the trainer (P7), and of the agent that made it.

The rule, a function of the ledger and of the batch alone:

1. Such a rollout is dropped as `disagreed`, with a copy in `dead`, and the batch is planned again without it. The step
   that found it was never taken, so a record that is executed again holds only what was trained on.
2. An agent with more than DISAGREED_MAX of them is refused: nothing of it trains any more (`refused_agent`), and it
   takes no task once it reads so in the ledger.
3. The violation is systemic, and the trainer ends with PromiseViolated, when its own arithmetic fails the self-test,
   when two or more agents disagree in one batch and no more of them agree, when the only agent of a batch is to be
   refused, or when refusals leave nothing to train on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from headway.schemas.errors import PromiseViolated
from headway.schemas.ledger import AGENTS_MAX, DISAGREED_MAX, Counters, Drop, DropReason
from headway.schemas.messages import Rollout
from headway.trainer.agreement import Disagreement
from headway.trainer.groups import Batch

SYSTEMIC_AGENTS = 2
REFUSED_WINDOWS = 2
"""So many windows of issued groups may be void for refused agents before the trainer says that nobody is left."""


def agent_of(rollout: Rollout) -> str:
    return f"{rollout.region}/{rollout.agent}"


class Quarantine:
    """The disagreements found under the present head and not yet in the ledger: rollout id -> agent."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def counts(self, before: Counters) -> dict[str, int]:
        """Disagreements by agent: those of the ledger and those found."""
        return _sum(before, self._found.values())

    def recorded(self, before: Counters, drops: Sequence[Drop]) -> dict[str, int]:
        """Disagreements by agent once the ledger holds `drops` too: of the AGENTS_MAX agents with the most."""
        counts = _sum(before, (self._found[d.rollout_id] for d in drops if d.rollout_id in self._found))
        return dict(sorted(sorted(counts.items(), key=lambda item: -item[1])[:AGENTS_MAX]))

    def reason(self, rollout: Rollout, before: Counters) -> DropReason | None:
        """Why the rollout may not train, if so."""
        if rollout.rollout_id in self._found:
            return "disagreed"
        agent = agent_of(rollout)
        return "refused_agent" if self.counts(before).get(agent, 0) > DISAGREED_MAX else None

    def note(self, rollout_id: str, agent: str) -> None:
        """Take a disagreement that a record names."""
        self._found[rollout_id] = agent

    def settle(self, drops: Sequence[Drop]) -> None:
        """Forget what the ledger now holds."""
        for drop in drops:
            self._found.pop(drop.rollout_id, None)

    def add(self, batch: Batch[Rollout], found: Disagreement, before: Counters) -> None:
        """Take the disagreements of a batch. Raises PromiseViolated when they are systemic."""
        agents = {d.rollout_id: agent_of(d.payload) for d in batch.rollouts() if d.payload is not None}
        bad = {agents[rollout_id] for rollout_id in found.details}
        good = {agents[rollout_id] for rollout_id in found.agreeing} - bad
        if len(bad) >= max(SYSTEMIC_AGENTS, len(good)):
            raise _systemic(found, f"{len(bad)} agents disagree with the trainer and {len(good)} agree: {_names(bad)}")
        self._found |= {rollout_id: agents[rollout_id] for rollout_id in found.details}
        counts = self.counts(before)
        if bad == set(agents.values()) and any(counts[agent] > DISAGREED_MAX for agent in bad):
            raise _systemic(found, f"more than {DISAGREED_MAX} rollouts of the only agent disagree: {_names(bad)}")


def require_somebody(drops: Sequence[Drop], void_groups: int, window: int, disagreed: Iterable[str]) -> None:
    """Raises PromiseViolated when `void_groups` in a row found nothing but refused agents."""
    reasons = {drop.reason for drop in drops}
    alone = "refused_agent" in reasons and reasons <= {"refused_agent", "disagreed", "group_incomplete"}
    if alone and void_groups > REFUSED_WINDOWS * window:
        raise PromiseViolated(
            f"P7: {void_groups} groups in a row hold too few rollouts of agents that are not refused",
            why=f"disagreed: {_names(set(disagreed))}",
            hint="start agents under other names on hosts that pass `headway doctor`",
        )


def _sum(before: Counters, found: Iterable[str]) -> dict[str, int]:
    return dict(sorted((Counter(before.disagreed) + Counter(found)).items()))


def _names(agents: set[str]) -> str:
    return ", ".join(sorted(agents)[:8])


def _systemic(found: Disagreement, why: str) -> PromiseViolated:
    return PromiseViolated(found.what, why=why, hint=found.hint)
