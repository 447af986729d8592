"""A version that was fetched, decoded and verified, but not written anywhere yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.schemas.manifest import Manifest
from headway.weight_sync.patch import Patch


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchStats:
    """`fetch_ms` ends when the last byte arrived, `stage_ms` (which contains it) when all was verified."""

    fetched_bytes: int
    fetch_ms: float
    stage_ms: float
    hops: int
    refetches: int
    from_anchor: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedUpdate:
    """What differs from the mirror's tensors; on a cold start all of them, whole.

    `base_root` is the root of the mirror it was staged against, None when it was empty: against any other bytes
    it means nothing.
    """

    manifest: Manifest
    digest: str
    sealed: bytes
    base_root: str | None
    patches: Mapping[str, Patch]
    stats: FetchStats
