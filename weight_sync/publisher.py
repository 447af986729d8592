"""The trainer's side: a version becomes shards, then a manifest; nothing is visible before the manifest.

Publishing the same version from the same bytes gives the same objects (with the same zstd build), so a
trainer that crashed anywhere in between publishes again and the store ignores what it has.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headway.bus.blobs import BlobStore
from headway.schemas.manifest import DTYPE_BYTES, Manifest, Part, ShardRef, TensorEntry, root_of, seal_manifest
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.schemas.wire import digest_of
from headway.weight_sync.codec import changes_in, encode_chunk
from headway.weight_sync.shard import EncodedChunk, build_shards, chunk_ranges, element_width
from headway.weight_sync.tensors import RawTensor, table_of, with_aliases
from headway.weight_sync.transfer import for_each

Kind = Literal["anchor", "delta"]
Job = tuple[int, RawTensor, RawTensor | None]
"""Row in the table, new bytes, the parent's bytes."""
ENCODES_AHEAD_MAX = 64
"""Chunks handed to the threads beyond the one the shard builder waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    chunk_bytes: int = 1 << 20
    shard_bytes: int = 16 << 20
    anchor_every: int = 16
    """A version n divisible by it also gets a full anchor."""
    parallel_puts: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version in the store. It is the base of the next; `tensors` must not change any more.

    `changed_elements` of its parent's differ, all of them without one; it is told whoever sealed it.
    """

    version: Version
    digest: str
    manifest: Manifest
    tensors: Mapping[str, RawTensor]
    changed_elements: int = 0

    @property
    def changed_fraction(self) -> float:
        return self.changed_elements / max(_elements(self.manifest.tensors), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishStats:
    """`full_bytes` are the raw bytes of the model; `encode_ms` is wall time of encoding and uploading shards."""

    changed_fraction: float
    delta_bytes: int
    anchor_bytes: int
    full_bytes: int
    encode_ms: float


@dataclass(slots=True, kw_only=True)
class Publisher:
    """Puts versions into the store. `pool` encodes chunks in threads (numpy and zstd let go of the GIL)."""

    store: BlobStore
    keys: Keys
    private_key: bytes
    settings: PublishSettings = PublishSettings()
    pool: Executor | None = None
    clock: Callable[[], float] = time.perf_counter

    async def publish(
        self,
        version: Version,
        tensors: Mapping[str, RawTensor],
        parent: Published | None,
        aliases: Mapping[str, str] | None = None,
    ) -> tuple[Published, PublishStats]:
        """Put `version`: shards first, the manifest last. Idempotent.

        `tensors` are the new weights in the rollout's dtypes; `aliases` names tied ones (tied -> owner).
        Raises ValueError when names, dtypes or shapes differ from the parent's, UnavailableError when the
        store does not take the objects.
        """
        started = self.clock()
        own = {name: raw for name, raw in tensors.items() if name not in (aliases or {})}
        names = sorted({*tensors, *(aliases or {})})
        part = await self.put_part(version, own, parent, names)
        encode_ms = (self.clock() - started) * 1e3
        published = await self.seal(version, [part], tensors, parent, names, aliases)
        manifest = published.manifest
        stats = PublishStats(
            changed_fraction=published.changed_fraction,
            delta_bytes=manifest.size_bytes("delta"),
            anchor_bytes=manifest.size_bytes("anchor"),
            full_bytes=sum(entry.nbytes for entry in part.tensors),
            encode_ms=encode_ms,
        )
        return published, stats

    async def put_part(
        self, version: Version, tensors: Mapping[str, RawTensor], parent: Published | None, names: Sequence[str]
    ) -> Part:
        """Put the shards of `tensors`, one rank's share of a version whose names, tied ones too, are `names`, sorted.

        Tensors are compared, encoded and uploaded side by side, in bounded memory. `parent.tensors` need hold
        no more than the share. Raises as `publish` does.
        """
        table = await asyncio.to_thread(table_of, tensors)
        rows = {name: row for row, name in enumerate(names)}
        tally, shards = _Tally(), list[ShardRef]()
        if parent is not None:
            before = {entry.name: entry for entry in parent.manifest.tensors}
            if list(before) != list(names) or not all(entry.same_layout(before[entry.name]) for entry in table):
                raise ValueError(f"tensors differ in name, dtype, shape or tie from those of {parent.version}")
            changed = [entry.name for entry in table if entry.xxh3 != before[entry.name].xxh3]
            jobs = [(rows[name], tensors[name], parent.tensors[name]) for name in changed]
            shards += await self._put_shards("delta", jobs, tally)
        if parent is None or version.n % self.settings.anchor_every == 0:
            whole = [(rows[entry.name], tensors[entry.name], None) for entry in table]
            shards += await self._put_shards("anchor", whole, tally)
        return Part(tensors=table, shards=tuple(shards), changed_elements=tally.changed_elements)

    async def seal(
        self,
        version: Version,
        parts: Sequence[Part],
        tensors: Mapping[str, RawTensor],
        parent: Published | None,
        names: Sequence[str],
        aliases: Mapping[str, str] | None = None,
    ) -> Published:
        """Put the manifest of the version whose shares are `parts`: every rank's, or there is no such version.

        `tensors`, the caller's own share, is kept as the base of its next one. Raises ValueError when the parts
        and `aliases` are not exactly `names`, each once, in the parent's layout.
        """
        rows = [entry for part in parts for entry in part.tensors]
        if sorted([entry.name for entry in rows] + list(aliases or {})) != list(names):
            raise ValueError(f"the parts of {version} are not its {len(names)} tensors, each once")
        table = with_aliases({entry.name: entry for entry in rows}, aliases)
        before = table if parent is None else parent.manifest.tensors
        if len(before) != len(table) or not all(new.same_layout(old) for new, old in zip(table, before, strict=True)):
            raise ValueError(f"tensors differ in name, dtype, shape or tie from those of {parent and parent.version}")
        manifest = Manifest(
            version=version,
            root=root_of(table),
            parent=parent.version if parent else None,
            parent_root=parent.manifest.root if parent else None,
            parent_manifest=parent.digest if parent else None,
            tensors=table,
            shards=tuple(shard for part in parts for shard in part.shards),
        )
        digest, sealed = seal_manifest(manifest, self.private_key)
        await self.store.put(self.keys.manifest(digest), sealed)
        changed = sum(part.changed_elements for part in parts) if parent else _elements(table)
        return Published(version=version, digest=digest, manifest=manifest, tensors=tensors, changed_elements=changed)

    async def _put_shards(self, kind: Kind, jobs: Iterable[Job], tally: _Tally) -> list[ShardRef]:
        refs: list[ShardRef] = []

        def named() -> Iterator[tuple[str, bytes]]:
            for data in build_shards(self._encode(jobs, tally), self.settings.shard_bytes):
                digest = digest_of(data)
                refs.append(ShardRef(sha256=digest, size_bytes=len(data), kind=kind))
                yield self.keys.shard(digest), data

        async def put(item: tuple[str, bytes]) -> None:
            await self.store.put(*item)

        await for_each(named(), put, self.settings.parallel_puts)
        return refs

    def _encode(self, jobs: Iterable[Job], tally: _Tally) -> Iterator[EncodedChunk]:
        """Chunks in table order, whatever the threads do."""
        parts = (
            (row, new, old, start, end)
            for row, new, old in jobs
            for start, end in chunk_ranges(new.shape, DTYPE_BYTES[new.dtype], self.settings.chunk_bytes)
        )
        if self.pool is None:
            for part in parts:
                yield tally.took(_encode_part(*part))
            return
        ahead: deque[Future[tuple[EncodedChunk, int]]] = deque()
        for part in parts:
            ahead.append(self.pool.submit(_encode_part, *part))
            if len(ahead) > ENCODES_AHEAD_MAX:
                yield tally.took(ahead.popleft().result())
        while ahead:
            yield tally.took(ahead.popleft().result())


def _elements(table: Iterable[TensorEntry]) -> int:
    return sum(math.prod(entry.shape) for entry in table if entry.alias is None)


@dataclass(slots=True)
class _Tally:
    changed_elements: int = 0

    def took(self, found: tuple[EncodedChunk, int]) -> EncodedChunk:
        self.changed_elements += found[1]
        return found[0]


def _encode_part(row: int, new: RawTensor, old: RawTensor | None, start: int, end: int) -> tuple[EncodedChunk, int]:
    """The chunk, and how many of its elements differ from the base's (0 without one)."""
    width = element_width(new.dtype)
    fresh, base = new.data[start:end], None if old is None else old.data[start:end]
    encoding, payload = encode_chunk(fresh, base, width)
    chunk = EncodedChunk(
        row=row,
        raw_offset=start,
        raw_bytes=end - start,
        encoding=int(encoding),
        width=width,
        payload=payload,
    )
    if base is None:
        return chunk, 0
    itemsize = DTYPE_BYTES[new.dtype]
    counted = changes_in(encoding, payload) if itemsize == width else None
    if counted is None:
        counted = int(np.count_nonzero(fresh.view(f"<u{itemsize}") != base.view(f"<u{itemsize}")))
    return chunk, counted
