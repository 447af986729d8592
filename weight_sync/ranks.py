"""Several ranks publish one version: each its own shards and part, one of them the manifest.

They meet in the object store alone. A rank puts its part after its shards; rank 0 puts the manifest after it has read
the part of every rank. So a version that anybody can see is whole, and a rank that dies leaves none, only objects that
the sweep takes. Whoever is started again publishes the same version again: the store ignores what it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.bus.blobs import MissingBlob
from headway.schemas import signing
from headway.schemas.errors import PromiseViolated, UnavailableError
from headway.schemas.manifest import Part, open_manifest
from headway.schemas.version import Version
from headway.schemas.wire import digest_of, pack, unpack
from headway.weight_sync.publisher import Published, Publisher
from headway.weight_sync.tensors import RawTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPublisher:
    """One rank of `world_size`. Every rank holds a share of the tensors, no tensor is in two.

    `attempt` is an id that the launcher gives all ranks when it starts them together: parts of another attempt, which
    may have computed other weights for the same version, are never taken.
    """

    publisher: Publisher
    rank: int
    world_size: int
    attempt: str
    patience_s: float = 600.0
    """How long a rank waits for the others."""
    poll_s: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}")

    async def publish(
        self,
        version: Version,
        tensors: Mapping[str, RawTensor],
        parent: Published | None,
        names: Sequence[str],
        aliases: Mapping[str, str] | None = None,
    ) -> Published:
        """Put this rank's share `tensors` of `version`; returns, with the share as its base, once all of it is durable.

        `names` are all of the version's, sorted, tied ones too; `aliases` (tied -> owner) of all ranks. Raises
        ValueError as `Publisher.seal`, UnavailableError when a rank is not heard of in time, PromiseViolated when
        what is published is not what this rank put.
        """
        part = await self.publisher.put_part(version, tensors, parent, names)
        await self._put(self._key(version, f"{self.rank}of{self.world_size}"), pack(part))
        if self.rank == 0:
            others = [self._wait(self._key(version, f"{r}of{self.world_size}")) for r in range(1, self.world_size)]
            parts = [part, *(unpack(Part, body) for body in await asyncio.gather(*others))]
            published = await self.publisher.seal(version, parts, tensors, parent, names, aliases)
            await self._put(self._key(version, "sealed"), published.digest.encode())
            return published
        return await self._sealed(version, part, tensors)

    async def _sealed(self, version: Version, part: Part, tensors: Mapping[str, RawTensor]) -> Published:
        """The version as rank 0 sealed it, once that is done."""
        digest = (await self._wait(self._key(version, "sealed"))).decode()
        sealed = await self.publisher.store.get(self.publisher.keys.manifest(digest))
        manifest = open_manifest(sealed, digest, signing.public_key(self.publisher.private_key))
        if not set(part.tensors) <= set(manifest.tensors) or not set(part.shards) <= set(manifest.shards):
            raise PromiseViolated(f"rank {self.rank}'s share of {version} is not what manifest {digest[:16]} says")
        return Published(version=version, digest=digest, manifest=manifest, tensors=tensors)

    def _key(self, version: Version, what: str) -> str:
        return self.publisher.keys.part(f"{digest_of(self.attempt.encode())[:16]}-{version.epoch}-{version.n}-{what}")

    async def _put(self, key: str, data: bytes) -> None:
        await self.publisher.store.put(key, data)
        if await self.publisher.store.get(key) != data:
            raise PromiseViolated(
                f"{key} holds other bytes than this rank would put", why="one attempt computed two versions of a share"
            )

    async def _wait(self, key: str) -> bytes:
        try:
            async with asyncio.timeout(self.patience_s):
                while True:
                    try:
                        return await self.publisher.store.get(key)
                    except MissingBlob:
                        await asyncio.sleep(self.poll_s)
        except TimeoutError:
            raise UnavailableError(
                f"{key} did not appear in {self.patience_s:g} s", why="a rank is down or slow", hint="restart all ranks"
            ) from None
