"""An agent's engines: which may be asked, and which one a session's next turn asks.

Invariants: only an engine in rotation is asked; one that failed a request is out until the keeper of the weights has
proven it again; a session stays with the engine that holds its prefix unless that one is out of rotation or full.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from headway.rollout_agent.client import EngineBusy, EngineClient, EngineTrouble
from headway.rollout_agent.known_routes import KnownRoutes, joined, unknown
from headway.rollout_agent.replies import Completion, Load, Sampling
from headway.schemas.errors import InputError, WireError
from headway.schemas.trajectory import Span

REQUEST_OF_TURN = 0.9
"""A request ends this far into its turn's deadline, so that an engine that hangs is told from a turn that was long."""
FAILURES_MAX = 2
"""Requests of one turn that may fail: the second is asked of another engine, or of the same after its return."""
BUSY_WAIT_S = 0.2
ROWS_S = 20.0
"""For one token more, when the rows of a prompt must be asked for again; without them, they count as unknown."""
UNMEASURED = 1 << 20
"""Room in engines that do not say how full they are."""
log = structlog.get_logger()


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """One engine as its agent sees it. The watch writes what it answers, the keeper of the weights `serving`."""

    engine: EngineClient
    serving: bool = False
    admissions: int = 0
    answers: bool = False
    version: str | None = None
    """What it last said it serves."""
    load: Load | None = None
    sessions: int = 0
    begun: int = 0
    """Open sessions that came since `load` was read: it does not know of them."""
    readings: int = 0
    asked: int = 0
    """Requests of ours that are at it now."""
    user_requests: int = 0
    """Those of others, running or waiting, as last read."""
    writes: int = 0
    """Counts up when a write begins and when it ends: what was read across one of these is old."""
    asleep: bool = False
    """Its memory was given back: nothing is asked of it."""
    failures: int = 0
    """Writes that failed in a row, the last for the reason `why`."""
    why: str = ""
    probe: bool = False
    """It must sample a token before it counts as answering: one whose model hangs may still answer questions."""
    gone: bool = False
    """It does not answer: whoever waits for it is cut off."""
    look: asyncio.Event = field(default_factory=asyncio.Event)
    """Asks the watch to look now."""
    _waits: set[asyncio.Timeout] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def unless_gone(self) -> AsyncIterator[None]:
        """Raise EngineTrouble once the engine answers no questions any more: one that hangs says nothing else."""
        try:
            async with asyncio.timeout(0 if self.gone else None) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            raise EngineTrouble(f"{self.engine.url} answers no more", why=self.why[:400]) from None

    def lose(self, why: str) -> None:
        self.answers, self.gone, self.why = False, True, why
        now_s = asyncio.get_running_loop().time()
        while self._waits:
            self._waits.pop().reschedule(now_s)

    def read(self, load: Load | None, ours: int = 0) -> None:
        """Take a reading; `ours` is how many requests of ours it counts at most."""
        self.load, self.begun, self.readings = load, 0, self.readings + 1
        self.user_requests = max(0, load.running + load.waiting - ours) if load is not None else 0


