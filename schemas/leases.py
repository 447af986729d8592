"""Leases: what somebody other than the trainer still needs of a run, so that its sweep leaves it alone.

A lease is the object `<run>/leases/<name>`, a MessagePack map (wire.pack), put before its holder reads anything
and deleted when it is done; a recording's is named `recording-<id>`. One that cannot be read stops the sweep.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headway.schemas.ids import Digest
from headway.schemas.version import VersionField
from headway.schemas.wire import Model

HELD_MAX = 1 << 16
Seq = Annotated[int, Field(ge=1)]


class Lease(Model):
    """What must stay: versions and all they are decoded from, checkpoints, messages from these sequences on."""

    holder: Annotated[str, Field(min_length=1, max_length=200)]
    versions: Annotated[tuple[VersionField, ...], Field(max_length=HELD_MAX, strict=False)] = ()
    checkpoints: Annotated[tuple[Digest, ...], Field(max_length=HELD_MAX, strict=False)] = ()
    tasks_from_seq: Seq | None = None
    rollouts_from_seq: Seq | None = None
