"""Appends to a recording; see `headway.bus.recording` for what a file is."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgpack
import zstandard

from headway.bus.direct import StoredMessage
from headway.bus.failpoints import failpoint
from headway.bus.recording import (
    ABOUT,
    BLOCK,
    BLOCK_MAGIC,
    FORMAT,
    INDEX,
    MAGIC,
    MESSAGES,
    MESSAGES_BYTES,
    PART,
    RAW_BYTES_MAX,
    START,
    TRAILER,
    TRAILER_MAGIC,
    Blocks,
    Contents,
    check_start,
    checksum,
)
from headway.schemas.errors import InputError, UnavailableError

ZSTD_LEVEL = 3
MESSAGE_OVERHEAD_BYTES = 256


class RecordingWriter:
    """Appends to a recording, a new one or one that exists. Use as a context manager."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """Raises InputError when `path` holds something else or was made with another `about`."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        try:
            self._lock()
            self._blocks = Blocks(self._file, str(path))
            self.contents = self._begin(about)
        except BaseException:
            self._file.close()
            raise
        self._open: dict[str, list[StoredMessage]] = {}
        self._open_bytes: dict[str, int] = {}
        self._entries: list[list[Any]] = []
        self._dirty = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UnavailableError(f"{self.path} is being written by another process") from None

    def _begin(self, about: dict[str, Any]) -> Contents:
        size_bytes = os.fstat(self._file.fileno()).st_size
        if size_bytes == 0:
            self._file.write(START.pack(MAGIC, FORMAT))
            self._put(ABOUT, about)
            return Contents(end=self._file.tell())
        check_start(self._file, self.path)
        before = self._blocks.read(START.size, ABOUT)
        if before != about:
            changed = sorted(key for key in before.keys() | about.keys() if before.get(key) != about.get(key))
            raise InputError(
                f"{self.path} was recorded with another {changed[0]}",
                why=f"{before.get(changed[0])!r}, now {about.get(changed[0])!r}",
                hint="the same options go on with it; or --out another file",
            )
        found = self._blocks.contents(size_bytes)
        self._file.truncate(found.end)
        return found

    def cursor(self, stream: str) -> int:
        """The sequence up to which the stream was read."""
        return self.contents.cursors.get(stream, 0)

    def leave_out(self, stream: str, message: StoredMessage) -> None:
        """Pass the stream's next message. Raises ValueError when it goes back."""
        if message.seq <= self.cursor(stream):
            raise ValueError(f"{stream} {message.seq} after {self.cursor(stream)}")
        self.contents.cursors[stream] = message.seq
        self._dirty = True

    def add(self, stream: str, message: StoredMessage) -> None:
        """Take the stream's next message. Raises ValueError when it goes back."""
        self.leave_out(stream, message)
        self._open.setdefault(stream, []).append(message)
        size_bytes = self._open_bytes.get(stream, 0) + len(message.body) + MESSAGE_OVERHEAD_BYTES
        self._open_bytes[stream] = size_bytes
        if size_bytes >= MESSAGES_BYTES:
            self._close_messages(stream)

    def has(self, key: str) -> bool:
        """Whether the object was recorded, or found to be gone."""
        return key in self.contents.objects

    def add_part(self, key: str, number: int, data: bytes) -> int:
        """Take part `number` of an object, PART_BYTES long unless it is the last; where it lies."""
        return self._append(PART, {"key": key, "part": number, "data": data})

    def add_object(self, key: str, size_bytes: int, offsets: Sequence[int]) -> None:
        """The object's parts are all taken: they lie at `offsets`."""
        self._note("object", key, size_bytes, list(offsets))

    def add_absent(self, key: str) -> None:
        """Record that the store no longer had the object."""
        self._note("object", key, 0, None)

    def commit(self, *, whole: bool) -> None:
        """Make everything taken so far durable and readable."""
        for stream in list(self._open):
            self._close_messages(stream)
        if not self._dirty and whole == self.contents.whole and self.contents.index:
            return
        contents = self.contents
        index = {
            "previous": contents.index,
            "entries": self._entries,
            "cursors": contents.cursors,
            "whole": whole,
        }
        offset = self._append(INDEX, index)
        self._file.write(TRAILER.pack(offset, TRAILER_MAGIC))
        self._file.flush()
        failpoint("recording.fsync.before")
        os.fsync(self._file.fileno())
        failpoint("recording.fsync.after")
        contents.index, contents.whole, contents.end = offset, whole, self._file.tell()
        self._entries, self._dirty = [], False

    def _close_messages(self, stream: str) -> None:
        messages, self._open_bytes[stream] = self._open.pop(stream), 0
        rows = [[m.seq, m.subject, round(m.time_s * 1e6), m.headers, m.body] for m in messages]
        offset = self._append(MESSAGES, {"stream": stream, "messages": rows})
        self._note("messages", stream, messages[0].seq, messages[-1].seq, len(messages), offset)

    def _note(self, *entry: Any) -> None:
        self._entries.append(list(entry))
        self._dirty = True
        self.contents.add([entry])

    def _append(self, kind: int, value: Any) -> int:
        self._file.seek(0, os.SEEK_END)
        offset = self._file.tell()
        self._put(kind, value)
        return offset

    def _put(self, kind: int, value: Any) -> None:
        raw = msgpack.packb(value, use_bin_type=True)
        if len(raw) > RAW_BYTES_MAX:
            raise ValueError(f"a block of {len(raw)} bytes")
        stored = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)
        self._file.write(BLOCK.pack(BLOCK_MAGIC, kind, len(stored), len(raw), checksum(kind, len(raw), stored)))
        self._file.write(stored)
