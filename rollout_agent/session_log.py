"""Saved sessions in the object store: written by who gives a task up, read by who leases it next.

A rollout's saved sessions are immutable objects beside one another; the one with the most tokens counts, and all are
deleted once its rollout is stored. Losing one costs sampled tokens and nothing else, so a store that is away is
logged and the session starts from its beginning.
"""

from __future__ import annotations

import structlog

from headway.bus.blobs import BlobStore
from headway.rollout_agent.session import Session
from headway.schemas.errors import UnavailableError, WireError
from headway.schemas.messages import Task
from headway.schemas.session_log import SavedSession
from headway.schemas.subjects import Keys
from headway.schemas.wire import BODY_BYTES_MAX, pack, unpack

log = structlog.get_logger()


class SessionLog:
    """The saved sessions of one run."""

    def __init__(self, store: BlobStore, keys: Keys) -> None:
        self._store, self._keys = store, keys

    async def save(self, session: Session, handed_back: int) -> bool:
        """Whether `session`'s state so far is stored."""
        task, recorder = session.task, session.recorder
        saved = SavedSession(
            rollout_id=task.rollout_id,
            task_set=task.task_set,
            task_id=task.task_id,
            sampling_seed=task.sampling_seed,
            trajectory=recorder.saved(session.shape, task.temperature),
            commands=session.commands,
            handed_back=handed_back,
        )
        key = self._keys.session(task.rollout_id, f"{len(recorder.ids):08d}-{handed_back:04d}-{session.attempt}")
        try:
            await self._store.put(key, pack(saved))
        except UnavailableError as error:
            log.warning("session_not_saved", rollout=task.rollout_id, why=str(error)[:300])
            return False
        return True

    async def latest(self, task: Task) -> SavedSession | None:
        """The longest saved session of `task`; None where there is none that can be read and fits."""
        try:
            found = sorted([key async for key, size in self._store.list(self._prefix(task)) if size <= BODY_BYTES_MAX])
            for key in reversed(found):
                try:
                    saved = unpack(SavedSession, await self._store.get(key))
                except WireError as error:
                    log.warning("saved_session_refused", rollout=task.rollout_id, key=key, why=str(error)[:300])
                    continue
                if saved.fits(task):
                    return saved
                log.warning("saved_session_refused", rollout=task.rollout_id, key=key, why="it is of another task")
        except UnavailableError as error:
            log.warning("saved_sessions_unread", rollout=task.rollout_id, why=str(error)[:300])
        return None

    async def clear(self, task: Task) -> None:
        """Forget a rollout's saved sessions."""
        try:
            for key in [key async for key, _ in self._store.list(self._prefix(task))]:
                await self._store.delete(key)
        except UnavailableError as error:
            log.warning("saved_sessions_left", rollout=task.rollout_id, why=str(error)[:300])

    def _prefix(self, task: Task) -> str:
        return self._keys.session(task.rollout_id)
