"""The host's own copy of the weights that are served: what deltas are decoded against.

A folder with `weights.bin` (all tensors, 64-byte aligned, in table order, memory-mapped), `head.manifest`
(the sealed manifest of the version in it) and, only while it is written, the marker `WRITING`. Opening
checks everything against the manifest; a marker or any difference empties the mirror, so that the
next fetch starts from an anchor instead of guessing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from headway.bus.failpoints import failpoint
from headway.schemas.errors import PromiseViolated, WireError
from headway.schemas.manifest import Manifest, TensorEntry, open_manifest
from headway.schemas.wire import digest_of
from headway.weight_sync.checkpoint import write_checkpoint
from headway.weight_sync.codec import U8
from headway.weight_sync.patch import After
from headway.weight_sync.staged import StagedUpdate
from headway.weight_sync.tensors import checksum

ALIGN_BYTES = 64
MappedBytes = np.memmap[tuple[int], np.dtype[np.uint8]]


class HostMirror:
    """The weights of one version, or nothing. One process owns a folder; only `commit` changes it."""

    def __init__(self, folder: Path, public_key: bytes, *, fsync: bool = True) -> None:
        """Open or create the mirror in `folder`. Never raises on what an interrupted write left behind.

        `fsync` makes a commit survive power loss; without it a torn one is found at the next start.
        """
        self._folder, self._fsync = folder, fsync
        self._head: Manifest | None = None
        self._digest: str | None = None
        self._map: MappedBytes | None = None
        self.reset_reason: str | None = None
        """Why opening emptied the mirror, for the log; None when it did not."""
        self._weights_file = folder / "weights.bin"
        self._head_file, self._marker = folder / "head.manifest", folder / "WRITING"
        folder.mkdir(parents=True, exist_ok=True)
        if self._marker.exists():
            self.reset("a write was interrupted")
        elif self._head_file.exists():
            self._load(public_key)

    @property
    def head(self) -> Manifest | None:
        """The manifest of the version held, None when empty."""
        return self._head

    @property
    def digest(self) -> str | None:
        """The digest of that manifest."""
        return self._digest

    @property
    def root(self) -> str | None:
        return self._head.root if self._head is not None else None

    @property
    def tensors(self) -> Mapping[str, U8]:
        """name -> read-only uint8 [nbytes] view, without tied tensors. Valid until the next commit."""
        views: dict[str, U8] = {}
        if self._head is not None and self._map is not None:
            for entry, start in _layout(self._head):
                views[entry.name] = np.asarray(self._map[start : start + entry.nbytes])
                views[entry.name].flags.writeable = False
        return views

    def fresh(self, staged: StagedUpdate) -> Mapping[str, U8]:
        """name -> new bytes (uint8 [nbytes]) of each tensor that `staged` changes, made when asked for.

        Valid until the next commit. Raises PromiseViolated when it was staged against another base.
        """
        self._require_base(staged)
        return After(self.tensors, staged.patches, tuple(staged.patches))

    def after(self, staged: StagedUpdate) -> Mapping[str, U8]:
        """The same of all tensors."""
        self._require_base(staged)
        held = self.tensors
        return After(held, staged.patches, tuple(held or staged.patches))

    def _require_base(self, staged: StagedUpdate) -> None:
        if staged.base_root != self.root:
            raise PromiseViolated(
                f"{staged.manifest.version} was staged against root {staged.base_root}, the mirror holds {self.root}",
                why="a base advances only with the head that is served",
            )

    def commit(self, staged: StagedUpdate) -> None:
        """Make `staged` the base of what follows. Call it, in a worker thread, once the engine proved it.

        Raises PromiseViolated when it was staged against another base. An error or crash in between leaves
        the marker and an empty mirror.
        """
        self._require_base(staged)
        if staged.digest == self._digest:
            return
        was_empty, self._head, self._digest = self._head is None, None, None
        self._mark(staged.digest)
        if was_empty:
            self._allocate(staged.manifest)
        self._write(staged)
        self._record(staged)
        self._unmark()
        self._head, self._digest = staged.manifest, staged.digest

    def stage_partial_checkpoint(
        self, folder: Path, config_json: bytes, staged: StagedUpdate | None, *, full: bool = False
    ) -> Path:
        """Write a Hugging Face folder with the staged tensors: the changed ones, or all after a cold start.

        With `full` the tensors that did not change come along, for an engine that starts from nothing; with
        `staged` None as well it is the head itself. Returns the folder.
        """
        manifest = staged.manifest if staged is not None else self._head
        if manifest is None:
            raise ValueError("an empty mirror and nothing staged")
        if staged is None:
            tensors: Mapping[str, U8] = self.tensors
        else:
            tensors = self.after(staged) if full else self.fresh(staged)
        return write_checkpoint(
            folder, config_json, [entry for entry in manifest.tensors if entry.name in tensors], tensors
        )

    # Opening

    def _load(self, public_key: bytes) -> None:
        sealed = self._head_file.read_bytes()
        digest = digest_of(sealed)
        try:
            manifest = open_manifest(sealed, digest, public_key)
        except WireError as error:
            self.reset(f"the head cannot be trusted: {error.what}")
            return
        size = _map_bytes(manifest)
        if not self._weights_file.exists() or self._weights_file.stat().st_size != size:
            self.reset("the weights file has another size than its manifest says")
            return
        self._head, self._digest, self._map = manifest, digest, self._mapped(size)
        tensors = self.tensors
        for entry in manifest.tensors:
            if entry.alias is None and checksum(tensors[entry.name]) != entry.xxh3:
                self.reset(f"tensor {entry.name!r} does not match its checksum")
                return

    def reset(self, reason: str) -> None:
        """Empty the mirror, so that the next fetch starts from an anchor."""
        self._head, self._digest, self._map = None, None, None
        self.reset_reason = reason
        for path in (self._head_file, self._weights_file, self._marker):  # the marker last
            path.unlink(missing_ok=True)

    # Committing, in this order

    def _mark(self, digest: str) -> None:
        self._put(self._marker, digest.encode())

    def _allocate(self, manifest: Manifest) -> None:
        self._head_file.unlink(missing_ok=True)
        size = _map_bytes(manifest)
        with self._weights_file.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # now: a mapped write to a full disk would be SIGBUS
        self._map = self._mapped(size)

    def _write(self, staged: StagedUpdate) -> None:
        assert self._map is not None
        for entry, start in _layout(staged.manifest):
            if entry.name in staged.patches:
                failpoint("mirror.patch.before")
                staged.patches[entry.name].write(self._map[start : start + entry.nbytes])
                failpoint("mirror.patch.after")
        if self._fsync:
            failpoint("mirror.flush.before")
            self._map.flush()
            failpoint("mirror.flush.after")

    def _record(self, staged: StagedUpdate) -> None:
        self._put(self._head_file, staged.sealed)

    def _unmark(self) -> None:
        failpoint("mirror.unmark.before")
        self._marker.unlink()
        failpoint("mirror.unmark.after")
        self._sync_folder()

    def _put(self, path: Path, data: bytes) -> None:
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            if self._fsync:
                failpoint("mirror.fsync.before")
                os.fsync(file.fileno())
                failpoint("mirror.fsync.after")
        failpoint("mirror.rename.before")
        os.replace(partial, path)
        failpoint("mirror.rename.after")
        self._sync_folder()

    def _sync_folder(self) -> None:
        if self._fsync:
            handle = os.open(self._folder, os.O_RDONLY)
            failpoint("mirror.folder.before")
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            failpoint("mirror.folder.after")

    def _mapped(self, size: int) -> MappedBytes:
        return np.memmap(self._weights_file, np.uint8, "r+", shape=(size,))


def _layout(manifest: Manifest) -> Iterator[tuple[TensorEntry, int]]:
    """Tensors that carry bytes, and where each begins in `weights.bin`."""
    start = 0
    for entry in manifest.tensors:
        if entry.alias is None:
            yield entry, start
            start += -(-entry.nbytes // ALIGN_BYTES) * ALIGN_BYTES


def _map_bytes(manifest: Manifest) -> int:
    """The size of `weights.bin`; never 0, which cannot be mapped."""
    return max([start + entry.nbytes for entry, start in _layout(manifest)], default=0) or ALIGN_BYTES
