"""A recording: one file that holds streams of a run and the objects they name. See docs/FORMAT.md.

Invariants: the file only grows; what an index covers is whole and checked block by block; what follows the last
index (a writer was killed) is cut off by the next writer and never read; memory is bounded by a block and the index.
"""

from __future__ import annotations

import operator
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgpack
import xxhash
import zstandard

from headway.bus.direct import BATCH_BYTES, BATCH_MESSAGES, StoredMessage
from headway.schemas.errors import InputError, UnavailableError
from headway.schemas.subjects import STREAM_SUFFIXES

FORMAT = 1
START = struct.Struct("<8sI")
MAGIC = b"HEADWAYR"
BLOCK = struct.Struct("<4sIII16s")
BLOCK_MAGIC = b"HWBK"
TRAILER = struct.Struct("<Q8s")
TRAILER_MAGIC = b"HEADWAYI"
ABOUT, MESSAGES, PART, INDEX = 1, 2, 3, 4
MESSAGES_BYTES = 1 << 20
"""A block of messages is closed at this size."""
PART_BYTES = 4 << 20
"""An object travels in parts of this size."""
RAW_BYTES_MAX = 16 << 20
"""No block is decompressed above this size."""
OBJECT_BYTES_MAX = 1 << 40
BLOCKS_CACHED = 8
SUMMED = BLOCK.size - 16


@dataclass(frozen=True, slots=True)
class Run:
    """A block of messages [first_seq, last_seq] of one stream."""

    stream: str
    first_seq: int
    last_seq: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class Object:
    """Where the parts of an object lie; None when it was gone while the recording was made."""

    size_bytes: int
    offsets: tuple[int, ...] | None