class Rotation:
    """All engines of an agent. `session_tokens` is what a session may hold of a cache at most."""

    def __init__(self, engines: Sequence[EngineClient], *, occupancy_max: float, session_tokens: int) -> None:
        self.places = [Place(engine=engine) for engine in engines]
        self._occupancy_max, self._session_tokens = occupancy_max, session_tokens
        self._changed = asyncio.Condition()
        self.requests_failed = self.sessions_moved = 0

    @property
    def serving(self) -> list[Place]:
        return [place for place in self.places if place.serving]

    @property
    def sessions(self) -> int:
        return sum(place.sessions for place in self.places)

    def occupancy(self, place: Place) -> float:
        """As read, and sessions that the reading does not know of as if they were full."""
        if place.load is None:
            return 0.0
        return (place.load.tokens + place.begun * self._session_tokens) / place.load.capacity_tokens

    def room(self) -> int:
        """How many more sessions may begin now."""
        return sum(self._room(place) for place in self.serving)

    def _room(self, place: Place) -> int:
        if place.load is None:
            return UNMEASURED
        if self.is_full(place):
            return 0
        left = (self._occupancy_max - self.occupancy(place)) * place.load.capacity_tokens
        return 1 + int(left / self._session_tokens)

    def is_full(self, place: Place) -> bool:
        return self.occupancy(place) > self._occupancy_max

    async def admit(self, place: Place) -> None:
        """Into rotation: its weights were proven."""
        place.admissions += not place.serving
        place.serving, place.failures = True, 0
        await self.notify()

    def fail(self, place: Place, why: str, *, probe: bool = True) -> None:
        """Out of rotation until it was looked at, which is asked for, and proven; see `take_out`."""
        self.take_out(place, why, probe=probe)
        place.look.set()

    def take_out(self, place: Place, why: str, *, probe: bool = True) -> None:
        """Out of rotation; without `probe` where it may be in a pause."""
        if place.serving:
            log.warning("engine_out_of_rotation", url=place.engine.url, why=why[:400])
        place.serving, place.probe = False, probe

    @contextlib.contextmanager
    def session(self) -> Iterator[SessionEngine]:
        """A session's way to the engines, for as long as it lasts."""
        engine = SessionEngine(self)
        try:
            yield engine
        finally:
            engine.leave()

    def best(self) -> Place | None:
        """Where a session goes that holds no prefix anywhere: the fewest sessions among those with room."""
        if not (serving := self.serving):
            return None
        roomy = [place for place in serving if not self.is_full(place)]
        if roomy:
            return min(roomy, key=lambda place: place.sessions)
        return min(serving, key=self.occupancy)

    async def wait_for(self, ready: Callable[[], object]) -> None:
        async with self._changed:
            await self._changed.wait_for(ready)

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class SessionEngine:
    """The engine that a session talks to, whichever that is; what `session.Engine` asks for."""

    def __init__(self, rotation: Rotation) -> None:
        self._rotation = rotation
        self._home: Place | None = None
        self._reading = -1
        self._asked: tuple[Place, str] | None = None
        self._aborted = False
        self._known: KnownRoutes | None = None
        self._go(rotation.best())

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, rid: str, timeout_s: float) -> Completion:
        """As `EngineClient.generate`. A request that fails outside the model is asked once more, where it can be."""
        clock = asyncio.get_running_loop().time
        end_s, failed = clock() + timeout_s * REQUEST_OF_TURN, 0
        while True:
            place = await self._place(end_s - clock())
            self._asked, admission = (place, f"{rid}-{failed}" if failed else rid), place.admissions
            place.asked += 1
            try:
                async with place.unless_gone():
                    return await self._answer(place, prompt, sampling, self._asked[1], end_s - clock())
            except EngineBusy:
                place.look.set()
                if clock() + BUSY_WAIT_S > end_s:
                    raise
            except EngineTrouble as error:
                failed += 1
                self._rotation.requests_failed += 1
                if place.admissions == admission:  # else it was looked at since
                    self._rotation.fail(place, str(error))
                if failed == FAILURES_MAX or clock() >= end_s:
                    raise
                continue
            finally:
                place.asked -= 1
                self._asked = None
            await asyncio.sleep(BUSY_WAIT_S)

    async def _answer(
        self, place: Place, prompt: Sequence[int], sampling: Sampling, rid: str, timeout_s: float
    ) -> Completion:
        """A completion with all rows, of which the engine sends only those that are not known."""
        known, self._known = self._known, None
        rows = known.rows_for(place, place.version, prompt) if known is not None else 0
        if known is None or not rows:
            found = await place.engine.generate(prompt, sampling, rid=rid, timeout_s=timeout_s)
        else:
            found = await place.engine.generate(prompt, sampling, rid=rid, timeout_s=timeout_s, routes_from=rows)
            if known.fits(found):
                found = joined(known.routes, known.spans, found)
            else:
                found = await self._routed_again(place, prompt, sampling, rid, known, found)
        self._known = KnownRoutes.of(place, prompt, found)
        return found

    async def _routed_again(
        self, place: Place, prompt: Sequence[int], sampling: Sampling, rid: str, known: KnownRoutes, found: Completion
    ) -> Completion:
        """With the rows of a prompt that a swap had computed anew, or kept: the engine still has them.

        Unless yet another version has come: no forward had its rows beside those of `found`.
        """
        if found.routes is None:
            return found
        rows, version = len(known.ids), found.route_spans[0].version
        routes, spans = unknown(rows, found), [Span(start=0, end=rows, version=version)]
        one = dataclasses.replace(sampling, max_new_tokens=1)
        with contextlib.suppress(EngineTrouble, WireError, InputError):
            again = await place.engine.generate(prompt, one, rid=f"{rid}-rows", timeout_s=ROWS_S)
            told = {span.version for span in again.route_spans if span.start < rows}
            if again.routes is not None and told <= {version, known.version}:
                routes, spans = again.routes[:rows], again.route_spans
        return joined(routes, spans, found)

    async def abort(self, rid: str) -> None:
        """End the request that is at an engine, or waits for one."""
        self._aborted = True
        if self._asked is not None:
            place, asked = self._asked
            await place.engine.abort(asked)
        await self._rotation.notify()

    def leave(self) -> None:
        self._go(None)

    async def _place(self, timeout_s: float) -> Place:
        """Home; another engine while that is out of rotation or full. Raises EngineTrouble when there is none."""
        if not self._rotation.serving:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._rotation.wait_for(lambda: self._aborted or self._rotation.serving)
            except TimeoutError:
                raise EngineTrouble("no engine of this agent is in rotation", hint="see the engines' logs") from None
        if self._aborted:
            raise EngineTrouble("the session was told to leave")
        home, best = self._home, self._rotation.best()
        assert best is not None
        if home is not None and home.serving and (not self._rotation.is_full(home) or self._rotation.is_full(best)):
            return home
        if home is not None and best is not home:
            self._rotation.sessions_moved += 1
        self._go(best)
        return best

    def _go(self, place: Place | None) -> None:
        """Make another engine home, or none."""
        if place is self._home:
            return
        if self._home is not None:
            self._home.sessions -= 1
            self._home.begun -= self._home.readings == self._reading
        if place is not None:
            place.sessions += 1
            place.begun += 1
            self._reading = place.readings
        self._home = place
