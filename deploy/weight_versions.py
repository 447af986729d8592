"""`headway weights ls|show|verify|diff|gc`: the weight versions of a run, as its ledger binds and its store holds them.

Every command gives its result as plain values, a table for people, and with --json the values themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.bus.blobs import MissingBlob
from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader, LedgerWriter
from headway.deploy import weights
from headway.deploy.control import require_no_trainer
from headway.deploy.export import committed
from headway.deploy.fleet import listen
from headway.deploy.local import with_bus
from headway.deploy.progress import escape
from headway.deploy.run_folder import RunFolder
from headway.schemas import signing
from headway.schemas.config import Config
from headway.schemas.errors import InputError, PromiseViolated, UnavailableError
from headway.schemas.ledger import Open
from headway.schemas.manifest import DTYPE_BYTES, Manifest, ShardRef
from headway.schemas.version import Version
from headway.trainer.history import History
from headway.trainer.retention import Kept, delete, kept, leases_of, unneeded
from headway.weight_sync.chain import Chain
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.transfer import Retrier, TransferLimits

Found = dict[str, Any]
Say = Callable[[str], None]
READ_BYTES = 8 << 20
INSTANCE = "gc"


class Versions:
    """A run's versions: what the ledger says of them, and its store."""

    def __init__(self, bus: Bus, config: Config, history: History, keep: Kept) -> None:
        assert bus.store is not None
        assert history.genesis is not None
        self.bus, self.store, self.config, self.history, self.keep = bus, bus.store, config, history, keep
        self.key = history.genesis.trainer_key
        self.chain = Chain(self.store, bus.keys, self.key)

    @classmethod
    async def of(cls, bus: Bus, config: Config) -> Versions:
        """Raises ConfigError when the run has not begun, PromiseViolated, UnavailableError."""
        history = await committed(bus)
        serving = set()
        for beat in (await listen(bus)).of("agent"):
            try:
                serving.add(Version.parse(beat.text("served")))
            except ValueError:
                continue
        return cls(bus, config, history, kept(history, config, serving, await leases_of(bus)))

    def digest(self, version: Version) -> str:
        """Of the manifest that the ledger binds to `version`. Raises InputError."""
        if version not in self.history.manifests:
            raise InputError(f"run {self.bus.run} has no version {version}", why=f"the newest is {self.history.head}")
        return self.history.manifests[version]

    async def ls(self) -> list[Found]:
        """Every version that the ledger binds, oldest first."""
        rows = []
        for version in sorted(self.history.manifests):
            row: Found = {"version": str(version), "line": self.history.lineage.is_ancestor(version)}
            row["kept"] = version in self.keep.versions
            row["checkpoint"] = self.history.checkpoints.get(version) in self.keep.checkpoints
            row["root"] = self.history.roots[version]
            try:
                manifest = await self.chain.manifest(self.digest(version))
            except MissingBlob:
                rows.append({**row, "stored": False})
                continue
            sizes = {f"{kind}_bytes": manifest.size_bytes(kind) for kind in ("delta", "anchor")}
            rows.append({**row, "stored": True, "parent": str(manifest.parent or ""), **sizes})
        return rows

    async def show(self, version: Version) -> Found:
        """A version's manifest, whole. Raises InputError, WireError, MissingBlob."""
        manifest = await self.chain.manifest(self.digest(version))
        return {"manifest": self.digest(version), **manifest.model_dump(mode="json")}

    async def verify(self) -> Found:
        """Read every stored object of every version again, oldest first.

        Raises InputError naming the first object that is damaged, or missing though it is needed, and
        PromiseViolated naming the first manifest that is signed and says something else than the ledger.
        """
        needed = await self._needed()
        found = {"versions": 0, "gone": 0, "objects": 0, "bytes": 0}
        seen: set[str] = set()
        for version, digest in sorted(self.history.manifests.items()):
            if digest not in needed and not await self.store.exists(self.bus.keys.manifest(digest)):
                found["gone"] += 1
                continue
            manifest = await self._manifest(version, digest)
            found["versions"] += 1
            found["objects"] += 1
            for shard in manifest.shards:
                if shard.sha256 not in seen:
                    seen.add(shard.sha256)
                    await self._shard(shard)
                    found["objects"] += 1
                    found["bytes"] += shard.size_bytes
        return found

    async def _needed(self) -> set[str]:
        """Digests of the manifests that kept versions need. Raises as `verify`."""
        bound = {digest: version for version, digest in self.history.manifests.items()}
        found: set[str] = set()
        for version in sorted(self.keep.versions):
            at: str | None = self.history.manifests[version]
            while at is not None and at not in found:
                found.add(at)
                manifest = await self._manifest(bound[at], at)
                at = None if manifest.has_anchor else manifest.parent_manifest
        return found

    async def _manifest(self, version: Version, digest: str) -> Manifest:
        try:
            manifest = await self.chain.manifest(digest)
        except MissingBlob:
            raise _missing(self.bus.keys.manifest(digest), f"the manifest of {version}") from None
        roots, manifests = self.history.roots, self.history.manifests
        lineage = (manifest.parent, manifest.parent_root, manifest.parent_manifest)
        parent = manifest.parent
        expected = (parent, roots.get(parent), manifests.get(parent)) if parent is not None else (None, None, None)
        if (manifest.version, manifest.root) != (version, roots[version]) or lineage != expected:
            raise PromiseViolated(
                f"manifest {digest} is bound to {version} and says something else than the ledger",
                why=f"it is of {manifest.version}, root {manifest.root[:16]}, from {manifest.parent}",
            )
        return manifest

    async def _shard(self, shard: ShardRef) -> None:
        key, read = self.bus.keys.shard(shard.sha256), hashlib.sha256()
        size_bytes, end = 0, shard.size_bytes + 1  # one byte more: nothing may follow
        try:
            while size_bytes < end:
                asked = min(READ_BYTES, end - size_bytes)
                part = await self.store.get_range(key, size_bytes, size_bytes + asked)
                read.update(part)
                size_bytes += len(part)
                if len(part) < asked:
                    break
        except MissingBlob:
            raise _missing(key, f"a {shard.kind} shard") from None
        except UnavailableError as error:
            if await self.store.exists(key):
                raise InputError(f"{key} is there and cannot be read", why=error.why) from None
            raise
        if (size_bytes, read.hexdigest()) != (shard.size_bytes, shard.sha256):
            raise InputError(
                f"{key} is damaged",
                why=f"{size_bytes} bytes were read, {shard.size_bytes} were published under another SHA-256",
                hint="restore the object from a copy of the store; nobody applies it as it is",
            )

    async def diff(self, old: Version, new: Version) -> list[Found]:
        """Per tensor that carries bytes: which fraction of its elements differs between two versions."""
        retrier = Retrier(limits=TransferLimits(), rng=random.Random())
        fetcher = Fetcher(store=self.store.once(), keys=self.bus.keys, public_key=self.key, retrier=retrier)
        with tempfile.TemporaryDirectory(prefix="headway-diff-") as scratch:
            mirror = HostMirror(Path(scratch), self.key, fsync=False)
            mirror.commit(await fetcher.stage(old, self.digest(old), mirror))
            staged = await fetcher.stage(new, self.digest(new), mirror)
            before, after = mirror.tensors, mirror.fresh(staged)
            rows: list[Found] = []
            for entry in staged.manifest.tensors:
                if entry.alias is not None:
                    continue
                lanes, elements, changed = f"<u{DTYPE_BYTES[entry.dtype]}", math.prod(entry.shape), 0
                if entry.name in after:
                    differ = after[entry.name].view(lanes) != before[entry.name].view(lanes)
                    changed = int(np.count_nonzero(differ))
                fraction = changed / max(elements, 1)
                rows.append({"tensor": entry.name, "elements": elements, "changed": changed, "fraction": fraction})
            return rows

    async def garbage(self) -> dict[str, int]:
        """Key -> bytes of what no kept version or checkpoint needs."""
        return await unneeded(self.bus, self.history, self.chain, self.keep)


