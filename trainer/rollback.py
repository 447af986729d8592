"""A rollback: the ledger forks at an earlier version of the line, and every service follows.

Nothing is undone or deleted: the abandoned steps stay in the ledger, what they trained on stays trained
(P2 holds over all lines), and what their versions sampled is dropped as `abandoned`. The new version
(epoch + 1, n of the base) has the base's bytes under a manifest of its own, whose parent is the base.
"""

from __future__ import annotations

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader, LedgerWriter
from headway.schemas import signing
from headway.schemas.errors import InputError, UnavailableError
from headway.schemas.ledger import Fork, Open
from headway.schemas.manifest import Manifest, open_manifest, seal_manifest
from headway.schemas.version import Version
from headway.trainer.history import History

INSTANCE = "rollback"


async def rollback(bus: Bus, key: bytes, base: Version) -> Fork:
    """Fork the run at `base`, under a new term that fences out a trainer still running.

    Raises InputError when `base` is not an earlier step of the present line, UnavailableError when its
    checkpoint is gone, FencedOut when somebody appends meanwhile (nothing has changed then, but the term).
    """
    history, reader = History(), LedgerReader(bus, signing.public_key(key))
    history.extend(await reader.read_new())
    fork = await _prepare(bus, key, history, base)
    writer = LedgerWriter(bus, key, reader.tail)
    opened = Open(instance=INSTANCE, environment={})
    await writer.append(opened, history.head, term=history.term + 1)
    history.add(await writer.append(fork, fork.version))
    return fork


async def _prepare(bus: Bus, key: bytes, history: History, base: Version) -> Fork:
    """The record, its manifest durable. Raises as `rollback`."""
    head, checkpoint = history.head, history.checkpoints.get(base)
    if not (history.lineage.is_ancestor(base) and base.n < head.n and base in history.manifests):
        raise InputError(f"{base} is no earlier version of the line that leads to {head}", hint="headway inspect step")
    if checkpoint is None:
        raise InputError(
            f"no checkpoint was made of {base}",
            why="it is the base model" if base.n == 0 else "grpo.checkpoint_every left it out",
            hint="take a version with one (`headway inspect step`), or start a run under another name",
        )
    assert bus.store is not None
    if not await bus.store.exists(bus.keys.checkpoint(checkpoint)):
        raise UnavailableError(
            f"the checkpoint of {base} is gone",
            why=f"the store keeps those of the last grpo.retain_steps steps, the head is {head}",
            hint="take a later version",
        )
    digest, version = history.manifests[base], Version(head.epoch + 1, base.n)
    parent = open_manifest(await bus.store.get(bus.keys.manifest(digest)), digest, signing.public_key(key))
    manifest = Manifest(
        version=version,
        root=parent.root,
        parent=base,
        parent_root=parent.root,
        parent_manifest=digest,
        tensors=parent.tensors,
        shards=(),
    )
    sealed_digest, sealed = seal_manifest(manifest, key)
    await bus.store.put(bus.keys.manifest(sealed_digest), sealed)
    return Fork(version=version, base=base, checkpoint=checkpoint, manifest=sealed_digest, root=parent.root)
