"""From ROLLOUTS to the pool: decode, verify, judge, in stream order.

Invariants: every sequence is passed exactly once and in order; what cannot be trusted is decided as a drop
with its reason (and a copy in `dead`), never trained and never ignored; an object store that does not answer
blocks intake instead of dropping.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import structlog

from headway.bus.connection import Bus, StoredMessage
from headway.bus.reader import follow, read_at
from headway.kernels.config import ModelConfig
from headway.schemas import routes as routed
from headway.schemas.config import Config
from headway.schemas.errors import PromiseViolated, UnavailableError, WireError
from headway.schemas.ledger import DropReason, Genesis, LedgerEntry
from headway.schemas.messages import H_ROLLOUT, Rollout
from headway.schemas.rewards import Facts, Scoring
from headway.schemas.wire import digest_of
from headway.trainer.groups import Decided, Pool, parse_train_id
from headway.trainer.history import History
from headway.trainer.pacing import Pacing
from headway.trainer.plan import TRAIN_TEMPERATURE, Plan

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Decides what a stored message means. A function of the message and of what the ledger binds."""

    run: str
    genesis: Genesis
    model: ModelConfig
    plan: Plan
    scoring: Scoring

    @property
    def config(self) -> Config:
        return self.plan.config

    def check(self, rollout: Rollout, history: History) -> None:
        """Raises WireError unless everything about a graded attempt fits the run."""
        assert rollout.trajectory is not None
        assert rollout.verdict is not None
        verdict = rollout.verdict.open_verdict(self.genesis.sandbox_key)
        signed = (verdict.run, verdict.rollout_id, verdict.attempt, verdict.task_id)
        if signed != (self.run, rollout.rollout_id, rollout.attempt, rollout.task_id):
            raise WireError("bad_signature", f"{rollout.rollout_id}: the verdict was signed for something else")
        due = self.scoring.score(Facts.of(rollout.trajectory, rollout.commands, verdict))
        if (rollout.reward, rollout.reward_parts) != (due.total, due.parts):
            raise WireError(
                "bad_signature", f"{rollout.rollout_id}: reward {rollout.reward}, {due.total} follows from its verdict"
            )
        trajectory, model = rollout.trajectory, self.model
        agent, parts = self.config.agent, trajectory.parts()
        longest, most = (
            max(end - start for start, end in parts),
            agent.max_summaries if agent.summarise_at_tokens else 0,
        )
        if longest > agent.max_session_tokens or len(parts) > most + 1:
            raise WireError("invalid", f"{rollout.rollout_id}: {len(parts)} segments of up to {longest} tokens")
        if int(trajectory.token_ids.max()) >= model.vocab_size or not trajectory.spans:
            raise WireError("invalid", f"{rollout.rollout_id}: a token id outside the vocabulary, or none sampled")
        if trajectory.temperature != TRAIN_TEMPERATURE:
            raise WireError("invalid", f"{rollout.rollout_id}: sampled at temperature {trajectory.temperature}")
        if trajectory.routes.size:
            self._check_routes(rollout.rollout_id, trajectory.routes, trajectory.layer_map)
        for span in (*trajectory.spans, *trajectory.route_spans):
            if span.version not in history.manifests:
                raise WireError("invalid", f"{rollout.rollout_id}: sampled by {span.version}, which does not exist")

    def _check_routes(self, rollout_id: str, routes: np.ndarray, layer_map: list[int]) -> None:
        model = self.model
        if layer_map != (due := list(model.sparse_layers)):
            raise WireError("bad_routes", f"{rollout_id}: routes of layers {layer_map[:8]} where {due[:8]} are due")
        try:
            routed.check(routes, model.num_experts, model.num_experts_per_tok)
        except ValueError as error:
            raise WireError("bad_routes", f"{rollout_id}: {error}") from None

    def decide(self, stored: StoredMessage, rollout: Rollout, history: History) -> Decided[Rollout] | None:
        """The decided attempt, None when it decides nothing. Raises WireError."""
        if rollout.purpose != "train" or not rollout.terminal:
            return None
        place = parse_train_id(rollout.rollout_id)
        allowed = Pacing.of(self.config).groups_allowed(history.head.n, history.unproductive_groups)
        issued = rollout.group < allowed and rollout.sample < self.config.grpo.samples_per_group
        if place != (rollout.group, rollout.sample) or not issued:
            raise WireError("invalid", f"{rollout.rollout_id} was never issued as {rollout.group}/{rollout.sample}")
        if rollout.task_id != (due := self.plan.task_of(rollout.group)):
            raise WireError("invalid", f"{rollout.rollout_id}: task {rollout.task_id} where {due} was issued")
        if rollout.outcome == "infra_failed":
            return Decided(seq=stored.seq, rollout_id=rollout.rollout_id, payload=None, reason="infra_failed")
        self.check(rollout, history)
        return Decided(seq=stored.seq, rollout_id=rollout.rollout_id, payload=rollout)

    def judge(
        self, stored: StoredMessage, opened: Rollout | WireError, history: History
    ) -> tuple[Decided[Rollout] | None, WireError | None]:
        """What a message decides, None if nothing, and why it cannot be trusted, if so.

        A message that cannot be trusted still ends its rollout, or its group would stay open for ever.
        """
        if not isinstance(opened, WireError):
            try:
                return self.decide(stored, opened, history), None
            except WireError as error:
                opened = error
        rollout_id = stored.headers.get(H_ROLLOUT, "")
        place = parse_train_id(rollout_id)
        allowed = Pacing.of(self.config).groups_allowed(history.head.n, history.unproductive_groups)
        if place is None or place[0] >= allowed or place[1] >= self.config.grpo.samples_per_group:
            return None, opened
        return Decided(seq=stored.seq, rollout_id=rollout_id, payload=None, reason=_reason(opened)), opened


