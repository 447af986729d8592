"""What a run still needs of its store and streams, what it doesn't, and deleting that with one's own term.

Invariants: what resuming, rolling back, a serving agent or a lease needs is never deleted, and nothing is
by a writer whose term is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from headway.bus.blobs import MissingBlob
from headway.bus.connection import Bus
from headway.schemas.config import Config
from headway.schemas.errors import FencedOut, WireError
from headway.schemas.leases import Lease
from headway.schemas.ledger import LedgerEntry
from headway.schemas.version import Version
from headway.schemas.wire import unpack
from headway.trainer.groups import parse_train_id
from headway.trainer.history import History
from headway.weight_sync.chain import Chain

DELETES_A_CHECK = 64
"""Objects deleted between two looks at the ledger's tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What must stay: versions and all they are decoded from, checkpoints, messages from these sequences on."""

    versions: frozenset[Version]
    checkpoints: frozenset[str]
    rollouts_from_seq: int
    tasks_from_seq: int | None
    """None: from the first unsettled one, which TASKS alone tells."""


def kept(history: History, config: Config, serving: Collection[Version] = (), leases: Iterable[Lease] = ()) -> Kept:
    """What the ledger's promises, agents that serve `serving`, and leases need. No clock, no I/O.

    Checkpoints of the last `grpo.retain_steps` commits; of the line's versions those from
    `retention.versions` behind the head on, or from the oldest that is served; what leads to either.
    """
    leases = list(leases)
    recent = list(history.checkpoints)[-config.grpo.retain_steps :]
    versions = set(history.manifests)
    if config.retention.versions:
        line = history.lineage
        oldest = line.head.n - max(config.retention.versions, config.grpo.retain_steps)
        oldest = min([oldest, *(version.n for version in serving if line.is_ancestor(version))])
        versions = {version for version in versions if line.is_ancestor(version) and version.n >= oldest}
        also = [*recent, *serving, *(version for lease in leases for version in lease.versions)]
        versions |= set(also) & history.manifests.keys()
    since = min((version.n for version in recent), default=0)  # what lies behind it may have to be executed again
    again = [seq for version, seq in history.first_seqs.items() if version.n >= since]
    seqs = [history.cursor + 1, *history.pool, *again]
    return Kept(
        versions=frozenset(versions),
        checkpoints=frozenset(
            [history.checkpoints[v] for v in recent] + [digest for lease in leases for digest in lease.checkpoints]
        ),
        rollouts_from_seq=min(seqs + [lease.rollouts_from_seq for lease in leases if lease.rollouts_from_seq]),
        tasks_from_seq=min((lease.tasks_from_seq for lease in leases if lease.tasks_from_seq), default=None),
    )


async def leases_of(bus: Bus) -> list[Lease]:
    """The run's open leases. Raises WireError for one that cannot be read: never guess what it holds."""
    assert bus.store is not None
    found = []
    async for key, _ in bus.store.list(f"{bus.run}/leases/"):
        try:
            found.append(unpack(Lease, await bus.store.get(key)))
        except MissingBlob:
            continue  # given back meanwhile
        except WireError as error:
            raise WireError(
                error.reason,
                f"the lease {key} cannot be read",
                why=error.what,
                hint="delete it once its holder is known to be gone; nothing is swept meanwhile",
            ) from None
    return found


async def unneeded(bus: Bus, history: History, chain: Chain, keep: Kept) -> dict[str, int]:
    """Key -> bytes of stored weights and checkpoints that are not kept, manifests first, and of settled sessions.

    An agent that was cut off may save a session whose rollout was stored by another: nobody else forgets it.
    A manifest goes before its shards, so that none is left that names what is gone. A kept version whose own
    manifest was swept before, when less was kept, needs nothing more. Raises as `Chain.needed`.
    """
    assert bus.store is not None
    found = {}
    for folder in ("weights", "ckpt"):
        async for key, size_bytes in bus.store.list(f"{bus.run}/{folder}/"):
            found[key] = size_bytes
    kept_digests = [history.manifests[version] for version in keep.versions]
    needed = await chain.needed(
        digest
        for digest in kept_digests
        if digest == history.manifests[history.head] or bus.keys.manifest(digest) in found
    )
    needed |= {bus.keys.checkpoint(digest) for digest in keep.checkpoints}
    async for key, size_bytes in bus.store.list(f"{bus.run}/sessions/"):
        place = parse_train_id(key.split("/")[2])
        if place is not None and place[0] in history.settled:
            found[key] = size_bytes
    left = sorted(found.keys() - needed, key=lambda key: (not key.endswith(".manifest"), key))
    return {key: found[key] for key in left}


async def delete(bus: Bus, keys: Iterable[str], term: int, public_key: bytes) -> None:
    """Delete, looking before every DELETES_A_CHECK keys whether the ledger is still in `term`, else FencedOut."""
    assert bus.store is not None
    for number, key in enumerate(keys):
        if number % DELETES_A_CHECK == 0:
            await require_term(bus, term, public_key)
        await bus.store.delete(key)


async def require_term(bus: Bus, term: int, public_key: bytes) -> None:
    """Raises FencedOut unless the ledger's newest record is of `term`."""
    stored = await bus.last("LEDGER")
    record = (await bus.open(LedgerEntry, stored)).open(public_key) if stored is not None else None
    if record is None or record.term != term:
        raise FencedOut(f"term {term} is over", why=f"the ledger is in term {record.term if record else 'none'}")
