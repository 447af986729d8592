"""Writes a run's streams, and the objects they name, into a recording: once, or following it.

Invariant of a pass: what derives from the ledger is read first, then the ledger, then ROLLOUTS, then TASKS, so that
whatever one names lies in the other as recorded. A pass that was cut off is not `whole`; the next one goes on
from the cursors in the file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from headway.bus.blobs import MissingBlob
from headway.bus.connection import Bus, StoredMessage
from headway.bus.ledger import LedgerReader, Link
from headway.bus.reader import read_all
from headway.bus.recorded import RecordedBus
from headway.bus.recording import PART_BYTES
from headway.bus.recording_writer import RecordingWriter
from headway.schemas.errors import InputError, WireError
from headway.schemas.ledger import Drops, Fork, Genesis, Step
from headway.schemas.manifest import open_manifest
from headway.schemas.messages import H_ROLLOUT
from headway.schemas.version import Version
from headway.schemas.wire import BODY_BYTES_MAX, H_CLAIM, H_KIND, H_VERSION, Claim, unpack

Policy = Literal["none", "anchors", "all"]
DERIVED, NAMED = ("WEIGHTS", "STAMPS", "EVENTS"), ("LEDGER", "ROLLOUTS", "TASKS")
"""What derives from the ledger is read before its end is looked up; what it refers to afterwards, it first."""
ANCHOR_STEPS = 10
"""With `anchors`, a checkpoint is taken when the last one taken is so many steps back."""
COMMIT_MESSAGES = 2000
"""A pass becomes durable at least this often."""
POLL_S = 0.5
log = structlog.get_logger()


def file_key(run: str, name: str) -> str:
    """The key under which a recording holds a file of the run folder."""
    return f"{run}/files/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What of a run to record. The ledger is always taken whole: nothing can be trusted without it.

    `steps` are a first and a last n: the rollouts that those steps settle, their tasks and stamps, the versions
    they made. `kinds` are kinds of message; without `weights`, no shards are taken either.
    """

    since_s: float | None = None
    until_s: float | None = None
    steps: tuple[int, int] | None = None
    kinds: tuple[str, ...] = ()
    checkpoints: Policy = "anchors"

    @property
    def partial(self) -> bool:
        return bool(self.since_s or self.until_s or self.steps or self.kinds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "since_s": self.since_s,
            "until_s": self.until_s,
            "steps": list(self.steps) if self.steps else None,
            "kinds": sorted(self.kinds),
            "checkpoints": self.checkpoints,
        }

    def wants(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds

    def has_step(self, n: int) -> bool:
        return self.steps is None or self.steps[0] <= n <= self.steps[1]


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Fills `writer` from `bus`. `taken` counts messages and objects."""

    bus: Bus
    writer: RecordingWriter
    selection: Selection
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Of the run folder: what a replay needs that is on no stream."""
    taken: dict[str, int] = field(default_factory=lambda: {"messages": 0, "objects": 0, "bytes": 0, "gone": 0})
    head: Version = field(default_factory=lambda: Version(0, 0))
    _settled: set[str] = field(default_factory=set)
    _reader: LedgerReader | None = None
    _key: bytes = b""
    _anchor: int | None = None
    _checkpoints: dict[str, int] = field(default_factory=dict)
    """Those that the store holds, and their sizes."""
    _steps: int = 0

    async def catch_up(self) -> None:
        """One pass over the streams, up to their present ends. Raises UnavailableError, PromiseViolated."""
        if self.selection.steps:
            await self._take_links()
            if self.head.n < self.selection.steps[1]:
                return  # which rollouts belong to them is known when the last of them is committed
        for suffix in DERIVED:
            await self._take_stream(suffix)
        await self._take_links()
        for suffix in NAMED:
            await self._take_stream(suffix)
        self._take_files()
        self.writer.commit(whole=True)

    async def _take_stream(self, suffix: str) -> None:
        async for stored in read_all(self.bus, suffix, self.writer.cursor(suffix) + 1):
            if suffix == "LEDGER" and self._reader is not None and stored.seq > self._reader.tail.seq:
                return  # the objects that it names are the next pass's
            await self._take(suffix, stored)

    async def follow(self, stop: asyncio.Event) -> None:
        """Pass after pass until `stop`, the end of the selection, or the end of the run."""
        while not stop.is_set():
            await self.catch_up()
            if await self._finished():
                await self.catch_up()
                return
            try:
                await asyncio.wait_for(stop.wait(), POLL_S)
            except TimeoutError:
                continue

    async def _finished(self) -> bool:
        chosen = self.selection
        if (chosen.steps and self.head.n >= chosen.steps[1]) or time.time() > (chosen.until_s or float("inf")):
            return True
        finished = self.bus.subjects.event("dispatcher", "run_finished")
        return self.head.n >= self._steps and await self.bus.last("EVENTS", finished) is not None

    async def _take_links(self) -> None:
        """The objects that new ledger records name, before anybody deletes them."""
        assert self.bus.store is not None
        self._reader = self._reader or LedgerReader(self.bus)
        self._checkpoints = {key: size async for key, size in self.bus.store.list(f"{self.bus.run}/ckpt")}
        async for link in self._reader.links():
            body = link.record.body
            if isinstance(body, Genesis):
                self._key, self._steps = body.trainer_key, int(body.config["run"]["steps"])
            if isinstance(body, Genesis | Step | Fork):
                self.head = link.version
                await self._take_version(link)
            if isinstance(body, Step) and self.selection.has_step(body.version.n):
                self._settled |= {one.rollout_id for one in body.consumed} | {one.rollout_id for one in body.drops}
            if isinstance(body, Drops) and self.selection.has_step(link.version.n + 1):
                self._settled |= {one.rollout_id for one in body.drops}

    async def _take_version(self, link: Link) -> None:
        body, n, keys = link.record.body, link.version.n, self.bus.keys
        if self.selection.steps and not self.selection.steps[0] - 1 <= n <= self.selection.steps[1]:
            return
        digest = body.base_manifest if isinstance(body, Genesis) else body.manifest  # type: ignore[union-attr]
        await self._take_object(keys.manifest(digest))
        if self.selection.wants("weights"):
            await self._take_shards(digest)
        checkpoint = body.checkpoint if isinstance(body, Step) else None
        due = self.selection.checkpoints == "all" or self._anchor is None or n >= self._anchor + ANCHOR_STEPS
        if checkpoint is None or self.selection.checkpoints == "none" or not due:
            return
        key = keys.checkpoint(checkpoint)
        size_bytes = self._checkpoints.get(key)
        if self.writer.has(key) or (size_bytes and await self._take_object(key, size_bytes, note_absence=False)):
            self._anchor = n

    async def _take_shards(self, digest: str) -> None:
        assert self.bus.store is not None
        try:
            manifest = open_manifest(await self.bus.store.get(self.bus.keys.manifest(digest)), digest, self._key)
        except (MissingBlob, WireError) as error:
            log.warning("manifest_not_recorded", digest=digest, why=error.what)
            return
        for shard in manifest.shards:
            await self._take_object(self.bus.keys.shard(shard.sha256), shard.size_bytes)

    async def _take_object(self, key: str, size_bytes: int | None = None, *, note_absence: bool = True) -> bool:
        """Copy an object, in parts where its size is known; whether it is in the recording now."""
        if self.writer.has(key):
            return self.writer.contents.objects[key].offsets is not None
        offsets, at = list[int](), 0
        try:
            async for part in self._parts(key, size_bytes):
                offsets.append(self.writer.add_part(key, len(offsets), part))
                at += len(part)
        except MissingBlob:
            if note_absence:
                self.writer.add_absent(key)
                self.taken["gone"] += 1
            return False
        self.writer.add_object(key, at, offsets)
        self.taken["objects"] += 1
        self.taken["bytes"] += at
        return True

    async def _parts(self, key: str, size_bytes: int | None) -> AsyncIterator[bytes]:
        store = self.bus.store
        assert store is not None
        if size_bytes is None:
            whole = await store.get(key)
            for at in range(0, len(whole), PART_BYTES):
                yield whole[at : at + PART_BYTES]
            return
        for at in range(0, size_bytes, PART_BYTES):
            if not (part := await store.get_range(key, at, min(at + PART_BYTES, size_bytes))):
                return  # whoever named its size was wrong
            yield part

    async def _take(self, suffix: str, stored: StoredMessage) -> None:
        if suffix != "LEDGER" and not self._admits(suffix, stored):
            self.writer.leave_out(suffix, stored)
            return
        if H_CLAIM in stored.headers:
            await self._take_body(stored)
        self.writer.add(suffix, stored)
        self.taken["messages"] += 1
        if self.taken["messages"] % COMMIT_MESSAGES == 0:
            self.writer.commit(whole=False)

    async def _take_body(self, stored: StoredMessage) -> None:
        try:
            claim = unpack(Claim, stored.body)
        except WireError:
            return  # what cannot be opened is recorded as it is
        if claim.key == self.bus.keys.blob(claim.sha256) and claim.size_bytes <= BODY_BYTES_MAX:
            await self._take_object(claim.key, claim.size_bytes)

    def _admits(self, suffix: str, stored: StoredMessage) -> bool:
        chosen = self.selection
        if (chosen.since_s or 0.0) > stored.time_s or stored.time_s > (chosen.until_s or stored.time_s):
            return False
        if not chosen.wants(stored.headers.get(H_KIND, "")):
            return False
        if chosen.steps is None:
            return True
        if suffix in ("TASKS", "ROLLOUTS", "STAMPS"):
            return stored.headers.get(H_ROLLOUT, "") in self._settled
        try:
            n = Version.parse(stored.headers.get(H_VERSION, "")).n
        except ValueError:
            return suffix == "EVENTS"
        return chosen.steps[0] - 1 <= n <= chosen.steps[1]

    def _take_files(self) -> None:
        for name, data in self.files.items():
            key, parts = file_key(self.bus.run, name), range(0, len(data), PART_BYTES)
            if not self.writer.has(key):
                offsets = [self.writer.add_part(key, at // PART_BYTES, data[at : at + PART_BYTES]) for at in parts]
                self.writer.add_object(key, len(data), offsets)


def about(run: str, selection: Selection) -> dict[str, Any]:
    """What a recording says of itself."""
    return {"run": run, "selection": selection.as_dict()}


def require_whole(bus: Bus) -> None:
    """Raises InputError for a recording that does not hold everything of its run up to some moment."""
    if not isinstance(bus, RecordedBus):
        return
    recording = bus.recording
    selection = recording.about.get("selection", {})
    left_out = sorted(key for key in ("since_s", "until_s", "steps", "kinds") if selection.get(key))
    if left_out:
        raise InputError(f"{recording.path} holds only a part of its run", why=f"it was made with {left_out}")
    if not recording.contents.whole:
        raise InputError(f"{recording.path} was cut off", hint="`headway record` with the same options goes on with it")
