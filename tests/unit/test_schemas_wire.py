"""Messages survive the wire unchanged, and hostile bytes are refused with a typed error."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.schemas import wire
from headway.schemas.errors import WireError
from headway.schemas.ledger import (
    CHAIN_START,
    Consumed,
    Drop,
    DropReason,
    Drops,
    Fork,
    Genesis,
    LedgerEntry,
    Open,
    Record,
    Step,
    seal_record,
)
from headway.schemas.ledger import Counters as LedgerCounters
from headway.schemas.messages import (
    BUS_MESSAGES,
    Applied,
    Dead,
    Event,
    Rollout,
    Signed,
    Stamp,
    Task,
    TrainerStamp,
    WeightsAnnounced,
)
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import Envelope, Message, open_envelope, pack, unpack

ids = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
versions = st.builds(Version, st.integers(0, 9), st.integers(0, 1 << 39))
finite = st.floats(-1e6, 1e6, width=32)


@st.composite
def trajectories(draw: Any) -> Trajectory:
    tokens = draw(st.integers(2, 40))
    mask = np.array([0, *draw(st.lists(st.integers(0, 1), min_size=tokens - 1, max_size=tokens - 1))], np.uint8)
    spans = []
    version = draw(versions)
    for index in np.flatnonzero(mask).tolist():
        if draw(st.booleans()):
            version = draw(versions)
        spans.append(Span(start=index, end=index + 1, version=version))
    logprobs = np.where(
        mask == 1, -np.array(draw(st.lists(st.floats(0, 50, width=32), min_size=tokens, max_size=tokens))), 0
    )
    k, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Trajectory(
        token_ids=np.array(draw(st.lists(st.integers(0, 1 << 30), min_size=tokens, max_size=tokens)), np.int32),
        loss_mask=mask,
        logprobs=logprobs.astype(np.float32),
        spans=spans,
        routes=np.full(
            (tokens - 1, layers, k), draw(st.integers(0, 255)), draw(st.sampled_from([np.uint8, np.uint16]))
        ),
        route_spans=[Span(start=0, end=tokens - 1, version=version)],
        layer_map=list(range(layers)),
        temperature=draw(st.floats(0.125, 10, width=32)),
        turns=draw(st.integers(0, 99)),
        stop_reason=draw(st.sampled_from(["submitted", "malformed", "turn_limit", "length", "aborted"])),
    )


@st.composite
def rollouts(draw: Any) -> Rollout:
    ok = draw(st.booleans())
    return Rollout(
        rollout_id=draw(ids),
        attempt=draw(ids),
        purpose=draw(st.sampled_from(["train", "eval"])),
        outcome="ok" if ok else "infra_failed",
        terminal=ok or draw(st.booleans()),
        reason=draw(st.text(max_size=100)),
        group=draw(st.integers(0, 1 << 40)),
        sample=draw(st.integers(0, 1 << 20)),
        task_id=draw(ids),
        task_seq=draw(st.integers(0, 1 << 40)),
        delivery=draw(st.integers(1, 99)),
        region=draw(ids),
        agent=draw(ids),
        reward=draw(finite) if ok else None,
        trajectory=draw(trajectories()) if ok else None,
        verdict=Signed(payload=draw(st.binary(max_size=99)), signature=draw(st.binary(max_size=64))) if ok else None,
        timings_ms=draw(st.dictionaries(st.text(max_size=9), finite, max_size=4)),
    )


tasks = st.builds(
    Task,
    rollout_id=ids,
    purpose=st.sampled_from(["train", "eval"]),
    env=ids,
    task_set=st.just("a" * 64),
    task_id=ids,
    group=st.integers(0, 1 << 40),
    sample=st.integers(0, 1 << 20),
    temperature=st.floats(0, 10, width=32),
    sampling_seed=st.integers(0, (1 << 63) - 1),
    pinned=st.none() | versions,
    groups_issued=st.integers(0, 1 << 40),
    eval_blocks_issued=st.integers(0, 99),
    last_of_unit=st.booleans(),
)
events = st.builds(
    Event,
    service=ids,
    instance=ids,
    name=ids,
    fields=st.dictionaries(
        st.text(max_size=9), st.booleans() | st.integers(-9, 9) | finite | st.text(max_size=9), max_size=5
    ),
)
stamps = st.builds(
    TrainerStamp,
    rollout_id=ids,
    version=versions,
    outcome=st.sampled_from(["trained", "dropped:stale"]),
    lag_min=st.integers(-1, 9),
    lag_max=st.integers(-1, 9),
    tokens_trained=st.integers(0, 99),
    tokens_masked=st.integers(0, 99),
)


digests = st.text("0123456789abcdef", min_size=64, max_size=64)
counts = st.integers(0, 1 << 40)
amounts = st.floats(0, 1e6, width=32)
words = st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=4)
STRATEGIES: dict[type[Message], st.SearchStrategy[Any]] = {
    Rollout: rollouts(),
    Task: tasks,
    Event: events,
    TrainerStamp: stamps,
    Stamp: st.builds(
        Stamp,
        rollout_id=ids,
        attempt=ids,
        spans=st.lists(st.builds(Span, start=st.just(0), end=st.integers(1, 9), version=versions), max_size=3),
        tokens=counts,
        head=versions,
    ),
    WeightsAnnounced: st.builds(
        WeightsAnnounced,
        version=versions,
        parent=st.none() | versions,
        manifest=digests,
        root=digests,
        delta_bytes=counts,
        full_bytes=counts,
        changed_fraction=st.floats(0, 1, width=32),
    ),
    Applied: st.builds(
        Applied,
        region=ids,
        agent=ids,
        version=versions,
        root=digests,
        fetched_bytes=counts,
        fetch_ms=amounts,
        stage_ms=amounts,
        pause_ms=amounts,
        in_flight=counts,
    ),
    Dead: st.builds(
        Dead,
        reason=ids,
        detail=st.text(max_size=99),
        subject=st.text(max_size=99),
        stream_seq=counts,
        original_headers=words,
        body=st.binary(max_size=99),
    ),
    LedgerEntry: st.builds(
        LedgerEntry,
        payload=st.binary(max_size=99),
        signature=st.binary(max_size=64),
        version=versions,
        record_kind=st.sampled_from(["genesis", "open", "step", "drops", "fork"]),
    ),
}
dropped = st.lists(
    st.builds(Drop, rollout_id=ids, seq=counts, reason=st.sampled_from(get_args(DropReason))), max_size=4
)
counters = st.builds(LedgerCounters, trained_rollouts=counts, dropped_rollouts=counts, void_groups=counts)
bodies = st.one_of(
    st.builds(
        Genesis,
        run=ids,
        config=words,
        config_digest=digests,
        task_set=digests,
        base_manifest=digests,
        base_root=digests,
        trainer_key=st.binary(max_size=32),
        sandbox_key=st.binary(max_size=32),
    ),
    st.builds(Open, instance=ids, environment=words),
    st.builds(
        Step,
        version=versions,
        parent=versions,
        consumed=st.lists(st.builds(Consumed, rollout_id=ids, seq=counts, reward=finite), max_size=4),
        drops=dropped,
        cursor=counts,
        pool=st.lists(counts, max_size=4),
        counters=counters,
        rng=st.binary(max_size=9),
        metrics=st.dictionaries(st.text(max_size=9), finite, max_size=4),
        checkpoint=digests,
        manifest=digests,
        root=digests,
    ),
    st.builds(Drops, drops=dropped, cursor=counts, pool=st.lists(counts, max_size=4), counters=counters),
    st.builds(Fork, version=versions, base=versions, checkpoint=digests, manifest=digests, root=digests),
)
records = st.builds(Record, prev=digests, term=counts, index=counts, body=bodies)


def same(a: Any, b: Any) -> bool:
    return msgpack.packb(a.model_dump()) == msgpack.packb(b.model_dump())


def test_every_kind_of_message_has_a_property_test() -> None:
    assert STRATEGIES.keys() == {*BUS_MESSAGES.values(), LedgerEntry}


@settings(max_examples=100, deadline=None)
@given(records)
def test_every_ledger_record_survives_the_wire_unchanged(record: Record) -> None:
    assert unpack(Record, pack(record)) == record


@settings(max_examples=200, deadline=None)
@given(st.one_of(*STRATEGIES.values()))
def test_every_message_survives_the_wire_unchanged(message: Any) -> None:
    envelope = Envelope.seal(message)
    assert envelope.body == msgpack.packb(message.model_dump()), "two ways of writing disagree"
    found = open_envelope(type(message), envelope.headers, envelope.body)
    assert same(found, message)
    assert Envelope.seal(found) == envelope


@settings(max_examples=60, deadline=None)
@given(rollouts(), st.data())
def test_truncated_or_flipped_bytes_never_pass(message: Rollout, data: Any) -> None:
    envelope = Envelope.seal(message)
    cut = data.draw(st.integers(0, len(envelope.body) - 1))
    with pytest.raises(WireError):
        open_envelope(Rollout, envelope.headers, envelope.body[:cut])
    flipped = bytearray(envelope.body)
    flipped[cut] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError, match="digest"):
        open_envelope(Rollout, envelope.headers, bytes(flipped))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_only_typed_errors(body: bytes) -> None:
    for cls in BUS_MESSAGES.values():
        with pytest.raises(WireError):
            unpack(cls, b"\xc1" + body)
        with contextlib.suppress(WireError):
            unpack(cls, body)


def good() -> Trajectory:
    return Trajectory(
        token_ids=np.array([256, 1, 2, 3], np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.uint8),
        logprobs=np.array([0, 0, -1, -0.5], np.float32),
        spans=[Span(start=2, end=4, version=Version(0, 3))],
        routes=np.zeros((3, 2, 2), np.uint8),
        route_spans=[Span(start=0, end=3, version=Version(0, 3))],
        layer_map=[0, 1],
        temperature=1.0,
        turns=1,
        stop_reason="submitted",
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", ["float32", [4], np.array([0, 0, np.nan, -1], np.float32).tobytes()]),
        ("logprobs", ["float32", [4], np.array([0, 0, np.inf, -1], np.float32).tobytes()]),
        ("logprobs", ["float64", [4], bytes(32)]),
        ("logprobs", ["float32", [5], bytes(16)]),
        ("logprobs", ["float32", [2, 2], bytes(16)]),
        ("token_ids", ["int32", [-1], b""]),
        ("token_ids", ["int32", [1 << 62], b""]),
        ("token_ids", ["object", [4], bytes(32)]),
        ("token_ids", ["int32", [0], b""]),
        ("token_ids", ["int32", [4], np.array([-1, 0, 0, 0], np.int32).tobytes()]),
        ("loss_mask", ["uint8", [4], b"\0\0\1\2"]),
        ("loss_mask", ["uint8", [4], b"\1\0\1\1"]),
        ("spans", []),
        ("spans", [{"start": 2, "end": 3, "version": "0.3"}]),
        ("spans", [{"start": 1, "end": 4, "version": "0.3"}]),
        ("spans", [{"start": 2, "end": 4, "version": "0.3"}, {"start": 3, "end": 4, "version": "0.4"}]),
        ("spans", [{"start": 2, "end": 2, "version": "0.3"}]),
        ("spans", [{"start": 2, "end": 4, "version": "three"}]),
        ("routes", ["uint8", [2, 2, 2], bytes(8)]),
        ("routes", ["uint8", [3, 1, 2], bytes(6)]),
        ("route_spans", [{"start": 0, "end": 2, "version": "0.3"}]),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("stop_reason", "bored"),
        ("turns", 1 << 62),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(field: str, value: Any) -> None:
    fields = good().model_dump()
    assert same(unpack(Trajectory, msgpack.packb(fields)), good())
    fields[field] = value
    with pytest.raises(WireError) as caught:
        unpack(Trajectory, msgpack.packb(fields))
    assert caught.value.reason in ("invalid", "bad_routes")


def test_an_oversized_body_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BODY_BYTES_MAX", 10)
    with pytest.raises(WireError) as caught:
        unpack(Task, b"x" * 11)
    assert caught.value.reason == "oversize"


@pytest.mark.parametrize("schema", ["2", "0", "", "x", None])
def test_an_unknown_schema_is_refused_and_never_guessed_at(schema: str | None) -> None:
    envelope = Envelope.seal(Stamp(rollout_id="g", attempt="a", spans=[], tokens=0, head=Version(0, 0)))
    headers = {k: v for k, v in envelope.headers.items() if k != wire.H_SCHEMA}
    if schema is not None:
        headers[wire.H_SCHEMA] = schema
    with pytest.raises(WireError) as caught:
        open_envelope(Stamp, headers, envelope.body)
    assert caught.value.reason == "unknown_schema"


def test_fields_added_within_a_schema_number_are_ignored() -> None:
    stamp = Stamp(rollout_id="g", attempt="a", spans=[], tokens=0, head=Version(0, 0))
    body = msgpack.packb({**stamp.model_dump(), "added_later": 1})
    assert unpack(Stamp, body) == stamp


def test_decoded_arrays_cannot_be_written() -> None:
    found = unpack(Trajectory, pack(good()))
    with pytest.raises(ValueError, match="read-only"):
        found.token_ids[0] = 1


def test_a_ledger_record_keeps_its_bytes_and_its_signature() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    drops = Drops(drops=[Drop(rollout_id="g1", seq=3, reason="stale")], cursor=4, pool=[2], counters=LedgerCounters())
    record = Record(prev=CHAIN_START, term=1, index=0, body=drops)
    entry = seal_record(record, Version(0, 1), key.private_bytes_raw())
    envelope = Envelope.seal(entry)
    found = open_envelope(LedgerEntry, envelope.headers, envelope.body)
    assert found.open(key.public_key().public_bytes_raw()) == record
    forged = found.model_copy(update={"payload": found.payload.replace(b"stale", b"other")})
    with pytest.raises(WireError, match="signature"):
        forged.open(key.public_key().public_bytes_raw())
