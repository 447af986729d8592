"""`headway dispatcher`: appends tasks to TASKS as fast as the staleness bound allows.

Invariants: the k-th group and the k-th evaluation block are pure functions of the run's configuration and
task set; every append carries the stream's expected last sequence, so a second dispatcher is refused; the
last message of TASKS is all that a restart needs.
"""

from __future__ import annotations

import asyncio

import structlog
from nats.errors import Error as NatsError

from headway.bus.ledger import LedgerReader
from headway.bus.reader import last_valid
from headway.bus.service import Service
from headway.bus.topology import AGENTS_CONSUMER
from headway.schemas.errors import ConfigError, FencedOut, UnavailableError
from headway.schemas.ledger import Step
from headway.schemas.messages import Task
from headway.schemas.version import Version
from headway.trainer.history import History, require_same_config
from headway.trainer.pacing import Pacing, stale_share
from headway.trainer.plan import Plan, TaskSet

POLL_S = 0.05
FINISHED_POLL_S = 1.0
UNAVAILABLE_S_MAX = 60.0
log = structlog.get_logger()


class Dispatcher:
    """One run's only writer of TASKS."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self._service, self._bus, self._plan = service, service.bus, plan
        self._config, self._pacing = service.config, Pacing.of(service.config)
        self._history, self._reader = History(), LedgerReader(service.bus)
        self._last_seq = self._groups = self._blocks = 0
        self._last_id = ""
        self._paused = False

    async def recover(self) -> None:
        """Continue from the last task of the stream, in the middle of a unit if need be."""
        task, self._last_seq = await last_valid(self._bus, "TASKS", Task)
        if task is None:
            return
        self._last_id, self._groups, self._blocks = task.rollout_id, task.groups_issued, task.eval_blocks_issued
        if task.last_of_unit:
            return
        if task.pinned is not None:
            unit = self._plan.eval_block(task.group, task.pinned, task.groups_issued)
        else:
            unit = self._plan.group(task.group, task.eval_blocks_issued)
        done = [other.rollout_id for other in unit].index(task.rollout_id) + 1
        log.info("unit_resumed", rollout=task.rollout_id, left=len(unit) - done)
        await self._issue(unit[done:])

    async def run(self) -> None:
        """Issue until drained. A run whose steps and evaluations are done may still be rolled back and go on.

        `pause` holds back new units and the end of the run; it is not stored, so a restart resumes.
        """
        service = self._service
        await service.serve_verb("pause", lambda _: self._pause(True))
        await service.serve_verb("resume", lambda _: self._pause(False))
        await self._wait_for_genesis()
        await self.recover()
        finished = False
        while not service.stop.is_set():
            if self._paused:
                service.status.update(phase="paused")
                await asyncio.sleep(POLL_S)
                continue
            await self._follow()
            if (unit := await self._next_unit()) is not None:
                service.status.update(phase="issuing")
                finished = False
                await self._issue(unit)
            elif await self._finished():
                if not finished:
                    await service.event("run_finished", steps=self._history.head.n)
                finished = True
                service.status.update(phase="finished")
                await asyncio.sleep(FINISHED_POLL_S)
            else:
                await asyncio.sleep(POLL_S)

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        self._service.status.update(phase="paused" if paused else "resuming", paused=paused)

    async def _follow(self) -> None:
        """Read the ledger to its end."""
        for link in await self._reader.read_new():
            self._history.add(link)
            if isinstance(step := link.record.body, Step):
                self._pacing = self._pacing.after(stale_share(step))
        self._service.status.update(open_groups_max=self._pacing.open_groups_max)

    async def _wait_for_genesis(self) -> None:
        self._service.status.update(phase="waiting for the genesis")
        while self._history.genesis is None and not self._service.stop.is_set():
            await self._follow()
            await asyncio.sleep(POLL_S)
        if self._history.genesis is not None:
            require_same_config(self._history.genesis, self._config)
            if self._history.genesis.task_set != self._plan.tasks.digest:
                raise ConfigError("the task set differs from the genesis", hint="use the run's own tasks folder")

    async def _next_unit(self) -> list[Task] | None:
        """What may go out now: the first evaluation, then groups while the pacing allows, then the last."""
        in_flight, n = await self._in_flight(), self._history.head.n
        scheduled = self._config.eval.at
        if "start" in scheduled and self._blocks == 0:
            return self._plan.eval_block(0, Version(0, 0), self._groups)
        if "start" in scheduled and self._groups == 0 and in_flight:
            self._service.status.update(phase="evaluating version 0.0", in_flight=in_flight)
            return None
        unproductive = self._history.unproductive_groups
        if self._pacing.may_issue(groups_issued=self._groups, n=n, void_groups=unproductive, in_flight=in_flight):
            return self._plan.group(self._groups, self._blocks)
        self._service.status.update(phase="pacing", in_flight=in_flight, groups_issued=self._groups)
        if n >= self._config.run.steps and "end" in scheduled and self._blocks < self._blocks_wanted():
            return self._plan.eval_block(self._blocks, self._history.head, self._groups)
        return None

    def _blocks_wanted(self) -> int:
        """One block a scheduled evaluation, and one for each finished line that was rolled back."""
        again = self._history.ends_abandoned(self._config.run.steps) if "end" in self._config.eval.at else 0
        return len(self._config.eval.at) + again

    async def _finished(self) -> bool:
        done = self._history.head.n >= self._config.run.steps and self._blocks >= self._blocks_wanted()
        return done and await self._in_flight() == 0

    async def _issue(self, unit: list[Task]) -> None:
        for task in unit:
            await self._append(task)
            self._last_id, self._groups, self._blocks = task.rollout_id, task.groups_issued, task.eval_blocks_issued

    async def _append(self, task: Task) -> None:
        """Raises FencedOut when another dispatcher appends too; what is no task at all is none of ours."""
        subject = self._bus.subjects.task(task.env)
        while True:
            try:
                self._last_seq = await self._bus.publish(subject, task, expect_last_seq=self._last_seq)
                return
            except FencedOut:
                last, last_seq = await last_valid(self._bus, "TASKS", Task)
                newest = last.rollout_id if last is not None else ""
                if newest not in (task.rollout_id, self._last_id) or last_seq <= self._last_seq:
                    raise
                self._last_seq = last_seq
                if newest == task.rollout_id:  # its acknowledgement was lost after the append
                    return

    async def _in_flight(self) -> int:
        """Tasks not yet acknowledged, by the server's account: delivered or still waiting."""
        clock = asyncio.get_running_loop().time
        end = clock() + UNAVAILABLE_S_MAX
        while True:
            try:
                info = await self._bus.js.consumer_info(self._bus.subjects.stream("TASKS"), AGENTS_CONSUMER)
                return int(info.num_pending or 0) + int(info.num_ack_pending or 0)
            except (NatsError, OSError, TimeoutError) as error:
                if clock() > end:
                    raise UnavailableError("the agents' consumer does not answer", why=repr(error)[:200]) from None
                await asyncio.sleep(POLL_S)


async def main(service: Service) -> None:
    tasks = TaskSet.load(service.settings.run_dir / "tasks")
    await Dispatcher(service, Plan(config=service.config, tasks=tasks)).run()
