"""`headway inspect`: everything the streams and the store know about one rollout, step or version."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any

from headway.bus.blobs import MissingBlob
from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader, Link
from headway.bus.reader import read_all
from headway.deploy import tokens
from headway.deploy.local import with_bus
from headway.deploy.progress import escape
from headway.deploy.run_folder import RunFolder
from headway.schemas.config import Config
from headway.schemas.errors import InputError, WireError
from headway.schemas.ledger import Drops, Fork, Genesis, Step
from headway.schemas.manifest import open_manifest
from headway.schemas.messages import H_ROLLOUT, Applied, Event, Rollout, Stamp, Task, TrainerStamp
from headway.schemas.trajectory import Span
from headway.schemas.version import Version
from headway.schemas.vocab import decode
from headway.schemas.wire import H_KIND, M

Found = dict[str, Any]
Say = Callable[[str], None]


async def _of(bus: Bus, suffix: str, cls: type[M], header: str, value: str) -> AsyncIterator[tuple[int, M]]:
    """(sequence, message) of every readable message of that kind whose header has the value."""
    async for stored in read_all(bus, suffix):
        if stored.headers.get(H_KIND) == cls.KIND and stored.headers.get(header) == value:
            try:
                yield stored.seq, await bus.open(cls, stored)
            except WireError:
                continue  # the audit counts it


def _spans(spans: list[Span]) -> str:
    return " ".join(f"[{span.start},{span.end}) {span.version}" for span in spans)


async def rollout(bus: Bus, rollout_id: str) -> Found:
    """Task, attempts with transcript and verdict, stamps, and what the ledger made of it. Raises InputError."""
    found: Found = {"rollout": rollout_id}
    async for seq, task in _of(bus, "TASKS", Task, H_ROLLOUT, rollout_id):
        kept = task.model_dump(mode="json", exclude={"task_set", "groups_issued", "eval_blocks_issued", "rollout_id"})
        found["task"] = {"seq": seq, **kept}
    found["attempts"] = {}
    async for stored in read_all(bus, "ROLLOUTS"):
        if stored.headers.get(H_ROLLOUT) == rollout_id:
            try:
                attempt = _attempt(await bus.open(Rollout, stored))
            except WireError as error:
                attempt = {"refused": error.what}
            found["attempts"][f"seq {stored.seq}"] = attempt
    if "task" not in found and not found["attempts"]:
        raise InputError(f"run {bus.run} has no rollout {rollout_id!r}", hint="ids look like g0000012s003")
    async for _, stamp in _of(bus, "STAMPS", Stamp, H_ROLLOUT, rollout_id):
        found[f"stamp of attempt {stamp.attempt}"] = f"head {stamp.head}, {stamp.tokens} tokens, {_spans(stamp.spans)}"
    async for _, verdict in _of(bus, "STAMPS", TrainerStamp, H_ROLLOUT, rollout_id):
        found["trainer's stamp"] = verdict.model_dump(mode="json", exclude={"rollout_id"})
    found["fate"] = "undecided"
    async for link in LedgerReader(bus).links():
        body = link.record.body
        if isinstance(body, Step) and any(one.rollout_id == rollout_id for one in body.consumed):
            found["fate"] = f"trained by step {body.version}"
        for drop in body.drops if isinstance(body, Step | Drops) else ():
            if drop.rollout_id == rollout_id:
                found["fate"] = f"dropped as {drop.reason}, declared at {link.version} (ledger {link.seq})"
    return found


def _attempt(found: Rollout) -> Found:
    trajectory, verdict = found.trajectory, found.verdict
    shown: Found = {
        "attempt": f"{found.attempt}, delivery {found.delivery}, by {found.region}/{found.agent}",
        "outcome": f"{found.outcome}{'' if found.terminal else ', given back'}",
        **({"reason": found.reason} if found.reason else {}),
        "timings": "  ".join(f"{key} {ms:.1f} ms" for key, ms in found.timings_ms.items()),
        "commands": [f"{c.tool} {c.ms:.1f} ms {'ok' if c.ok else 'failed'}" for c in found.commands],
    }
    if verdict is not None:
        shown["verdict"] = verdict.peek_verdict().model_dump(mode="json", exclude={"run", "rollout_id", "attempt"})
    if trajectory is not None:
        shown["tokens"] = f"{len(trajectory.token_ids)}, {int(trajectory.loss_mask.sum())} sampled"
        shown["versions"] = _spans(trajectory.spans)
        shown["end"] = f"{trajectory.stop_reason} after {trajectory.turns} turns"
        shown["transcript"] = decode(trajectory.token_ids.tolist()).split("\n")
    return shown


async def _links(bus: Bus) -> list[Link]:
    return [link async for link in LedgerReader(bus).links()]


async def step(bus: Bus, version: Version) -> Found:
    """The ledger's record and the trainer's event about it. Raises InputError."""
    for link in await _links(bus):
        body = link.record.body
        if isinstance(body, Step) and body.version == version:
            found: Found = {"ledger": f"sequence {link.seq}, term {link.record.term}, record {link.digest}"}
            found |= body.model_dump(mode="json", exclude={"consumed", "drops", "rng", "kind"})
            found["trained on"] = [f"{one.rollout_id} seq {one.seq} reward {one.reward:g}" for one in body.consumed]
            found["dropped"] = [f"{one.rollout_id} seq {one.seq} {one.reason}" for one in body.drops]
            async for _, event in _of(bus, "EVENTS", Event, "Headway-Event", "step"):
                if event.fields.get("version") == str(version):
                    found["event"] = dict(event.fields)
            return found
    raise InputError(f"run {bus.run} has no step {version}", hint=f"headway top {bus.run} --once")


async def version(bus: Bus, wanted: Version) -> Found:
    """What binds it, its manifest and sizes, and who applied it when. Raises InputError."""
    key = b""
    for link in await _links(bus):
        body = link.record.body
        key = body.trainer_key if isinstance(body, Genesis) else key
        if not isinstance(body, Genesis | Step | Fork) or link.version != wanted:
            continue
        digest = body.base_manifest if isinstance(body, Genesis) else body.manifest
        found: Found = {"version": str(wanted), "bound by": f"{body.kind}, ledger sequence {link.seq}"}
        found |= await _manifest(bus, digest, key)
        found["applied"] = []
        async for stored in read_all(bus, "EVENTS", filter_subject=f"rl.{bus.run}.applied.>"):
            applied = await bus.open(Applied, stored)
            if applied.version == wanted:
                when = datetime.fromtimestamp(stored.time_s, UTC).isoformat(timespec="milliseconds")
                found["applied"].append(
                    f"{when} {applied.region}/{applied.agent} fetched {applied.fetched_bytes} bytes in "
                    f"{applied.fetch_ms:.1f} ms, staged {applied.stage_ms:.1f} ms, paused {applied.pause_ms:.1f} ms"
                )
        return found
    raise InputError(f"run {bus.run} has no version {wanted}", hint=f"headway top {bus.run} --once")


async def _manifest(bus: Bus, digest: str, key: bytes) -> Found:
    assert bus.store is not None
    try:
        manifest = open_manifest(await bus.store.get(bus.keys.manifest(digest)), digest, key)
    except (MissingBlob, WireError) as error:
        return {"manifest": digest, "unreadable": error.what}
    full = sum(entry.nbytes for entry in manifest.tensors if entry.alias is None)
    shards = [f"{shard.kind} {shard.size_bytes} bytes {shard.sha256}" for shard in manifest.shards]
    sizes = f"{full} bytes in {len(manifest.tensors)} tensors"
    sizes += f", delta {manifest.size_bytes('delta')}, anchor {manifest.size_bytes('anchor')}"
    return {"manifest": digest, "root": manifest.root, "parent": str(manifest.parent), "size": sizes, "shards": shards}


def lines(found: Any, indent: str = "") -> Iterator[str]:
    """A nested picture as indented lines, escaped."""
    for key, value in found.items():
        if isinstance(value, dict | list) and value:
            yield f"{indent}{escape(str(key))}:"
            if isinstance(value, dict):
                yield from lines(value, indent + "  ")
            else:
                yield from (f"{indent}  {escape(str(item))}" for item in value)
        else:
            yield f"{indent}{escape(str(key))}: {escape(str(value)) if value not in ({}, []) else 'none'}"


async def command(options: argparse.Namespace, folder: RunFolder, config: Config, say: Say) -> None:
    looks: dict[str, Callable[[Bus, Any], Coroutine[Any, Any, Found]]] = {
        "rollout": rollout,
        "step": step,
        "version": version,
    }
    look = looks[options.what]
    if options.tokens and options.what != "rollout":
        raise InputError("--tokens is for rollouts", why=f"not for a {options.what}")
    try:
        wanted = options.id if options.what == "rollout" else Version.parse(options.id)
    except ValueError as error:
        raise InputError(str(error)) from None
    if options.tokens:
        for line in await with_bus(
            config, folder, lambda bus: tokens.lines(bus, folder, config, options.id, options.under)
        ):
            say(line)
        return
    for line in lines(await with_bus(config, folder, lambda bus: look(bus, wanted))):
        say(line)
