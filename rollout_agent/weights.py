"""Bringing engines to the head: fetch and verify while serving, pause only to write, prove, then report.

Invariants: an engine resumes only after its own checksums equalled the version's (P4, `engine_writer`); the
mirror is committed only after that; whatever an engine holds otherwise (a restart, a failed write, a killed
agent) is replaced by a full checkpoint instead of being guessed at.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import structlog

from headway.bus.connection import Bus
from headway.rollout_agent.client import EngineTrouble
from headway.rollout_agent.engine_watch import HEALTH_EVERY_S, look, watch
from headway.rollout_agent.engine_writer import EngineWriter, Plan, Way
from headway.rollout_agent.head import Head, HeadTracker
from headway.rollout_agent.rotation import Place, Rotation
from headway.schemas.config import Config
from headway.schemas.errors import InputError, UnavailableError, WireError
from headway.schemas.messages import Applied
from headway.schemas.sections import RegionConfig
from headway.schemas.version import Version
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.staged import StagedUpdate

WRITES_MAX = 3
"""A partial write, then full reloads; after that the agent gives an engine up."""
ENGINE_DOWN_S_MAX = 120.0
RETRY_S = 0.5
START_WAIT_S_MAX = 120.0
Pair = tuple[Place, EngineWriter]
log = structlog.get_logger()


class VersionUnavailable(UnavailableError):
    """A pinned version has been passed and cannot be served any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class WeightKeeper:
    """Owns an agent's engines and mirror. `run` is its one task; the rest is for sessions."""

    bus: Bus
    config: Config
    region: str
    agent: str
    tracker: HeadTracker
    fetcher: Fetcher
    mirror: HostMirror
    writers: Sequence[EngineWriter]
    clock: Callable[[], float]
    served: Version | None = None
    in_flight: int = 0
    swaps: int = 0
    _pins: int = 0
    _swapping: bool = False
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _answered_s: float = 0.0
    rotation: Rotation = field(init=False)

    def __post_init__(self) -> None:
        region = self.config.regions.get(self.region) or RegionConfig()
        self.rotation = Rotation(
            [writer.engine for writer in self.writers],
            occupancy_max=region.kv_occupancy_max,
            session_tokens=self.config.agent.max_session_tokens,
        )

    @property
    def healthy(self) -> bool:
        """Whether an engine is in rotation."""
        return bool(self.rotation.serving)

    @property
    def _pairs(self) -> list[Pair]:
        return list(zip(self.rotation.places, self.writers, strict=True))

    # For sessions

    def may_start(self) -> bool:
        """Whether a session that starts now is fresh enough: head.n - served.n <= swap_slack."""
        fresh = self.served is not None and self.tracker.lag_of(self.served) <= self.config.staleness.swap_slack
        return fresh and self.healthy

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Held while a request is at an engine. `finish` swaps let no new one begin."""
        async with self._moved:
            await self._moved.wait_for(lambda: not (self._swapping and self.config.staleness.swap_mode == "finish"))
            self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            await self._notify()

    @contextlib.asynccontextmanager
    async def admitted(self, pinned: Version | None) -> AsyncIterator[None]:
        """Wait until a session may start; a pinned one holds its version until it leaves.

        Raises VersionUnavailable when the pinned version has been passed, UnavailableError after
        START_WAIT_S_MAX.
        """

        def ready() -> bool:
            if pinned is None:
                return self.may_start()
            return self.served is not None and self.healthy and not self._swapping and self.served >= pinned

        try:
            async with asyncio.timeout(START_WAIT_S_MAX):
                await self.tracker.refresh()
                async with self._moved:
                    await self._moved.wait_for(ready)
                    if pinned is not None and self.served != pinned:
                        raise VersionUnavailable(f"{pinned} is pinned and {self.served} is served")
                    self._pins += pinned is not None
        except TimeoutError:
            raise UnavailableError(f"{pinned or 'a fresh version'} was not served in time") from None
        try:
            yield
        finally:
            self._pins -= pinned is not None
            await self._notify()

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # For the hours in which engines are lent

    async def release_memory(self) -> None:
        """Have engines give their memory back, once nothing is written to them. They are loaded anew afterwards."""
        for place, writer in self._pairs:
            place.asleep, place.answers = True, False
            self.rotation.fail(place, "its memory is given back", probe=False)
            while place.writes % 2:  # noqa: ASYNC110  # a write ends within its timeouts
                await asyncio.sleep(RETRY_S)
            writer.holds = None
            try:
                await place.engine.release_memory()
            except (EngineTrouble, InputError) as error:
                log.warning("memory_not_released", url=place.engine.url, why=str(error)[:400])

    async def resume_memory(self) -> None:
        for place in self.rotation.places:
            try:
                await place.engine.resume_memory()
            except (EngineTrouble, InputError) as error:
                log.warning("memory_not_resumed", url=place.engine.url, why=str(error)[:400])
            place.asleep = False
            place.look.set()

    # The task

    async def run(self) -> None:
        """Keep the engines at the head until cancelled.

        Raises UnavailableError when no engine answers or can be brought to a version any more.
        """
        await self._adopt()
        async with asyncio.TaskGroup() as watches:
            for place in self.rotation.places:
                watches.create_task(watch(self.rotation, place, self._wake))
            while True:
                self._wake.clear()
                self.tracker.changed.clear()
                self._require_an_engine()
                await self._check_engines()
                head = self.tracker.head
                if head is None or self.served == head.version or not await self._advance(head):
                    await self._sleep()

    def _require_an_engine(self) -> None:
        places, now_s = self.rotation.places, self.clock()
        if all(place.failures >= WRITES_MAX for place in places):
            raise UnavailableError(
                f"{places[0].engine.url} is out of rotation: {WRITES_MAX} writes failed",
                why=places[0].why[:400],
                hint="restart the engine and then the agent",
            )
        if any(place.answers or place.asleep for place in places):
            self._answered_s = now_s
        elif now_s - self._answered_s > ENGINE_DOWN_S_MAX:
            raise UnavailableError(
                f"{places[0].engine.url} stays down", why=places[0].why[:400], hint="is the engine running? see its log"
            )

    async def _sleep(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._wake, self.tracker.changed)]
        try:
            await asyncio.wait(waits, timeout=HEALTH_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _adopt(self) -> None:
        """Take over engines that provably hold the mirror's version, as an earlier agent left them."""
        self._answered_s = self.clock()
        await asyncio.gather(*(look(self.rotation, place) for place in self.rotation.places))
        if self.mirror.reset_reason is not None:
            log.warning("mirror_emptied", why=self.mirror.reset_reason)
        head = self.mirror.head
        if head is None:
            return
        for place, writer in self._pairs:
            if place.version == str(head.version) and await writer.adopt(self.mirror):
                self.served = head.version
                await self.rotation.admit(place)
        await self._notify()
        await self._allow_sparse()

    def _usable(self) -> list[Pair]:
        """Engines that answer and were not given up."""
        return [pair for pair in self._pairs if pair[0].answers and pair[0].failures < WRITES_MAX]

    async def _check_engines(self) -> None:
        """Bring engines back that left the rotation; nothing but the agent changes what one serves."""
        if self.served is None:
            return
        for place in self.rotation.serving:
            if place.version != str(self.served):
                self.rotation.fail(place, f"it serves {place.version} instead of {self.served}")
        out = [pair for pair in self._usable() if not pair[0].serving]
        if out and (self.mirror.head is None or self.mirror.head.version != self.served):
            self.served = None  # the head is loaded anew, in full
            return
        await asyncio.gather(*(self._bring_back(place, writer) for place, writer in out))

    async def _bring_back(self, place: Place, writer: EngineWriter) -> None:
        """Into rotation once it has proven its weights; what it holds otherwise is replaced."""
        same = place.version == str(self.served)
        try:
            async with place.unless_gone():
                proven = same and await writer.adopt(self.mirror)
        except EngineTrouble:
            return
        if not proven:
            log.warning("engine_restarted", url=writer.engine.url, served=str(self.served), found=place.version)
            writer.holds = None
            if await self._write(place, writer, None) is None:
                return
        await self.rotation.admit(place)
        await self._notify()

    async def _advance(self, head: Head) -> bool:
        """Bring every engine that can be used to the head; whether one is there. The others follow when they can."""
        if not self._usable():
            return False
        version = head.version
        try:
            staged = await self.fetcher.stage(version, head.manifest, self.mirror)
        except (UnavailableError, WireError) as error:
            log.warning("stage_failed", version=str(version), why=str(error)[:400])
            if isinstance(error, WireError) and error.reason == "wrong_state":
                self.mirror.reset("its bytes are not those that deltas were made against")
            await asyncio.sleep(RETRY_S)
            return True
        await self._until(lambda: self._pins == 0)
        pairs = self._usable()
        plans = await asyncio.gather(*(self._prepare(place, writer, staged) for place, writer in pairs))
        async with self._moved:
            await self._moved.wait_for(lambda: self._pins == 0)
            self._swapping = True
        try:
            if self.config.staleness.swap_mode == "finish":
                await self._until(lambda: self.in_flight == 0)
            in_flight = self.in_flight
            writes = [self._write(*pair, staged, plan) for pair, plan in zip(pairs, plans, strict=True) if plan]
            pauses_ms = [ms for ms in await asyncio.gather(*writes) if ms is not None]
            if not pauses_ms:
                return False
            await asyncio.to_thread(self.mirror.commit, staged)
            self.served, self.swaps = version, self.swaps + 1
            for place, writer in self._pairs:
                if writer.holds == staged.manifest.root:
                    await self.rotation.admit(place)
                elif place.serving:
                    self.rotation.fail(place, f"it did not take {version}")
        finally:
            self._swapping = False
            await self._notify()
        head_ms = (asyncio.get_running_loop().time() - head.seen_s) * 1e3
        way = next(plan.way for plan in plans if plan)
        await self._report(staged, max(pauses_ms), in_flight, way, head_ms)
        await self._allow_sparse()
        return True

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait for sessions that hold the version; engines that leave the rotation meanwhile come back to it."""
        while not ready():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_EVERY_S), self._moved:
                    await self._moved.wait_for(ready)
            await self._check_engines()

    async def _prepare(self, place: Place, writer: EngineWriter, staged: StagedUpdate | None) -> Plan | None:
        try:
            async with place.unless_gone():
                return await writer.prepare(self.mirror, staged, full=place.failures > 0)
        except EngineTrouble as error:
            self.rotation.fail(place, str(error))
            return None

    async def _write(
        self, place: Place, writer: EngineWriter, staged: StagedUpdate | None, plan: Plan | None = None
    ) -> float | None:
        """Bring one engine to `staged` (None: to the mirror's version); returns the pause in ms.

        None when it failed: the engine is out of rotation then, for good after WRITES_MAX failures in a row.
        """
        in_place = self.config.staleness.swap_mode == "in_place"
        while place.failures < WRITES_MAX:
            plan = plan or await self._prepare(place, writer, staged)
            if plan is None:
                return None
            place.writes += 1
            try:
                async with place.unless_gone():
                    pause_ms = await writer.write(plan, in_place=in_place)
                place.version, place.failures = str(plan.manifest.version), 0
                return pause_ms
            except (EngineTrouble, InputError) as error:
                log.warning("write_failed", url=writer.engine.url, why=str(error)[:400])
                writer.holds, plan = None, None
                place.failures, place.why = place.failures + 1, str(error)
                self.rotation.fail(place, str(error), probe=False)
                if isinstance(error, EngineTrouble):
                    return None
            finally:
                place.writes += 1
            await asyncio.sleep(RETRY_S * place.failures)
        return None

    async def _allow_sparse(self) -> None:
        for place, writer in self._pairs:
            try:
                if place.serving:
                    await writer.allow_sparse(self.mirror)
            except EngineTrouble as error:
                log.warning("engine_away", why=str(error)[:400])

    async def _report(self, staged: StagedUpdate, pause_ms: float, in_flight: int, way: Way, head_ms: float) -> None:
        stats, manifest = staged.stats, staged.manifest
        applied = Applied(
            region=self.region,
            agent=self.agent,
            version=manifest.version,
            root=manifest.root,
            fetched_bytes=stats.fetched_bytes,
            fetch_ms=stats.fetch_ms,
            stage_ms=stats.stage_ms,
            pause_ms=pause_ms,
            in_flight=in_flight,
            way=way,
            head_ms=head_ms,
        )
        log.info("weights_swapped", **applied.model_dump(exclude={"root", "region", "agent"}))
        try:
            await self.bus.publish(self.bus.subjects.applied(self.region, self.agent), applied)
        except UnavailableError as error:  # a report, not a fact: the version is served either way
            log.warning("applied_unreported", version=str(manifest.version), why=str(error)[:200])