def _missing(key: str, what: str) -> InputError:
    return InputError(
        f"{key}, {what}, is missing",
        why="the ledger and run.toml's [retention] need it",
        hint="restore it from a copy of the store; if it was swept while fewer versions were kept, keep as few again",
    )


async def gc(bus: Bus, config: Config, key: bytes) -> Found:
    """Delete what nobody needs, at once, in a term of one's own: no grace is due where no trainer publishes.

    Raises InputError while a trainer is heard (it sweeps by itself), FencedOut when one begins meanwhile.
    """
    await require_no_trainer(bus, "it sweeps by itself, and would be fenced out in the middle of a step")
    versions = await Versions.of(bus, config)
    garbage = await versions.garbage()
    reader = LedgerReader(bus, signing.public_key(key))
    await reader.read_new()
    writer = LedgerWriter(bus, key, reader.tail)
    opened = Open(instance=INSTANCE, environment={})
    link = await writer.append(opened, versions.history.head, term=reader.tail.term + 1)
    await delete(bus, garbage, link.record.term, signing.public_key(key))
    return {"deleted": garbage}


# For people


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Left-aligned columns, escaped."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield escape("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _state(row: Found) -> str:
    if not row["stored"]:
        return "MISSING" if row["kept"] else "gone"
    return ("kept" if row["kept"] else "unneeded") + ("" if row["line"] else ", abandoned")


