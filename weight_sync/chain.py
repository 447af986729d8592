"""Which objects a set of weight versions needs in the store."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.bus.blobs import BlobStore
from headway.schemas.manifest import Manifest, open_manifest
from headway.schemas.subjects import Keys


@dataclass(frozen=True, slots=True)
class Node:
    """What reachability needs of a manifest. `keys` are its own object and its shards."""

    parent: str | None
    has_anchor: bool
    keys: frozenset[str]


class Chain:
    """Reads each manifest once, while it is needed, and keeps only its node: they are immutable."""

    def __init__(self, store: BlobStore, keys: Keys, public_key: bytes) -> None:
        self._store, self._keys, self._public_key = store, keys, public_key
        self._nodes: dict[str, Node] = {}

    async def manifest(self, digest: str) -> Manifest:
        """The verified manifest. Raises WireError, MissingBlob, UnavailableError."""
        return open_manifest(await self._store.get(self._keys.manifest(digest)), digest, self._public_key)

    async def node(self, digest: str) -> Node:
        """Raises as `manifest`."""
        if digest not in self._nodes:
            manifest = await self.manifest(digest)
            shards = (self._keys.shard(shard.sha256) for shard in manifest.shards)
            keys = frozenset((self._keys.manifest(digest), *shards))
            self._nodes[digest] = Node(manifest.parent_manifest, manifest.has_anchor, keys)
        return self._nodes[digest]

    async def needed(self, digests: Iterable[str]) -> set[str]:
        """Keys of all objects that an agent may ask for to get to one of these versions, from nothing or from another.

        These are the versions' own and those on the way back to an anchor. Raises as `manifest`.
        """
        found: set[str] = set()
        reached: set[str] = set()
        for digest in digests:
            at: str | None = digest
            while at is not None and at not in reached:
                reached.add(at)
                node = await self.node(at)
                found |= node.keys
                at = None if node.has_anchor else node.parent
        self._nodes = {digest: self._nodes[digest] for digest in reached}
        return found
