"""An agent's side: from the version its mirror holds to the target, verified before anything is written.

Order of checks: manifest digest and signature; lineage (parent version and root) and layout of every
version on the way, before a shard is asked for; SHA-256 of a shard's bytes before decoding; XXH3-128 of
each new tensor after every hop; the root of the whole at the end. The mirror is only read. One delta is kept as
the places and values that it holds; on longer ways the tensors that change are made whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from headway.bus.blobs import MissingBlob
from headway.schemas.errors import PromiseViolated, UnavailableError, WireError
from headway.schemas.manifest import Manifest, ShardRef, TensorEntry, open_manifest, root_of
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.weight_sync.codec import FAST_FROM_BYTES, U8, warm_up
from headway.weight_sync.layouts import Layout
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.patch import Part, Patch, checksum_after, join
from headway.weight_sync.shard import Chunk, check_coverage, decode_shard, element_width, patch_shard
from headway.weight_sync.staged import FetchStats, StagedUpdate
from headway.weight_sync.tensors import checksum
from headway.weight_sync.transfer import Downloader, Relay, Retrier, Source, Tally, checked, for_each

T = TypeVar("T")
CHAIN_VERSIONS_MAX = 512
"""How far back a route is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Versions to apply in order; the first from its anchor when `from_anchor`, all others from deltas."""

    manifests: tuple[Manifest, ...]
    from_anchor: bool
    wire_bytes: int


@dataclass(slots=True)
class _Progress(Tally):
    """Counts of one `stage`."""

    fetch_ms: float = 0.0


@dataclass(slots=True, kw_only=True)
class Fetcher:
    """`store` is the origin, trying once a call; `relay`, where there is one, is asked before it."""

    store: Source
    keys: Keys
    public_key: bytes
    retrier: Retrier
    relay: Relay | None = None
    layout: Layout | None = None
    """Of the model that is served; a version of another one is refused before a shard is asked for."""
    clock: Callable[[], float] = time.perf_counter
    _downloader: Downloader = field(init=False)

    def __post_init__(self) -> None:
        self._downloader = Downloader(origin=self.store, relay=self.relay, retrier=self.retrier)

    async def manifest(self, digest: str) -> Manifest:
        """The verified manifest of that digest. Raises WireError, UnavailableError."""
        return (await self._manifest(digest))[0]

    async def stage(self, version: Version, digest: str, mirror: HostMirror) -> StagedUpdate:
        """Fetch, decode and verify `version`, whose manifest the ledger binds to `digest`.

        Raises WireError(digest_mismatch | bad_signature | wrong_version | wrong_parent | layout_changed |
        bad_shard | bad_chunk | wrong_state) naming the object, and UnavailableError when objects are
        missing or no anchor is in reach. The mirror is unchanged either way.
        """
        started, progress = self.clock(), _Progress()
        target, sealed = await self._manifest(digest)
        if target.version != version:
            raise WireError("wrong_version", f"manifest {digest[:16]}… is of {target.version}, not of {version}")
        if self.layout is not None:
            self.layout.check(target.tensors)
        head = mirror.head
        route = await self.route(digest, target, mirror.digest)
        for other in (*route.manifests, *([head] if head is not None else [])):
            _check_layout(other, target)
        if len(route.manifests) == 1 and not route.from_anchor and head is not None:
            patches = await self._patches(target, head.tensors, mirror.tensors, progress)
        else:
            patches = await self._hops(route, head, mirror.tensors, progress)
        if head is None:
            await asyncio.to_thread(_warm_up, target)
        return StagedUpdate(
            manifest=target,
            digest=digest,
            sealed=sealed,
            base_root=head.root if head is not None else None,
            patches=patches,
            stats=FetchStats(
                fetched_bytes=progress.fetched_bytes,
                fetch_ms=progress.fetch_ms,
                stage_ms=(self.clock() - started) * 1e3,
                hops=len(route.manifests),
                refetches=progress.refetches,
                from_anchor=route.from_anchor,
            ),
        )

    async def route(self, digest: str, target: Manifest, have: str | None) -> Route:
        """The cheapest way, in shard bytes, to `target` from the version whose manifest is `have` or an anchor.

        Walks back over parents, checking each one's version and root against its child.
        """
        best: Route | None = None
        newer: list[Manifest] = []
        deltas, current = 0, target
        while len(newer) < CHAIN_VERSIONS_MAX:
            if digest == have:
                return Route(manifests=tuple(reversed(newer)), from_anchor=False, wire_bytes=deltas)
            cost = deltas + current.size_bytes("anchor")
            if current.has_anchor and (best is None or cost < best.wire_bytes):
                path = (current, *reversed(newer))
                best = Route(manifests=path, from_anchor=True, wire_bytes=cost)
            newer.append(current)
            deltas += current.size_bytes("delta")
            if current.parent_manifest is None or (best is not None and (have is None or deltas >= best.wire_bytes)):
                break
            digest, child = current.parent_manifest, current
            try:
                current = await self.manifest(digest)
            except MissingBlob:
                if best is None:
                    raise
                break  # swept: nobody who is heard needs a way from further back
            if (current.version, current.root) != (child.parent, child.parent_root):
                raise WireError(
                    "wrong_parent",
                    f"{child.version} names {child.parent} as its parent with another root or version",
                    why=f"manifest {digest[:16]}… is of {current.version}, root {current.root[:16]}…",
                )
        if best is None:
            raise UnavailableError(
                f"no way from {have or 'nothing'} to {target.version}",
                why=f"no anchor among the last {len(newer)} versions",
                hint="publish an anchor, or keep anchors longer",
            )
        return best

    async def _manifest(self, digest: str) -> tuple[Manifest, bytes]:
        def check(sealed: bytes) -> tuple[Manifest, bytes]:
            return open_manifest(sealed, digest, self.public_key), sealed

        return await self._downloader.get(self.keys.manifest(digest), check)

    async def _hop(
        self,
        manifest: Manifest,
        before: tuple[TensorEntry, ...],
        base: Mapping[str, U8] | None,
        progress: _Progress,
    ) -> dict[str, U8]:
        """The new bytes of the tensors that `manifest` changes against the table `before`; it changes the base."""
        rows, changed = list(manifest.tensors), _changed(manifest, None if base is None else before)
        out: dict[str, U8] = {entry.name: np.empty(entry.nbytes, np.uint8) for entry in changed}
        chunks: list[Chunk] = []

        def decode(data: bytes) -> list[Chunk]:
            return decode_shard(data, rows, base, out)

        await self._shards(manifest.shard_refs("anchor" if base is None else "delta"), decode, chunks.extend, progress)
        _require_whole(chunks, manifest, changed)
        await asyncio.to_thread(_check_state, manifest.version, changed, lambda entry: checksum(out[entry.name]))
        return out

    async def _hops(
        self, route: Route, head: Manifest | None, known: Mapping[str, U8], progress: _Progress
    ) -> dict[str, Patch]:
        """What the whole of `route` changes of `known`, the tensors of `head`."""
        overlay: dict[str, U8] = {}
        table = head.tensors if head is not None and not route.from_anchor else ()
        for number, manifest in enumerate(route.manifests):
            anchor = route.from_anchor and number == 0
            overlay |= await self._hop(manifest, table, None if anchor else {**known, **overlay}, progress)
            table = manifest.tensors
        target = route.manifests[-1] if route.manifests else head
        assert target is not None
        if root_of(table) != target.root:
            raise PromiseViolated(f"the route to {target.version} ends at another root", why="a bug in the fetcher")
        differ = {entry.name for entry in _changed(target, head.tensors if head is not None else None)}
        return {name: Patch.whole(raw) for name, raw in overlay.items() if name in differ}

    async def _patches(
        self, manifest: Manifest, before: tuple[TensorEntry, ...], base: Mapping[str, U8], progress: _Progress
    ) -> dict[str, Patch]:
        """What one delta changes of `base`, in as much memory as it takes; the new bytes are hashed and not kept."""
        rows, changed = list(manifest.tensors), _changed(manifest, before)
        names = {entry.name for entry in changed}
        chunks, parts, sums = list[Chunk](), list[tuple[int, Part]](), dict[int, str]()

        def decode(data: bytes) -> tuple[list[Chunk], list[Part], dict[int, str]]:
            return patch_shard(data, rows, base, names)

        def take(found: tuple[list[Chunk], list[Part], dict[int, str]]) -> None:
            chunks.extend(found[0])
            parts.extend((chunk.row, part) for chunk, part in zip(found[0], found[1], strict=True))
            sums.update(found[2])

        await self._shards(manifest.shard_refs("delta"), decode, take, progress)
        _require_whole(chunks, manifest, changed)
        patches = join(parts, {row: entry.name for row, entry in enumerate(rows)})
        summed = {rows[row].name: found for row, found in sums.items()}

        def new_sum(entry: TensorEntry) -> str:
            return summed.get(entry.name) or checksum_after(patches.get(entry.name, Patch(())), base[entry.name])

        await asyncio.to_thread(_check_state, manifest.version, changed, new_sum)
        return patches

    async def _shards(
        self, refs: Sequence[ShardRef], decode: Callable[[bytes], T], take: Callable[[T], object], progress: _Progress
    ) -> None:
        """Have every shard, right to the last bit, through `decode` (in threads) and `take`."""
        started = self.clock()
        arrived = started

        async def one(ref: ShardRef) -> None:
            nonlocal arrived
            key = self.keys.shard(ref.sha256)
            data = await self._downloader.get(
                key, lambda data: checked(key, data, ref.sha256), progress, size_bytes=ref.size_bytes
            )
            arrived = self.clock()
            try:
                take(await asyncio.to_thread(decode, data))
            except WireError as error:
                raise WireError(error.reason, f"{key}: {error.what}", why=error.why) from None

        await for_each(refs, one, self.retrier.limits.objects)
        progress.fetch_ms += (arrived - started) * 1e3


def _warm_up(manifest: Manifest) -> None:
    """Get ready for deltas, where nobody waits for one yet."""
    large = [entry for entry in manifest.tensors if entry.nbytes >= FAST_FROM_BYTES]
    for width in {element_width(entry.dtype) for entry in large}:
        warm_up(width)


def _check_layout(other: Manifest, target: Manifest) -> None:
    theirs, ours = list(other.tensors), list(target.tensors)
    for a, b in zip(theirs, ours, strict=False):
        if not a.same_layout(b):
            raise WireError(
                "layout_changed",
                f"tensor {b.name!r} {b.dtype} {list(b.shape)} of {target.version} is "
                f"{a.name!r} {a.dtype} {list(a.shape)} in {other.version}",
                why="a run never changes names, dtypes, shapes or ties",
            )
    if len(theirs) != len(ours):
        raise WireError(
            "layout_changed",
            f"{target.version} has {len(ours)} tensors, {other.version} {len(theirs)}",
        )


def _changed(manifest: Manifest, before: tuple[TensorEntry, ...] | None) -> list[TensorEntry]:
    """The tensors with bytes whose checksums are not those of the table `before`."""
    old = {entry.name: entry.xxh3 for entry in before or ()}
    return [entry for entry in manifest.tensors if entry.alias is None and old.get(entry.name) != entry.xxh3]


def _require_whole(chunks: list[Chunk], manifest: Manifest, changed: list[TensorEntry]) -> None:
    if check_coverage(chunks, list(manifest.tensors)) != {entry.name for entry in changed if entry.nbytes}:
        raise WireError("bad_shard", f"shards of {manifest.version} leave out changed tensors")


def _check_state(version: Version, entries: list[TensorEntry], new_sum: Callable[[TensorEntry], str]) -> None:
    for entry in entries:
        if new_sum(entry) != entry.xxh3:
            raise WireError(
                "wrong_state",
                f"tensor {entry.name!r} of {version} decodes to other bytes than were published",
                why="the parent's bytes differ, or the encoder and decoder disagree",
            )
