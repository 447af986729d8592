"""The trainer's line of weights: publish a version, announce it, keep the checkpoints that resuming needs."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import structlog
from torch import Tensor

from headway.bus.blobs import BlobStore
from headway.bus.service import Service
from headway.schemas import signing
from headway.schemas.errors import PromiseViolated, WireError
from headway.schemas.manifest import open_manifest, root_of
from headway.schemas.messages import WeightsAnnounced
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.schemas.wire import digest_of
from headway.trainer.mesh import Layout, Mesh
from headway.trainer.retention import delete, leases_of
from headway.weight_sync.publisher import Published, Publisher
from headway.weight_sync.ranks import RankedPublisher
from headway.weight_sync.tensors import table_of
from headway.weight_sync.torch_apply import raw_tensors

ENCODE_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Beside the thread that trains."""
log = structlog.get_logger()


class Share:
    """What this rank publishes of each version: all of it, or the tensors that are its own among several ranks'.

    The last published version is the base of the next delta.
    """

    def __init__(self, store: BlobStore, keys: Keys, private_key: bytes, mesh: Mesh) -> None:
        self._mesh = mesh
        self._publisher = Publisher(
            store=store,
            keys=keys,
            private_key=private_key,
            pool=ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="encode"),
        )
        self.head: Published | None = None

    async def publish(self, version: Version, weights: Mapping[str, Tensor]) -> Published:
        """Make `version`, of which `weights` are all tensors, durable in the store. Raises as the publishers do."""
        mine = raw_tensors(self._mine(weights))
        if self._mesh.size == 1:
            self.head, _ = await self._publisher.publish(version, mine, self.head)
            return self.head
        ranked = RankedPublisher(
            publisher=self._publisher,
            rank=self._mesh.rank,
            world_size=self._mesh.size,
            attempt=self._mesh.attempt,
            patience_s=self._mesh.patience_s,
        )
        self.head = await ranked.publish(version, mine, self.head, sorted(weights))
        return self.head

    async def adopt(self, version: Version, digest: str, weights: Mapping[str, Tensor], root: str) -> None:
        """Continue from a committed version that `weights` must equal bit for bit.

        Raises PromiseViolated when the checkpoint's weights are not the ledger's.
        """
        publisher = self._publisher
        sealed = await publisher.store.get(publisher.keys.manifest(digest))
        manifest = open_manifest(sealed, digest, signing.public_key(publisher.private_key))
        found = root_of(table_of(raw_tensors(weights)))
        if not found == manifest.root == root:
            raise PromiseViolated(
                f"the checkpoint of version {version} gives weight root {found[:16]}, the ledger says {root[:16]}"
            )
        mine = raw_tensors(self._mine(weights))
        self.head = Published(version=version, digest=digest, manifest=manifest, tensors=mine)

    def _mine(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        layout = Layout.of({name: tuple(w.shape) for name, w in weights.items()}, self._mesh.size)
        return {name: weights[name] for name in layout.owned[self._mesh.rank]}


class WeightLine:
    """Rank 0's side of it: the share, the announcements, the checkpoints."""

    def __init__(self, service: Service, private_key: bytes, mesh: Mesh | None = None) -> None:
        self._service, self._key = service, private_key
        self._share = Share(service.store, service.bus.keys, private_key, mesh or Mesh())
        self._checkpoints: deque[str] = deque()

    async def publish(self, version: Version, weights: Mapping[str, Tensor]) -> Published:
        """Make `version` durable in the store. Not yet visible: the ledger record binds it."""
        return await self._share.publish(version, weights)

    async def adopt(self, version: Version, digest: str, weights: Mapping[str, Tensor], root: str) -> None:
        """As `Share.adopt`."""
        await self._share.adopt(version, digest, weights, root)

    async def announce(self) -> None:
        """Publish the head's announcement; a repeated one is recognised and stored once."""
        head = self._share.head
        assert head is not None
        manifest = head.manifest
        full_bytes = sum(entry.nbytes for entry in manifest.tensors if entry.alias is None)
        message = WeightsAnnounced(
            version=head.version,
            parent=manifest.parent,
            manifest=head.digest,
            root=manifest.root,
            delta_bytes=manifest.size_bytes("delta") if manifest.parent else manifest.size_bytes("anchor"),
            full_bytes=full_bytes,
            changed_fraction=head.changed_fraction,
        )
        await self._service.bus.publish(self._service.bus.subjects.weights(head.version), message)

    async def put_checkpoint(self, blob: bytes) -> str:
        """Store a checkpoint under its digest."""
        digest = await asyncio.to_thread(digest_of, blob)
        await self._service.store.put(self._service.bus.keys.checkpoint(digest), blob)
        return digest

    def retain(self, digests: list[str]) -> None:
        """Remember the checkpoints of earlier terms, oldest first, so that they are pruned in their turn."""
        self._checkpoints = deque(digests[-2 * self._service.config.grpo.retain_steps :])

    async def prune_checkpoints(self, digest: str, term: int) -> None:
        """After the commit of `digest`'s step: delete checkpoints more than `retain_steps` behind that no lease holds.

        Nothing is deleted while a lease cannot be read. The sweep finds those that a crash or a lease left. Raises
        FencedOut when `term` is over.
        """
        bus = self._service.bus
        self._checkpoints.append(digest)
        old = [
            self._checkpoints.popleft() for _ in range(len(self._checkpoints) - self._service.config.grpo.retain_steps)
        ]
        if old:
            try:
                held = {digest for lease in await leases_of(bus) for digest in lease.checkpoints}
            except WireError as error:
                log.warning("checkpoints_not_pruned", why=str(error)[:300])
                return
            gone = set(old) - set(self._checkpoints) - held
            await delete(bus, map(bus.keys.checkpoint, sorted(gone)), term, signing.public_key(self._key))
