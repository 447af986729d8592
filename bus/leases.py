"""Leasing tasks: at-least-once delivery, renewed while the work goes on.

Two agents can both believe that they own a task (a late ack wins, the server forgets acks it has not written when
it is killed, and counts the time during which it stood still itself), so nothing here decides what counts: the first
valid attempt in ROLLOUTS does. But no agent works twice on a task that it holds, or has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from headway.bus.connection import Bus, StoredMessage
from headway.bus.failpoints import failpoint
from headway.bus.held import Held
from headway.bus.topology import AGENTS_CONSUMER
from headway.schemas.errors import UnavailableError, WireError
from headway.schemas.messages import Task

FETCH_S = 1.0
RETRY_S = 0.25
UNREADABLE_RETRY_S = 5.0
GIVE_BACK = b"-NAK"
ENDED_KEPT = 4096
"""Of which tasks a queue remembers that they ended here."""
log = structlog.get_logger()


class Lease:
    """A task that this process may work on: whoever fetches it enters `keeping`, acks it or gives it back."""

    def __init__(self, task: Task, message: Msg, held: Held | None = None) -> None:
        self.task, self._message, self._held = task, message, held
        self.seq = int(message.metadata.sequence.stream)
        self.delivery = int(message.metadata.num_delivered)
        self.kept = True
        """Whether somebody works on it, or is about to: one fetch may bring the same task twice."""
        self.ended = False
        self._note()

    def _note(self) -> None:
        if self._held is not None:
            self._held.add(self.seq, self._message.reply)

    def adopt(self, message: Msg) -> None:
        """Answer for a later delivery of the same task, too."""
        log.info("task_delivered_again", rollout=self.task.rollout_id, delivery=int(message.metadata.num_delivered))
        self._message = message
        self._note()

    async def renew(self) -> None:
        with contextlib.suppress(nats.errors.Error, OSError):
            failpoint("lease.renew.before")
            await self._message.in_progress()
            failpoint("lease.renew.after")
            if self._held is not None:
                self._held.renewed(self.seq)

    @contextlib.contextmanager
    def keeping(self, every_s: float) -> Iterator[None]:
        """Renew while inside; a lease that is then neither acked nor given back comes again after its deadline."""
        renewing = asyncio.create_task(self._renew_each(every_s))
        try:
            yield
        finally:
            renewing.cancel()
            self.kept = False

    async def _renew_each(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.renew()

    async def ack(self) -> None:
        """Done. A lost ack means one more delivery, which this queue acknowledges again."""
        self.ended = True
        await _acknowledge(self._message)
        self._forget()

    async def give_back(self, delay_s: float = 0.0) -> None:
        """Let another agent have it, not before `delay_s`."""
        self.kept = False  # before it can come back here
        with contextlib.suppress(nats.errors.Error, OSError):
            failpoint("lease.nak.before")
            await self._message.nak(delay=delay_s or None)
            failpoint("lease.nak.after")
        self._forget()

    def _forget(self) -> None:
        if self._held is not None:
            self._held.end(self.seq)


class TaskQueue:
    """The agents' shared pull consumer of TASKS. `held` remembers this agent's leases over a kill."""

    def __init__(self, bus: Bus, held: Held | None = None) -> None:
        self._bus, self._held = bus, held
        self._pull: JetStreamContext.PullSubscription | None = None
        self._leases: dict[int, Lease] = {}
        """Those that are open, by sequence, and what ended since the last fetch."""
        self._ended: OrderedDict[int, None] = OrderedDict()
        """The sequences of the last ENDED_KEPT that were acknowledged: a lease with its task is 4 kB."""

    async def give_back_left(self) -> None:
        """Let anybody have at once what an agent of this name held when it was killed."""
        left = list(self._held.take_left()) if self._held is not None else []
        with contextlib.suppress(nats.errors.Error, OSError):
            for reply in left:
                await self._bus.client.publish(reply, GIVE_BACK)
        if left:
            log.info("leases_given_back", tasks=len(left))

    async def fetch(self, limit: int, wait_s: float = FETCH_S) -> list[Lease]:
        """Up to `limit` leases, as soon as there is one; empty after `wait_s` or while NATS is away."""
        try:
            if self._pull is None:
                stream = self._bus.subjects.stream("TASKS")
                self._pull = await self._bus.js.pull_subscribe_bind(AGENTS_CONSUMER, stream)
            messages = await self._pull.fetch(limit, timeout=wait_s)
        except (nats.errors.TimeoutError, TimeoutError):
            return []
        except (nats.errors.Error, nats.js.errors.Error, OSError) as error:
            log.debug("task_fetch_failed", error=repr(error)[:200])
            self._pull = None
            await asyncio.sleep(RETRY_S)
            return []
        found = []
        for message in messages:
            if await self._known(message) or (lease := await self._open(message)) is None:
                continue
            self._leases[lease.seq] = lease
            found.append(lease)
        self._drop_closed()
        return found

    def _drop_closed(self) -> None:
        """Keep no more of what is acknowledged than that it is, and nothing of what is given back."""
        closed = [lease for lease in self._leases.values() if lease.ended or not lease.kept]
        for lease in closed:
            del self._leases[lease.seq]
            if lease.ended:
                self._ended[lease.seq] = None
        while len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    async def _known(self, message: Msg) -> bool:
        """Whether a lease of ours answers for it: the server redelivers what it did not hear of in time."""
        seq = int(message.metadata.sequence.stream)
        lease = self._leases.get(seq)
        if seq in self._ended or (lease is not None and lease.ended):
            log.info("ended_task_delivered_again", seq=seq, delivery=int(message.metadata.num_delivered))
            await _acknowledge(message)
            return True
        if lease is None or not lease.kept:
            return False
        lease.adopt(message)
        await lease.renew()
        return True

    async def _open(self, message: Msg) -> Lease | None:
        headers = {str(key): str(value) for key, value in (message.headers or {}).items()}
        stored = StoredMessage(message.subject, int(message.metadata.sequence.stream), headers, message.data)
        try:
            return Lease(await self._bus.open(Task, stored), message, self._held)
        except WireError as error:
            # Never ended here: its group would stay open for ever. An agent of a newer build may read it.
            if message.metadata.num_delivered == 1:
                await self._bus.bury(stored, error)
        except UnavailableError as error:
            log.warning("task_unavailable", seq=stored.seq, why=error.what)
        failpoint("lease.nak.before")
        await message.nak(delay=UNREADABLE_RETRY_S)
        failpoint("lease.nak.after")
        return None


async def _acknowledge(message: Msg) -> None:
    with contextlib.suppress(nats.errors.Error, OSError):
        failpoint("lease.ack.before")
        await message.ack()
        failpoint("lease.ack.after")
