"""A step that failed: its batch set aside in a bundle that fails the same way elsewhere.

A bundle is a recording of the ledger, of the batch's rollouts and of the learner's state before the step. Its
`about` says more: which step, which sequences in batch order, and how it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.bus.connection import Bus
from headway.bus.reader import read_all, read_at
from headway.bus.recorder import file_key
from headway.bus.recording import PART_BYTES
from headway.bus.recording_writer import RecordingWriter
from headway.schemas.errors import InputError
from headway.schemas.ledger import Drop
from headway.schemas.messages import Rollout
from headway.schemas.version import Version
from headway.schemas.wire import H_CLAIM, Claim, digest_of, unpack
from headway.trainer import checkpoint as checkpoints
from headway.trainer import environment
from headway.trainer.groups import Batch
from headway.trainer.learner import Learner

FOLDER = "quarantine"
BUNDLES_MAX = 16
"""No more are written into one run folder: the newest failures are then in the log alone."""
ERROR_CHARS_MAX = 2000


def set_aside(batch: Batch[Rollout]) -> Batch[Rollout]:
    """What the ledger says of a batch that is never trained on."""
    drops = [Drop(rollout_id=one.rollout_id, seq=one.seq, reason="quarantined") for one in batch.rollouts()]
    void = (*(group for group, _ in batch.groups), *batch.void_groups)
    return Batch(groups=(), drops=(*batch.drops, *drops), void_groups=void)


async def write_bundle(
    folder: Path,
    bus: Bus,
    learner: Learner,
    version: Version,
    seqs: Sequence[int],
    error: BaseException,
    files: Mapping[str, bytes],
) -> Path | None:
    """The file; None when there are too many. `seqs` are the batch's places in ROLLOUTS, in batch order."""
    written = len(list((folder / FOLDER).glob("*.hwr")))
    if written >= BUNDLES_MAX:
        return None
    path = folder / FOLDER / f"{version}-{written}.hwr"
    state = await asyncio.to_thread(lambda: checkpoints.to_bytes(learner.state(copied=False)))
    failed = {
        "version": str(version),
        "seqs": list(seqs),
        "state": digest_of(state),
        "error": f"{type(error).__name__}: {error}"[:ERROR_CHARS_MAX],
        "environment": environment.describe(),
    }
    with RecordingWriter(path, {"run": bus.run, "selection": {"bundle": True}, "failed": failed}) as writer:
        _put(writer, bus.keys.checkpoint(digest_of(state)), state)
        for name, data in files.items():
            _put(writer, file_key(bus.run, name), data)
        async for stored in read_all(bus, "LEDGER"):
            writer.add("LEDGER", stored)
        for seq in sorted(seqs):
            if (stored_rollout := await read_at(bus, "ROLLOUTS", seq)) is None:
                continue
            if H_CLAIM in stored_rollout.headers:
                claim = unpack(Claim, stored_rollout.body)
                assert bus.store is not None
                _put(writer, claim.key, await bus.store.get(claim.key))
            writer.add("ROLLOUTS", stored_rollout)
        writer.commit(whole=True)
    return path


def _put(writer: RecordingWriter, key: str, data: bytes) -> None:
    parts = range(0, len(data), PART_BYTES)
    offsets = [writer.add_part(key, at // PART_BYTES, data[at : at + PART_BYTES]) for at in parts]
    writer.add_object(key, len(data), offsets)


def failed_of(about: Mapping[str, Any]) -> tuple[Version, list[int], str, str, dict[str, str]]:
    """(version, seqs, digest of the state, error, environment) of a bundle. Raises InputError."""
    try:
        failed = about["failed"]
        version = Version.parse(failed["version"])
        return version, list(failed["seqs"]), failed["state"], failed["error"], dict(failed["environment"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError("the recording is no bundle of a failed step", why=repr(error)[:100]) from None