def ls_lines(rows: list[Found]) -> Iterator[str]:
    head = ("version", "parent", "delta", "anchor", "root", "checkpoint", "state")
    yield from table(
        [
            head,
            *(
                (
                    row["version"],
                    row.get("parent", ""),
                    str(row.get("delta_bytes", "")),
                    str(row.get("anchor_bytes", "")),
                    row["root"][:16],
                    "yes" if row["checkpoint"] else "",
                    _state(row),
                )
                for row in rows
            ),
        ]
    )


def show_lines(found: Found) -> Iterator[str]:
    for key in ("version", "manifest", "root", "parent", "parent_manifest"):
        yield escape(f"{key}: {found[key]}")
    yield from table(
        [("shard", "kind", "bytes"), *((s["sha256"], s["kind"], str(s["size_bytes"])) for s in found["shards"])]
    )
    rows = [(t["name"], t["dtype"], str(t["shape"]), t["xxh3"], t["alias"] or "") for t in found["tensors"]]
    yield from table([("tensor", "dtype", "shape", "xxh3", "tied to"), *rows])


def verify_lines(found: Found) -> Iterator[str]:
    yield f"{found['versions']} versions in {found['objects']} objects of {found['bytes']} bytes are what was published"
    if found["gone"]:
        yield f"{found['gone']} versions were swept: nothing needs them"


def diff_lines(rows: list[Found]) -> Iterator[str]:
    changed = sorted((row for row in rows if row["changed"]), key=lambda row: -row["fraction"])
    total = sum(row["changed"] for row in rows), max(sum(row["elements"] for row in rows), 1)
    yield from table(
        [
            ("changed", "of", "fraction", "tensor"),
            *((str(r["changed"]), str(r["elements"]), f"{r['fraction']:.4%}", r["tensor"]) for r in changed),
            (
                str(total[0]),
                str(total[1]),
                f"{total[0] / total[1]:.4%}",
                f"all; {len(rows) - len(changed)} are unchanged",
            ),
        ]
    )


def gc_lines(found: Found) -> Iterator[str]:
    done, keys = next(iter(found.items()))
    yield from (escape(f"{size_bytes:>12}  {key}") for key, size_bytes in keys.items())
    yield f"{len(keys)} objects of {sum(keys.values())} bytes {done.replace('_', ' ')}"


async def command(options: argparse.Namespace, folder: RunFolder, config: Config, say: Say) -> None:
    if options.verb == "ledger":
        await weights.command(options, folder, config, say)
        return

    async def gather(bus: Bus) -> Any:
        if options.verb == "gc" and not options.dry_run:
            keys = Path(folder.environment("trainer", config)["HEADWAY_KEYS_DIR"])
            return await gc(bus, config, signing.load_key(keys / "trainer.key"))
        versions = await Versions.of(bus, config)
        work: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "ls": versions.ls,
            "show": lambda: versions.show(options.version or versions.history.head),
            "verify": versions.verify,
            "diff": lambda: versions.diff(options.old, options.new),
        }
        return {"would_be_deleted": await versions.garbage()} if options.verb == "gc" else await work[options.verb]()

    found = await with_bus(config, folder, gather)
    lines: dict[str, Callable[[Any], Iterator[str]]] = {
        "ls": ls_lines,
        "show": show_lines,
        "verify": verify_lines,
        "diff": diff_lines,
        "gc": gc_lines,
    }
    for line in [json.dumps(found)] if options.json else lines[options.verb](found):
        say(line)