@dataclass(slots=True, kw_only=True)
class Contents:
    """What the indexes of a file say."""

    runs: dict[str, list[Run]] = field(default_factory=lambda: {suffix: [] for suffix in STREAM_SUFFIXES})
    objects: dict[str, Object] = field(default_factory=dict)
    cursors: dict[str, int] = field(default_factory=dict)
    """Up to which sequence each stream was read; what lies before and is not here was left out or is gone."""
    whole: bool = False
    """Whether the last pass over the streams was finished, so that what they name in one another is there."""
    end: int = 0
    """The first byte after the last index."""
    index: int = 0
    """Where the last index begins, 0 before there is one."""

    def last_seq(self, stream: str) -> int:
        return self.runs[stream][-1].last_seq if self.runs[stream] else 0

    def add(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if entry[0] == "messages":
                run = Run(*entry[1:])
                if run.stream not in self.runs or not self.last_seq(run.stream) < run.first_seq <= run.last_seq:
                    raise ValueError(f"an index names block {run}")
                self.runs[run.stream].append(run)
            else:
                key, size_bytes, offsets = entry[1:]
                parts = None if offsets is None else tuple(map(operator.index, offsets))
                if not 0 <= size_bytes <= OBJECT_BYTES_MAX or len(parts or ()) != -(-size_bytes // PART_BYTES):
                    raise ValueError(
                        f"an index names {str(key)[:100]!r} of {size_bytes} bytes in {len(parts or ())} parts"
                    )
                self.objects[str(key)] = Object(size_bytes, parts)


class Blocks:
    """Checked blocks of an open file."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name

    def header(self, offset: int) -> tuple[int, int, int, bytes] | None:
        """(kind, stored bytes, raw bytes, checksum) at `offset`; None where no block begins."""
        self._file.seek(offset)
        head = self._file.read(BLOCK.size)
        if len(head) < BLOCK.size:
            return None
        magic, kind, stored_bytes, raw_bytes, expected = BLOCK.unpack(head)
        return (kind, stored_bytes, raw_bytes, expected) if magic == BLOCK_MAGIC else None

    def read(self, offset: int, kind: int) -> Any:
        """The MessagePack value of the block. Raises InputError naming the file and the place."""
        where = f"{self._name}, block at byte {offset}"
        found = self.header(offset)
        if found is None or found[0] != kind or found[2] > RAW_BYTES_MAX or found[1] > 2 * RAW_BYTES_MAX:
            raise InputError(f"{where} is damaged", why="its header is not what the index says", hint=HINT)
        _, stored_bytes, raw_bytes, expected = found
        stored = self._file.read(stored_bytes)
        if len(stored) < stored_bytes or checksum(kind, raw_bytes, stored) != expected:
            raise InputError(f"{where} is damaged", why="its checksum does not match", hint=HINT)
        try:
            if zstandard.frame_content_size(stored) > RAW_BYTES_MAX:  # which would be believed, whatever is asked for
                raise ValueError(f"it unpacks to more than {RAW_BYTES_MAX} bytes")
            raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=RAW_BYTES_MAX)
            return msgpack.unpackb(raw, raw=False, strict_map_key=True)
        except Exception as error:  # both raise many types on hostile bytes
            raise InputError(f"{where} cannot be read", why=repr(error)[:200], hint=HINT) from None

    def contents(self, size_bytes: int) -> Contents:
        """Fold the indexes. Raises InputError."""
        found = Contents(end=self._after_first())
        offset = self._last_index(size_bytes, found.end)
        chain: list[tuple[int, Any]] = []
        try:
            while offset:
                chain.append((offset, self.read(offset, INDEX)))
                before = operator.index(chain[-1][1]["previous"])
                if not 0 <= before < offset:
                    raise ValueError(f"the one at byte {offset} continues byte {before}")
                offset = before
            for _, index in reversed(chain):
                found.add(index["entries"])
                found.cursors = {str(stream): int(seq) for stream, seq in index["cursors"].items()}
                found.whole = bool(index["whole"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{self._name}: an index cannot be read", why=repr(error)[:300], hint=HINT) from None
        if chain:
            found.index = chain[0][0]
            head = self.header(found.index)
            assert head is not None
            found.end = found.index + BLOCK.size + head[1] + TRAILER.size
        return found

    def _after_first(self) -> int:
        head = self.header(START.size)
        if head is None or head[0] != ABOUT:
            raise InputError(f"{self._name} does not say what it records", hint=HINT)
        return START.size + BLOCK.size + head[1]

    def _last_index(self, size_bytes: int, first: int) -> int:
        """Where the last index with a trailer begins; 0 when there is none."""
        if offset := self._trailer(size_bytes - TRAILER.size, first):
            return offset
        last, at = 0, first
        while (head := self.header(at)) is not None and at + BLOCK.size + head[1] <= size_bytes:
            after = at + BLOCK.size + head[1]
            if head[0] == INDEX:
                if self._trailer(after, first) != at:
                    break
                last, after = at, after + TRAILER.size
            at = after
        return last

    def _trailer(self, at: int, first: int) -> int:
        if at < first:
            return 0
        self._file.seek(at)
        data = self._file.read(TRAILER.size)
        if len(data) < TRAILER.size:
            return 0
        offset, magic = TRAILER.unpack(data)
        return int(offset) if magic == TRAILER_MAGIC and first <= offset < at else 0


HINT = "restore the file from a copy, or record the run again"


def checksum(kind: int, raw_bytes: int, stored: bytes) -> bytes:
    """Of a block: over its header before the checksum, and its stored bytes."""
    digest = xxhash.xxh3_128(BLOCK.pack(BLOCK_MAGIC, kind, len(stored), raw_bytes, b"")[:SUMMED])
    digest.update(stored)
    return digest.digest()


class Recording:
    """A recording to read from. Use as a context manager; `about` is what its writer said of it."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for a file that is none, UnavailableError when it cannot be opened."""
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UnavailableError(f"cannot read {path}", why=str(error.strerror)) from None
        try:
            check_start(self._file, path)
            self._blocks = Blocks(self._file, str(path))
            self.about: dict[str, Any] = self._blocks.read(START.size, ABOUT)
            if not isinstance(self.about, dict):
                raise InputError(f"{path} does not say what it records", hint=HINT)
            self.contents = self._blocks.contents(os.fstat(self._file.fileno()).st_size)
        except BaseException:
            self._file.close()
            raise
        self._cached: dict[int, list[StoredMessage]] = {}

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Whether the file begins like a recording."""
        try:
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except OSError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def batch(self, stream: str, start_seq: int) -> list[StoredMessage]:
        """Messages of `stream` from `start_seq` on, in order; empty at the end. Raises InputError."""
        found: list[StoredMessage] = []
        size_bytes = 0
        for run in self._runs_from(stream, start_seq):
            for message in self.messages_of(run):
                if message.seq < start_seq:
                    continue
                if len(found) == BATCH_MESSAGES or (found and size_bytes + len(message.body) > BATCH_BYTES):
                    return found
                found.append(message)
                size_bytes += len(message.body)
        return found

    def at(self, stream: str, seq: int) -> StoredMessage | None:
        """The message at exactly `seq`. Raises InputError."""
        for run in self._runs_from(stream, seq):
            return next((message for message in self.messages_of(run) if message.seq == seq), None)
        return None

    def object(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Bytes [start, end) of an object, None when the recording does not hold it. Raises InputError."""
        known = self.contents.objects.get(key)
        if known is None or known.offsets is None:
            return None
        end = known.size_bytes if end is None else min(end, known.size_bytes)
        first, last = start // PART_BYTES, -(-end // PART_BYTES)
        parts = b"".join(self._part(key, number, known.offsets[number]) for number in range(first, last))
        return parts[start - first * PART_BYTES : end - first * PART_BYTES]

    def verify(self) -> int:
        """Read and check every block; how many there are. Raises InputError for the first that is damaged."""
        offsets = [(run.offset, MESSAGES) for runs in self.contents.runs.values() for run in runs]
        offsets += [(at, PART) for known in self.contents.objects.values() for at in known.offsets or ()]
        for offset, kind in sorted(offsets):
            self._blocks.read(offset, kind)
        return len(offsets)

    def _runs_from(self, stream: str, seq: int) -> Iterator[Run]:
        runs = self.contents.runs[stream]
        low, high = 0, len(runs)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if runs[middle].last_seq < seq else (low, middle)
        yield from runs[low:]

    def messages_of(self, run: Run) -> list[StoredMessage]:
        """The messages of one block. Raises InputError."""
        if run.offset not in self._cached:
            value = self._blocks.read(run.offset, MESSAGES)
            try:
                found = [
                    StoredMessage(str(s), operator.index(n), dict(h), _bytes(b), us / 1e6)
                    for n, s, us, h, b in value["messages"]
                ]
                seqs = [message.seq for message in found]
                if value["stream"] != run.stream or seqs != sorted(set(seqs)) or len(seqs) != run.count:
                    raise ValueError(f"it holds {len(seqs)} messages of {value['stream']}")
            except (KeyError, TypeError, ValueError) as error:
                where = f"{self.path}, block at byte {run.offset} is not what the index says"
                raise InputError(where, why=repr(error)[:200], hint=HINT) from None
            while len(self._cached) >= BLOCKS_CACHED:
                del self._cached[next(iter(self._cached))]
            self._cached[run.offset] = found
        return self._cached[run.offset]

    def _part(self, key: str, number: int, offset: int) -> bytes:
        value = self._blocks.read(offset, PART)
        try:
            if (value["key"], value["part"]) == (key, number):
                return _bytes(value["data"])
        except (KeyError, TypeError):
            pass
        raise InputError(f"{self.path}, block at byte {offset} is no part {number} of {key}", hint=HINT)


def _bytes(value: Any) -> bytes:
    """`bytes(n)` would be n zeros. Raises TypeError."""
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} where bytes are due")
    return value


def check_start(file: BinaryIO, path: Path) -> None:
    """Raises InputError unless the file begins like a recording that this build reads."""
    head = file.read(START.size)
    magic, number = START.unpack(head) if len(head) == START.size else (b"", 0)
    if magic != MAGIC:
        raise InputError(f"{path} is no recording", hint="`headway record` makes one")
    if number != FORMAT:
        raise InputError(f"{path} is a recording of format {number}", why=f"this build reads {FORMAT}")
