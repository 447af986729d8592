"""What came of attempts: stored on the bus as rollouts and stamps, told to the task's lease, counted.

Invariants: a task is acked only after a terminal rollout of it was stored, and its saved sessions are forgotten only
after that; a session that may go on elsewhere is saved before its task is given back.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from headway.bus.connection import Bus, StoredMessage, StreamFull
from headway.bus.leases import Lease
from headway.rollout_agent.session import Diverged, Session, SessionResult
from headway.rollout_agent.session_log import SessionLog
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError, HeadwayError, UnavailableError, WireError
from headway.schemas.messages import REASON_CHARS_MAX, REWARD_MAX, Rollout, Stamp
from headway.schemas.rewards import Facts, Scoring
from headway.schemas.version import Version
from headway.schemas.wire import Envelope, Message

PUSHED_BACK_S = 1.0
RETRY_S_FIRST = 0.5
RETRY_S_MAX = 30.0
DOUBLINGS_MAX = 16
"""More than RETRY_S_MAX takes; a float overflows at 1024."""
log = structlog.get_logger()


@dataclass(slots=True)
class Tally:
    """Since start."""

    ok: int = 0
    infra_failed: int = 0
    handed_back: int = 0
    sampled_tokens: int = 0


class Outcomes:
    """Ends the attempts of one agent. Each method returns once everything is stored, however long that takes."""

    def __init__(
        self, bus: Bus, config: Config, saved: SessionLog, scoring: Scoring, *, region: str, agent: str
    ) -> None:
        self._bus, self._config, self._saved, self._scoring = bus, config, saved, scoring
        self._region, self._agent = region, agent
        self.pushed_back = False
        self.tally = Tally()

    async def finished(self, lease: Lease, nonce: str, result: SessionResult, head: Version | None) -> None:
        """A graded session; `head` is the newest version that the agent knew of. Raises ConfigError by its rewards."""
        task, trajectory, verdict = lease.task, result.trajectory, result.verdict.peek_verdict()
        scored = self._scoring.score(Facts.of(trajectory, result.commands, verdict))
        if abs(scored.total) > REWARD_MAX:
            raise ConfigError(
                f"the reward functions gave {scored.total:g}",
                why=f"a rollout carries at most {REWARD_MAX:g}, either way",
            )
        rollout = self._rollout(
            lease,
            nonce,
            outcome="ok",
            terminal=True,
            reward=scored.total,
            reward_parts=scored.parts,
            trajectory=trajectory,
            verdict=result.verdict,
            timings_ms=result.timings_ms,
            commands=result.commands,
        )
        await self._publish(self._bus.subjects.rollout(self._region, self._agent), rollout)
        stamp = Stamp(
            rollout_id=task.rollout_id,
            attempt=nonce,
            spans=trajectory.spans,
            tokens=len(trajectory.token_ids),
            head=head or trajectory.spans[-1].version,
        )
        await self._publish(self._bus.subjects.stamp(self._region, self._agent), stamp)
        await lease.ack()
        if lease.delivery > 1 or self._config.agent.session_log:
            await self._saved.clear(task)
        self.tally.ok += 1
        self.tally.sampled_tokens += int(trajectory.loss_mask.sum())
        log.info(
            "rollout_finished",
            rollout=task.rollout_id,
            attempt=nonce,
            reward=scored.total,
            stop=trajectory.stop_reason,
            turns=trajectory.turns,
            tokens=len(trajectory.token_ids),
            versions=sorted({str(span.version) for span in trajectory.spans}),
            ms=round(result.timings_ms["total"]),
        )

    async def given_up(self, lease: Lease, nonce: str, reason: str) -> None:
        """Give a task up for good."""
        await self._publish_failure(lease, nonce, "infra_failed", reason, terminal=True)
        await lease.ack()
        await self._saved.clear(lease.task)

    async def handed_back(self, lease: Lease, nonce: str, session: Session | None, handed_back: int) -> None:
        """Give a task back that nothing is wrong with, `handed_back` times so far; the session goes on elsewhere."""
        if session is not None:
            await self._saved.save(session, handed_back + 1)
        await self._publish_failure(lease, nonce, "handed_back", "the agent had to leave", terminal=False)
        await lease.give_back()

    async def unpublished(self, lease: Lease, session: Session, handed_back: int) -> None:
        """Give a task back whose rollout the bus does not take; its whole session is saved."""
        await self._saved.save(session, handed_back + 1)
        await lease.give_back()

    async def failed(
        self, lease: Lease, nonce: str, session: Session | None, handed_back: int, error: HeadwayError
    ) -> None:
        """Give a task back after a fault outside the model; what was sampled is not sampled again."""
        if isinstance(error, Diverged):
            await self._saved.clear(lease.task)
        elif session is not None and session.recorder.turns:
            await self._saved.save(session, handed_back)
        await self._publish_failure(lease, nonce, "infra_failed", str(error), terminal=False)
        doublings = min(lease.delivery - handed_back - 1, DOUBLINGS_MAX)
        await lease.give_back(min(RETRY_S_FIRST * 2.0**doublings, RETRY_S_MAX))

    async def bury(self, lease: Lease) -> None:
        """Copy a task that failed too often to `dead`."""
        envelope = Envelope.seal(lease.task)
        stored = StoredMessage(self._bus.subjects.task(lease.task.env), lease.seq, envelope.headers, envelope.body)
        await self._bus.bury(stored, WireError("too_many_attempts", f"delivered {lease.delivery} times"))

    async def _publish_failure(self, lease: Lease, nonce: str, outcome: str, reason: str, *, terminal: bool) -> None:
        rollout = self._rollout(lease, nonce, outcome=outcome, terminal=terminal, reason=reason[:REASON_CHARS_MAX])
        await self._publish(self._bus.subjects.rollout(self._region, self._agent), rollout)
        self.tally.infra_failed += outcome == "infra_failed"
        self.tally.handed_back += outcome == "handed_back"
        log.warning("rollout_failed", rollout=lease.task.rollout_id, outcome=outcome, terminal=terminal, why=reason)

    def _rollout(self, lease: Lease, nonce: str, **fields: object) -> Rollout:
        task = lease.task
        common = {
            "rollout_id": task.rollout_id,
            "attempt": nonce,
            "purpose": task.purpose,
            "group": task.group,
            "sample": task.sample,
            "task_id": task.task_id,
            "task_seq": lease.seq,
            "delivery": lease.delivery,
            "region": self._region,
            "agent": self._agent,
        }
        return Rollout.model_validate({**common, **fields})

    async def _publish(self, subject: str, message: Message) -> None:
        """Store a message, however long it takes: the lease is kept and no new one is taken meanwhile."""
        while True:
            try:
                await self._bus.publish(subject, message)
            except StreamFull as error:
                self.pushed_back = True
                log.warning("publish_pushed_back", subject=subject, why=error.why)
            except UnavailableError as error:
                log.warning("publish_failed", subject=subject, why=error.why)
            else:
                self.pushed_back = False
                return
            await asyncio.sleep(PUSHED_BACK_S)