def _reason(error: WireError) -> DropReason:
    known: dict[str, DropReason] = {
        "bad_signature": "bad_verdict",
        "blob_lost": "blob_lost",
        "bad_routes": "bad_routes",
    }
    return known.get(error.reason, "invalid")


class Intake:
    """Feeds one pool. `arrived` is set whenever something was decided."""

    def __init__(self, bus: Bus, judge: Judge, pool: Pool[Rollout], history: History) -> None:
        self._bus, self._judge, self._pool, self._history = bus, judge, pool, history
        self.arrived = asyncio.Event()
        self.gate = asyncio.Lock()
        """Held while a record is appended: other services act on it before the writer knows that it is stored,
        so what they send must be judged after the history has it."""
        self.duplicates = 0

    async def restore(self, seqs: list[int], cursor: int) -> None:
        """Read the undecided pool of a ledger record again. Raises PromiseViolated when a message is gone."""
        for seq in seqs:
            stored = await read_at(self._bus, "ROLLOUTS", seq)
            if stored is None:
                raise PromiseViolated(f"ROLLOUTS sequence {seq} is in the ledger's pool and not in the stream")
            await self._take(stored)
        self._pool.cursor = cursor

    async def run(self) -> None:
        """Follow the stream from the pool's cursor, for ever."""
        async for stored in follow(self._bus, "ROLLOUTS", self._pool.cursor + 1):
            await self._take(stored)
            self.arrived.set()

    async def _take(self, stored: StoredMessage) -> None:
        opened: Rollout | WireError
        try:
            opened = await self._bus.open(Rollout, stored)
        except WireError as error:
            opened = error
            if error.reason == "blob_lost":
                await self._require_store()
        async with self.gate:
            decided, refusal = self._judge.judge(stored, opened, self._history)
            if decided is None:
                self._pool.skip(stored.seq)
            elif not self._pool.observe(decided):
                self.duplicates += 1
        if refusal is not None:
            if decided is not None:
                log.warning("rollout_refused", rollout=decided.rollout_id, seq=stored.seq, reason=refusal.reason)
            await self._bus.bury(stored, refusal)

    async def _require_store(self) -> None:
        """Raises UnavailableError where the newest ledger record is gone too: such a store is away, not damaged."""
        stored = await self._bus.last("LEDGER")
        if stored is None or self._bus.store is None:
            return
        digest = digest_of((await self._bus.open(LedgerEntry, stored)).payload)
        if not await self._bus.store.exists(self._bus.keys.ledger(digest)):
            raise UnavailableError(
                "the object store holds nothing of this run any more",
                why="a rollout's body and the newest ledger record are both gone from it",
                hint="mount or name the right store (store.url, HEADWAY_STORE_URL) and start again: nothing is lost",
            )
