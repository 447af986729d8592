"""Running attempts: which tasks are leased, how many at once, and how they end when the agent must leave.

Invariants: every attempt that began ends as exactly one rollout message (ok, infra_failed, handed_back) unless the
process is killed, or the bus takes none until the end of a drain: then what was sampled is saved; at most
`max_sessions` sessions run, and as many more are being stored at most; a drain ends in time, whatever does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from headway.bus.leases import Lease, TaskQueue
from headway.bus.service import Service
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.outcomes import Outcomes
from headway.rollout_agent.recorder import Recorder
from headway.rollout_agent.rotation import SessionEngine
from headway.rollout_agent.session import Session, SessionResult
from headway.rollout_agent.session_log import SessionLog
from headway.rollout_agent.tenancy import Tenancy
from headway.rollout_agent.tools import Sandbox
from headway.rollout_agent.weights import VersionUnavailable, WeightKeeper
from headway.rollout_agent.window import Window
from headway.schemas.errors import InputError, UnavailableError
from headway.schemas.ids import attempt_nonce
from headway.schemas.messages import Task
from headway.schemas.rewards import Scoring
from headway.schemas.session_log import SavedSession

GRACE_S = 20.0
"""Open sessions may finish this long after SIGTERM; they usually take a second."""
LEAVE_S = 15.0
"""What saving and handing back the others may take then. A drain that must be quick has half of its time for that."""
LEAVE_PARTS = 4
POLL_S = 0.1
FETCH_S = 0.5
LEASES_AT_ONCE = 16
"""Sessions that begin together: hundreds would keep the event loop, and whoever waits for it, busy for a second."""
log = structlog.get_logger()


class Agent:
    """Runs attempts side by side. One instance a process."""

    def __init__(
        self,
        service: Service,
        queue: TaskQueue,
        keeper: WeightKeeper,
        sandbox: Sandbox,
        shape: ModelShape,
        clock: Callable[[], float],
        make_session: Callable[..., Session],
        scoring: Scoring,
    ) -> None:
        self._service, self._queue, self._keeper, self._sandbox, self._shape = service, queue, keeper, sandbox, shape
        self._make_session = make_session
        self._clock, self._config, self._settings = clock, service.config, service.settings
        self._attempts: set[asyncio.Task[None]] = set()
        self._publishing: set[asyncio.Task[None]] = set()
        """Attempts whose session has ended: they store what was sampled, and are cut off at a drain's end alone."""
        region = self._config.regions.get(self._settings.region)
        self._releases_memory = region is not None and region.release_memory
        self._window, self._tenancy = Window.of(region), Tenancy.of(region, keeper.rotation, clock)
        self._moved = asyncio.Event()
        """A place became free."""
        self._sessions: set[Session] = set()
        self._saved = SessionLog(service.store, service.bus.keys)
        self._outcomes = Outcomes(
            service.bus,
            service.config,
            self._saved,
            scoring,
            region=self._settings.region,
            agent=self._settings.instance,
        )
        self._giving_up = False
        self._part_s = LEAVE_S / LEAVE_PARTS

    async def run(self) -> None:
        """Work until SIGTERM, then drain."""
        await self._queue.give_back_left()
        while not self._service.stop.is_set():
            self._report()
            if self._away():
                await self._rest()
                continue
            free = self._free()
            held = self._refused or self._outcomes.pushed_back or self._sandbox.waiting or not self._keeper.may_start()
            if free < 1 or held:
                await self._until_room()
                continue
            for lease in await self._queue.fetch(min(free, LEASES_AT_ONCE), FETCH_S):
                attempt = self._service.tasks.create_task(self._attempt(lease))
                self._attempts.add(attempt)
                attempt.add_done_callback(self._ended)
        await self._drain()

    def _ended(self, attempt: asyncio.Task[None]) -> None:
        self._attempts.discard(attempt)
        self._moved.set()

    def _free(self) -> int:
        """How many more tasks may be leased, by this agent's limit and by the room in its engines' KV caches.

        A session that only waits for its rollout to be stored leaves its place to the next.
        """
        rotation, most = self._keeper.rotation, self._config.agent.max_sessions
        running = len(self._attempts) - len(self._publishing)
        return min(most - running, 2 * most - len(self._attempts), rotation.room() - (running - rotation.sessions))

    async def _until_room(self) -> None:
        self._moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._moved.wait()

    def _away(self) -> str:
        """Why the engines are not this agent's to use now; empty if they are."""
        if self._window is not None and not self._window.is_open():
            return "outside its window"
        return "yielding to users" if self._tenancy is not None and self._tenancy.yields() else ""

    async def _rest(self) -> None:
        """Hand everything back at once, then wait until the engines may be used again."""
        self._service.status.update(phase=f"handing back: {self._away()}")
        await self._give_up(0.0, LEAVE_S)
        self._giving_up = False
        if self._releases_memory:
            await self._keeper.release_memory()
        while self._away() and not self._service.stop.is_set():
            self._report()
            await asyncio.sleep(POLL_S)
        if self._releases_memory:
            await self._keeper.resume_memory()

    async def _drain(self) -> None:
        """End everything in the time that was given, at the end also what cannot be published."""
        within_s, began_s = self._service.drain_s, self._clock()
        leave_s = LEAVE_S if within_s is None else min(LEAVE_S, within_s / 2)
        self._service.status.update(phase="draining")
        await self._give_up(GRACE_S if within_s is None else within_s - leave_s, leave_s)
        for attempt in self._publishing:
            attempt.cancel()
        await self._wait(self._part_s)
        self._report()
        tally = self._outcomes.tally
        log.info(
            "agent_drained",
            s=round(self._clock() - began_s, 1),
            ok=tally.ok,
            handed_back=tally.handed_back,
            left=len(self._attempts),
        )

    async def _give_up(self, grace_s: float, leave_s: float) -> None:
        """Let short sessions end; save the others where they are, for whoever leases them next."""
        if grace_s:
            await self._wait(grace_s)
        self._giving_up, self._part_s = True, leave_s / LEAVE_PARTS
        log.info("sessions_given_up", handed_back=len(self._attempts - self._publishing))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._part_s):
                await asyncio.gather(*(session.leave() for session in list(self._sessions)))
        for _ in range(2):
            await self._wait(self._part_s)
            for attempt in self._attempts - self._publishing:
                attempt.cancel()

    async def _wait(self, most_s: float) -> None:
        if self._attempts:
            await asyncio.wait(self._attempts, timeout=most_s)

    @property
    def _refused(self) -> bool:
        """The trainer found too many rollouts of this agent that its version did not sample (P7)."""
        return self._keeper.tracker.counters.refuses(f"{self._settings.region}/{self._settings.instance}")

    def _phase(self) -> str:
        """What the agent does, or which other part it waits for."""
        if self._refused:
            return "refused by the trainer (P7)"
        if not self._attempts and (away := self._away()):
            return away
        if self._keeper.served is not None and not self._keeper.healthy:
            return "waiting for the engine"
        if self._sandbox.waiting:
            return "waiting for a sandbox"
        if self._outcomes.pushed_back:
            return "pushed back by a full stream"
        if self._keeper.healthy and not self._keeper.rotation.room():
            return "waiting for room in the engines"
        if self._attempts:
            return "rolling out"
        return "waiting for tasks" if self._keeper.may_start() else "waiting for weights"

    def _report(self) -> None:
        keeper, tally = self._keeper, self._outcomes.tally
        self._service.status.update(
            phase=self._phase(),
            pushed_back=self._outcomes.pushed_back,
            served=str(keeper.served or ""),
            head=str(keeper.tracker.head.version) if keeper.tracker.head is not None else "",
            sessions=len(self._attempts),
            swaps=keeper.swaps,
            ok=tally.ok,
            infra_failed=tally.infra_failed,
            handed_back=tally.handed_back,
            sampled_tokens=tally.sampled_tokens,
            engines=len(keeper.rotation.serving),
            requests_failed=keeper.rotation.requests_failed,
            sessions_moved=keeper.rotation.sessions_moved,
        )

    async def _attempt(self, lease: Lease) -> None:
        """One lease from delivery to ack or nak."""
        with lease.keeping(self._config.dispatch.ack_wait_s / 3):
            await self._work(lease, attempt_nonce())

    async def _work(self, lease: Lease, nonce: str) -> None:
        task = lease.task
        saved = await self._saved.latest(task) if lease.delivery > 1 else None
        handed_back = saved.handed_back if saved is not None else 0
        if lease.delivery - handed_back > self._config.dispatch.max_attempts:
            await self._outcomes.bury(lease)
            why = f"delivery {lease.delivery} of at most {self._config.dispatch.max_attempts}"
            await self._outcomes.given_up(lease, nonce, f"too_many_attempts: {why}")
            return
        session: Session | None = None
        try:
            async with self._keeper.admitted(task.pinned):
                with self._keeper.rotation.session() as engine:
                    session = self._session(task, nonce, engine, saved)
                    self._sessions.add(session)
                    result = await session.run()
        except VersionUnavailable as error:
            await self._outcomes.given_up(lease, nonce, f"version_unavailable: {error.what}")
        except asyncio.CancelledError:
            if not self._giving_up:
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._part_s):
                    await self._outcomes.handed_back(lease, nonce, session, handed_back)
        except (UnavailableError, InputError) as error:
            if self._giving_up:
                await self._outcomes.handed_back(lease, nonce, session, handed_back)
            else:
                await self._outcomes.failed(lease, nonce, session, handed_back, error)
        else:
            await self._publish(lease, nonce, session, result, handed_back)
        finally:
            if session is not None:
                self._sessions.discard(session)

    async def _publish(
        self, lease: Lease, nonce: str, session: Session, result: SessionResult, handed_back: int
    ) -> None:
        attempt, head = asyncio.current_task(), self._keeper.tracker.head
        assert attempt is not None
        self._publishing.add(attempt)
        self._moved.set()
        attempt.add_done_callback(self._publishing.discard)
        try:
            await self._outcomes.finished(lease, nonce, result, head.version if head is not None else None)
        except asyncio.CancelledError:
            if self._giving_up:  # whoever leases it next has nothing to sample, only to grade
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._part_s):
                        await self._outcomes.unpublished(lease, session, handed_back)
            raise

    def _session(self, task: Task, nonce: str, engine: SessionEngine, saved: SavedSession | None) -> Session:
        """From where `saved` was left, else from the start."""

        async def keep(session: Session) -> None:
            await self._saved.save(session, saved.handed_back if saved is not None else 0)

        session = self._make_session(
            task=task,
            attempt=nonce,
            engine=engine,
            sandbox=self._sandbox,
            config=self._config.agent,
            shape=self._shape,
            turn_gate=self._keeper.turn,
            clock=self._clock,
            keep=keep if self._config.agent.session_log else None,
        )
        if saved is not None:
            session.recorder, session.commands = Recorder.resumed(saved.trajectory), list(saved.commands)
            log.info("session_resumed", rollout=task.rollout_id, attempt=nonce, tokens=len(session.recorder.ids))
        return session
