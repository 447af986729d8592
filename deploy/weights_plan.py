"""`headway weights plan`: what a swap would take at a size that nobody has at hand, from rates measured here.

A model of time, not a simulation: every stage is bytes over a measured rate, or round trips; stages that overlap
count as the slowest of them. docs/SCALING.md says what it leaves out.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

import numpy as np

from headway.schemas.errors import ConfigError, PromiseViolated
from headway.schemas.manifest import TensorEntry
from headway.schemas.wire import digest_of
from headway.weight_sync.codec import encode_chunk, warm_up
from headway.weight_sync.patch import join
from headway.weight_sync.publisher import PublishSettings
from headway.weight_sync.shard import RAW_BYTES_MAX, EncodedChunk, build_shards, patch_shard
from headway.weight_sync.tensors import checksum
from headway.weight_sync.transfer import TransferLimits

SAMPLE_BYTES = 64 << 20
FIRST_WINDOW_BYTES = 10 * 1448
"""What TCP sends before the first acknowledgement."""
GOODPUT = 0.95
VALUE_MAX = 1e100
"""Of whatever a plan is made of."""
"""Of a link's rate, what headers leave."""
T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Raw bytes a second of one core, and the size of a delta as a fraction of the raw bytes."""

    encode: float
    stage: float
    """Decoding a delta to places and values, and hashing the state that it leads to."""
    apply: float
    """Writing those into live tensors, and hashing them."""
    checksum: float
    sha256: float
    copy: float
    delta_fraction: float
    anchor_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The machines. Bytes a second are of one link: a rank's to the store, a region's from it, within a region."""

    model_bytes: float
    ranks: int
    rank_cores: float
    rank_up: float
    regions: int
    region_down: float
    rtt_s: float
    agents: int
    hosts: int
    host_cores: float
    lan: float
    warm: bool = False
    """Connections to the store are still open from the version before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Seconds and bytes of one version, announced to every agent of every region."""

    delta_bytes: float
    origin_egress_bytes: float
    encode_s: float
    upload_s: float
    published_s: float
    announce_s: float
    download_s: float
    stage_s: float
    apply_s: float
    pause_s: float
    served_s: float
    snapshot_s: float


