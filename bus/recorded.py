"""A recording in the place of a bus and of an object store: whatever only reads a run runs on it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NoReturn

from headway.bus.blobs import MissingBlob
from headway.bus.connection import Bus, StoredMessage
from headway.bus.recording import Recording
from headway.schemas.errors import InputError, UnavailableError
from headway.schemas.ids import check_id
from headway.schemas.subjects import Keys, Subjects


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject fits a NATS pattern with `*` and `>`."""
    given = subject.split(".")
    for place, token in enumerate(wanted := pattern.split(".")):
        if token == ">":
            return len(given) > place
        if place >= len(given) or token not in ("*", given[place]):
            return False
    return len(given) == len(wanted)


def _refuse() -> NoReturn:
    raise UnavailableError("a recording can only be read", hint="`headway replay FILE` gives its streams a server")


class RecordedStore:
    """A BlobStore over the objects of a recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    async def put(self, key: str, data: bytes) -> None:
        _refuse()

    async def delete(self, key: str) -> None:
        _refuse()

    async def get(self, key: str) -> bytes:
        return self._read(key, 0, None)

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        return self._read(key, start, end)

    async def exists(self, key: str) -> bool:
        known = self._recording.contents.objects.get(key)
        return known is not None and known.offsets is not None

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        for key, known in self._recording.contents.objects.items():
            if key.startswith(prefix) and known.offsets is not None:
                yield key, known.size_bytes

    def once(self) -> RecordedStore:
        """Itself: nothing is tried twice."""
        return self

    def _read(self, key: str, start: int, end: int | None) -> bytes:
        if (data := self._recording.object(key, start, end)) is None:
            gone = key in self._recording.contents.objects
            why = "the store no longer had it when it was recorded" if gone else "its selection left it out"
            raise MissingBlob(f"{self._recording.path} does not hold the object {key}", why=why)
        return data


class RecordedBus(Bus):
    """A run as it was recorded. Publishes nothing."""

    def __init__(self, recording: Recording) -> None:
        """Raises InputError when the recording does not name a run."""
        try:
            self.run = check_id(recording.about["run"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{recording.path} names no run", why=repr(error)[:100]) from None
        self.recording, self.store = recording, RecordedStore(recording)
        self.subjects, self.keys = Subjects(self.run), Keys(self.run)

    async def read_batch(self, suffix: str, start_seq: int, filter_subject: str = ">") -> list[StoredMessage]:
        at = start_seq
        while batch := self.recording.batch(suffix, at):
            if found := [message for message in batch if matches(filter_subject, message.subject)]:
                return found
            at = batch[-1].seq + 1
        return []

    async def batches(
        self, suffix: str, start_seq: int, filter_subject: str = ">"
    ) -> AsyncGenerator[list[StoredMessage], None]:
        while batch := await self.read_batch(suffix, start_seq, filter_subject):
            yield batch
            start_seq = batch[-1].seq + 1

    async def read_at(self, suffix: str, seq: int) -> StoredMessage | None:
        return self.recording.at(suffix, seq)

    async def last(self, suffix: str, subject: str = ">") -> StoredMessage | None:
        for run in reversed(self.recording.contents.runs[suffix]):
            for message in reversed(self.recording.messages_of(run)):
                if matches(subject, message.subject):
                    return message
        return None

    async def publish(self, *_: Any, **__: Any) -> int:
        _refuse()

    async def close(self) -> None:
        """Nothing to close: the recording belongs to who opened it."""
