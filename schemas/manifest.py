"""What a weight version is: its tensors by checksum, its parent, and the shards that carry it.

A manifest is a MessagePack map (wire.pack); it travels and is stored as a `SealedManifest`, the map's
bytes and the trainer's signature over them. Its digest, which the ledger binds to the version number, is
the SHA-256 of the stored bytes, so that `sha256sum` can check the object.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable
from typing import Annotated, Literal

import msgpack
from pydantic import Field, field_validator, model_validator

from headway.schemas import signing
from headway.schemas.errors import WireError
from headway.schemas.ids import Digest
from headway.schemas.version import VersionField
from headway.schemas.wire import Model, digest_of, pack, unpack

TENSORS_MAX = 1 << 20
SHARDS_MAX = 1 << 16
DIMS_MAX = 8
TENSOR_BYTES_MAX = 1 << 40
SHARD_BYTES_MAX = 1 << 30
NAME_CHARS_MAX = 256

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Safetensors' dtype names and element sizes in bytes."""


class TensorEntry(Model):
    """One tensor of a version. `xxh3` is the XXH3-128 of its new bytes, 32 hex digits.

    A tied tensor names in `alias` the one that carries the bytes; it has no chunks of its own.
    """

    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    dtype: str
    shape: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=DIMS_MAX, strict=False)]
    xxh3: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    alias: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> TensorEntry:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype[:20]!r} is unknown")
        if self.nbytes > TENSOR_BYTES_MAX:
            raise ValueError(f"tensor {self.name!r} is larger than {TENSOR_BYTES_MAX} bytes")
        return self

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def same_layout(self, other: TensorEntry) -> bool:
        """Whether both have the same name, dtype, shape and alias."""
        return (self.name, self.dtype, self.shape, self.alias) == (
            other.name,
            other.dtype,
            other.shape,
            other.alias,
        )


class ShardRef(Model):
    """A shard object by content. Anchors stand alone, deltas need the parent's bytes."""

    sha256: Digest
    size_bytes: Annotated[int, Field(ge=1, le=SHARD_BYTES_MAX)]
    kind: Literal["anchor", "delta"]


class Part(Model):
    """What one rank put of a version: its tensors and the shards that carry them. `changed_elements` is a count."""

    tensors: Annotated[tuple[TensorEntry, ...], Field(max_length=TENSORS_MAX, strict=False)]
    shards: Annotated[tuple[ShardRef, ...], Field(max_length=SHARDS_MAX, strict=False)]
    changed_elements: Annotated[int, Field(ge=0)]


class Manifest(Model):
    """A weight version. `tensors` are sorted by name; `parent_manifest` is the digest of the parent's."""

    schema_number: Literal[1] = 1
    version: VersionField
    root: Digest
    parent: VersionField | None
    parent_root: Digest | None
    parent_manifest: Digest | None
    tensors: Annotated[tuple[TensorEntry, ...], Field(max_length=TENSORS_MAX, strict=False)]
    shards: Annotated[tuple[ShardRef, ...], Field(max_length=SHARDS_MAX, strict=False)]

    @field_validator("tensors")
    @classmethod
    def _sorted_and_tied(cls, tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
        names = [entry.name for entry in tensors]
        if any(a >= b for a, b in itertools.pairwise(names)):
            raise ValueError("tensors are not sorted by name, or one appears twice")
        by_name = dict(zip(names, tensors, strict=True))
        for entry in tensors:
            owner = by_name.get(entry.alias) if entry.alias is not None else entry
            same = owner is not None and (owner.dtype, owner.shape, owner.xxh3) == (
                entry.dtype,
                entry.shape,
                entry.xxh3,
            )
            if not same or (owner is not entry and owner is not None and owner.alias is not None):
                raise ValueError(f"tensor {entry.name!r} is tied to nothing that matches it")
        return tensors

    @model_validator(mode="after")
    def _whole(self) -> Manifest:
        lineage = (self.parent, self.parent_root, self.parent_manifest)
        if any(part is None for part in lineage) and any(part is not None for part in lineage):
            raise ValueError("a parent is a version, a root and a manifest, or none of them")
        if self.parent is not None and self.parent >= self.version:
            raise ValueError(f"version {self.version} cannot descend from {self.parent}")
        if self.parent is None and any(shard.kind == "delta" for shard in self.shards):
            raise ValueError("delta shards without a parent")
        if self.root != root_of(self.tensors):
            raise ValueError("the root does not match the tensors")
        return self

    def shard_refs(self, kind: Literal["anchor", "delta"]) -> list[ShardRef]:
        return [shard for shard in self.shards if shard.kind == kind]

    def size_bytes(self, kind: Literal["anchor", "delta"]) -> int:
        return sum(shard.size_bytes for shard in self.shards if shard.kind == kind)

    @property
    def has_anchor(self) -> bool:
        """Whether the version can be reached from nothing (an empty model needs no shard for that)."""
        return self.parent is None or any(shard.kind == "anchor" for shard in self.shards)


class SealedManifest(Model):
    """A manifest as it is stored: its bytes and the trainer's Ed25519 signature over them."""

    payload: bytes
    signature: bytes


def root_of(tensors: Iterable[TensorEntry]) -> str:
    """The root of a set of weights: SHA-256 over [name, dtype, shape, xxh3] of each, sorted by name."""
    digest = hashlib.sha256()
    for entry in sorted(tensors, key=lambda entry: entry.name):
        digest.update(msgpack.packb([entry.name, entry.dtype, list(entry.shape), bytes.fromhex(entry.xxh3)]))
    return digest.hexdigest()


def seal_manifest(manifest: Manifest, private_key: bytes) -> tuple[str, bytes]:
    """The digest and the bytes under which `manifest` is stored; the same manifest gives the same bytes."""
    payload = pack(manifest)
    sealed = pack(SealedManifest(payload=payload, signature=signing.sign(private_key, payload)))
    return digest_of(sealed), sealed


def open_manifest(sealed: bytes, digest: str, public_key: bytes) -> Manifest:
    """Check digest and signature, then decode.

    Raises WireError: digest_mismatch, bad_signature, or wire.unpack's (oversize, malformed, invalid).
    """
    if digest_of(sealed) != digest:
        raise WireError(
            "digest_mismatch",
            f"manifest {digest[:16]}… does not match its digest",
            why="the object was changed or cut off",
            hint="fetch it again, or from another store",
        )
    outer = unpack(SealedManifest, sealed)
    signing.verify(public_key, outer.payload, outer.signature)
    return unpack(Manifest, outer.payload)