def measure(changed: float, sample_bytes: int = SAMPLE_BYTES) -> Rates:
    """Rates of one core of this machine, on bf16 of N(0, 0.02) of which `changed` moved by one ulp."""
    rng = np.random.default_rng(0)
    lanes = (rng.normal(0, 0.02, sample_bytes // 2).astype(np.float32).view("<u4") >> 16).astype("<u2")
    fresh = lanes.copy()
    fresh[rng.random(len(lanes)) < changed] ^= 1
    old, new = lanes.view(np.uint8), fresh.view(np.uint8)
    step = PublishSettings().chunk_bytes
    spans = [slice(start, start + step) for start in range(0, sample_bytes, step)]
    warm_up(2)
    encode_s, coded = _timed(lambda: [encode_chunk(new[span], old[span], 2) for span in spans])
    out = np.empty(sample_bytes, np.uint8)
    copy_s = min(_timed(lambda: np.copyto(out, old))[0] for _ in range(3))
    old.flags.writeable = False
    chunks = [
        EncodedChunk(row=0, raw_offset=span.start, raw_bytes=step, encoding=kind, width=2, payload=payload)
        for span, (kind, payload) in zip(spans, coded, strict=True)
    ]
    row = TensorEntry(name="w", dtype="BF16", shape=(len(lanes),), xxh3=checksum(new))
    shards = list(build_shards(chunks, PublishSettings().shard_bytes))
    stage_s, staged = _timed(lambda: [patch_shard(shard, [row], {"w": old}, {"w"}) for shard in shards])
    patch = join([(0, part) for _, parts, _ in staged for part in parts], {0: "w"})["w"]

    def apply() -> str:
        patch.write(out)
        return checksum(out)

    apply_s, served = _timed(apply)
    if served != row.xxh3:
        raise PromiseViolated("a delta was decoded to other bytes than were encoded", why="a bug in the codec")
    raw = out.tobytes()
    _, anchor = encode_chunk(new[spans[0]], None, 2)
    return Rates(
        encode=sample_bytes / encode_s,
        stage=sample_bytes / stage_s,
        apply=sample_bytes / apply_s,
        checksum=sample_bytes / _timed(lambda: checksum(out))[0],
        sha256=sample_bytes / _timed(lambda: digest_of(raw))[0],
        copy=sample_bytes / copy_s,
        delta_fraction=sum(len(payload) for _, payload in coded) / sample_bytes,
        anchor_fraction=len(anchor) / step,
    )


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this thread, which other work on the machine does not stretch; and what `work` returned."""
    began_s = time.thread_time()
    found = work()
    return max(time.thread_time() - began_s, 1e-9), found


def plan(shape: Shape, rates: Rates, limits: TransferLimits | None = None) -> Plan:
    """What the version takes: to publish, to reach the slowest agent, and for the engine to stand still.

    `snapshot_s` is the same way for the whole model without relays.
    """
    limits = limits or TransferLimits()
    delta, share = shape.model_bytes * rates.delta_fraction, shape.model_bytes / shape.ranks
    encode_s = share * (1 / rates.encode + 1 / rates.checksum) / shape.rank_cores
    upload_s = delta / shape.ranks / shape.rank_up + 2 * shape.rtt_s
    announce_s = 1.5 * shape.rtt_s  # heard, and looked up in the ledger
    connect_s = 0.0 if shape.warm else shape.rtt_s
    download_s = connect_s + shape.rtt_s  # the manifest
    download_s += 0.0 if shape.warm else shape.rtt_s  # the parent's, which the relay has once it took part in a swap
    download_s += connect_s + _transfer_s(delta, shape.region_down, shape.rtt_s, limits)
    download_s += delta * shape.agents / shape.lan + 2 * delta / rates.sha256 / max(1.0, shape.host_cores)
    held = shape.model_bytes / shape.hosts
    stage_s, apply_s = (held / rate / shape.host_cores for rate in (rates.stage, rates.apply))
    shards = math.ceil(max(shape.model_bytes / RAW_BYTES_MAX, delta / PublishSettings().shard_bytes))
    arrived_s = max(download_s, stage_s) + min(download_s, stage_s) / shards  # one is decoded while the next arrives
    written_s = held * (1 / rates.copy + 1 / rates.checksum) / shape.host_cores
    snapshot_s = announce_s + shape.model_bytes * shape.agents / shape.region_down / GOODPUT + written_s
    return Plan(
        delta_bytes=delta,
        origin_egress_bytes=delta * shape.regions,
        encode_s=encode_s,
        upload_s=upload_s,
        published_s=max(encode_s, upload_s),
        announce_s=announce_s,
        download_s=download_s,
        stage_s=stage_s,
        apply_s=apply_s,
        pause_s=apply_s,
        served_s=announce_s + arrived_s + apply_s,
        snapshot_s=snapshot_s,
    )


def _transfer_s(size: float, bytes_per_s: float, rtt_s: float, limits: TransferLimits) -> float:
    """A request, slow start over the ranges in flight, then the link's rate."""
    streams = min(limits.parallel, max(1.0, size / limits.range_bytes_min))
    window, sent, rounds = streams * FIRST_WINDOW_BYTES, 0.0, 0
    while sent < size and window < bytes_per_s * rtt_s:
        sent, window, rounds = sent + window, window * 2, rounds + 1
    return rounds * rtt_s + max(0.0, size - sent) / bytes_per_s / GOODPUT


def command(options: argparse.Namespace, say: Say) -> int:
    """Print the plan. Raises ConfigError for a rates file that is none."""
    shape = Shape(
        model_bytes=options.params * options.bytes_per_param,
        ranks=options.ranks,
        rank_cores=options.rank_cores,
        rank_up=options.rank_gbit * 1e9 / 8,
        regions=options.regions,
        region_down=options.region_gbit * 1e9 / 8,
        rtt_s=options.rtt_ms / 1e3,
        agents=options.agents,
        hosts=options.hosts,
        host_cores=options.host_cores,
        lan=options.lan_gbit * 1e9 / 8,
        warm=options.warm,
    )
    if not all(0 < value <= VALUE_MAX for name, value in asdict(shape).items() if name != "warm"):
        raise ConfigError(f"a size, a count or a rate of the plan is not above 0, or is above {VALUE_MAX:g}")
    if not 0 <= options.changed <= 1:
        raise ConfigError(f"--changed {options.changed:g}", why="it is a share of all elements", hint="--changed 0.01")
    rates = _read(options.rates) if options.rates else measure(options.changed)
    found = plan(shape, rates)
    if options.json:
        say(json.dumps({"shape": asdict(shape), "rates": asdict(rates), "plan": asdict(found)}))
        return 0
    for line in table(shape, rates, found):
        say(line)
    return 0


def table(shape: Shape, rates: Rates, found: Plan) -> Iterator[str]:
    """Lines for a person."""
    where = f"{shape.ranks} ranks, {shape.regions} regions of {shape.agents} agents on {shape.hosts} hosts each"
    yield f"{shape.model_bytes / 1e9:,.1f} GB of weights, {where}"
    measured = {name: value / 1e9 for name, value in asdict(rates).items() if not name.endswith("fraction")}
    yield "rates of one core, GB/s: " + ", ".join(f"{name} {value:.2f}" for name, value in measured.items())
    notes = {
        "delta_bytes": f"{1 / rates.delta_fraction:,.0f} times smaller",
        "origin_egress_bytes": "one copy a region",
        "published_s": "encoding and uploading overlap each other and the next step",
        "download_s": "store to relay to every agent",
        "stage_s": "while serving",
        "pause_s": "written and proven in place; an engine with room for two sets only exchanges them",
        "served_s": "announcement to the last agent",
        "snapshot_s": f"the same with whole snapshots: {found.snapshot_s / found.served_s:,.0f} times as long",
    }
    for name, value in asdict(found).items():
        shown = f"{value / 1e9:12,.3f} GB" if name.endswith("_bytes") else f"{value:12,.2f} s "
        yield f"  {name:20}{shown}  {notes.get(name, '')}".rstrip()


def _read(path: Path) -> Rates:
    try:
        found = json.loads(path.read_text())
        rates = {field.name: float(found["rates"][field.name]) for field in fields(Rates)}
        if wrong := [name for name, value in rates.items() if not 0 < value <= VALUE_MAX]:
            raise ValueError(f"{wrong[0]} = {rates[wrong[0]]} is no rate")
        return Rates(**rates)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no rates", why=repr(error)[:200], hint="`headway weights plan --json > FILE` makes it"
        ) from None
