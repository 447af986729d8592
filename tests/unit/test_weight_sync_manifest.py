import ast
import itertools
import os
import re
from pathlib import Path

import msgpack
import pytest

from headway.schemas import signing
from headway.schemas.errors import WireError
from headway.schemas.manifest import (
    NAME_CHARS_MAX,
    SHARD_BYTES_MAX,
    SHARDS_MAX,
    TENSOR_BYTES_MAX,
    Manifest,
    SealedManifest,
    ShardRef,
    TensorEntry,
    open_manifest,
    root_of,
    seal_manifest,
)
from headway.schemas.subjects import Keys
from headway.schemas.version import Version
from headway.schemas.wire import digest_of, pack

KEY = bytes(range(32))
PUBLIC = signing.public_key(KEY)


def entry(name, **changes):
    return TensorEntry(**{"name": name, "dtype": "BF16", "shape": (2, 3), "xxh3": "ab" * 16, **changes})


def manifest(**changes):
    tensors = changes.pop("tensors", (entry("a"), entry("b", alias="a"), entry("c", shape=())))
    fields = {
        "version": Version(0, 4),
        "root": root_of(tensors),
        "parent": Version(0, 3),
        "parent_root": "1" * 64,
        "parent_manifest": "2" * 64,
        "tensors": tensors,
        "shards": (ShardRef(sha256="3" * 64, size_bytes=10, kind="delta"),),
    }
    return Manifest(**{**fields, **changes})


def test_a_sealed_manifest_opens_to_the_same_and_seals_to_the_same_bytes():
    digest, sealed = seal_manifest(manifest(), KEY)
    assert digest == digest_of(sealed)
    assert open_manifest(sealed, digest, PUBLIC) == manifest()
    assert seal_manifest(open_manifest(sealed, digest, PUBLIC), KEY) == (digest, sealed)


def test_wrong_digest_and_wrong_signature_are_refused():
    digest, sealed = seal_manifest(manifest(), KEY)
    with pytest.raises(WireError, match="does not match its digest"):
        open_manifest(sealed + b"x", digest, PUBLIC)
    with pytest.raises(WireError) as error:
        open_manifest(sealed, digest, signing.public_key(os.urandom(32)))
    assert error.value.reason == "bad_signature"
    forged = pack(SealedManifest(payload=pack(manifest(parent_root="9" * 64)), signature=bytes(64)))
    with pytest.raises(WireError) as error:
        open_manifest(forged, digest_of(forged), PUBLIC)
    assert error.value.reason == "bad_signature"


@pytest.mark.parametrize(
    "change",
    [
        {"root": "0" * 64},
        {"parent_root": None},
        {"parent": Version(0, 4)},
        {"parent": None, "parent_root": None, "parent_manifest": None},
        {"tensors": (entry("b"), entry("a"))},
        {"tensors": (entry("a"), entry("a"))},
        {"tensors": (entry("a"), entry("b", alias="zz"))},
        {"tensors": (entry("a"), entry("b", alias="a", xxh3="cd" * 16))},
        {"tensors": (entry("a"), entry("b", alias="a"), entry("c", alias="b"))},
    ],
)
def test_inconsistent_manifests_cannot_be_made(change):
    with pytest.raises(ValueError):
        manifest(**change)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "F4"}, {"shape": (-1,)}, {"shape": (1,) * 9}, {"shape": (1 << 50,)}, {"xxh3": "ab"}, {"name": ""}],
)
def test_tensor_entries_are_bounded(change):
    with pytest.raises(ValueError):
        entry(**{"name": "a", **change})


def test_unknown_schema_numbers_and_garbage_are_refused():
    fields = msgpack.unpackb(pack(manifest()))
    for payload in (msgpack.packb({**fields, "schema_number": 2}), b"\xc1", msgpack.packb([1]), b""):
        sealed = pack(SealedManifest(payload=payload, signature=signing.sign(KEY, payload)))
        with pytest.raises(WireError):
            open_manifest(sealed, digest_of(sealed), PUBLIC)


def test_the_root_depends_on_every_part_of_every_tensor_and_not_on_order():
    tensors = [entry("a"), entry("b")]
    roots = {root_of(tensors), root_of([entry("a")])}
    for change in ({"name": "z"}, {"dtype": "F16"}, {"shape": (3, 2)}, {"xxh3": "cd" * 16}):
        roots.add(root_of([entry(**{"name": "a", **change}), entry("b")]))
    assert len(roots) == 6
    assert root_of(reversed(tensors)) == root_of(tensors)


BAD = (None, True, -1, 0, 1 << 30, 1 << 62, (1 << 64) - 1, 0.5, float("nan"), b"", [], {}, [1 << 40] * 9, ["a"] * 300)
BAD_TEXT = ("", "../../etc/passwd", "a/../b", "\0", "x" * 70_000, "0.1", "9" * 30 + ".1", "00" * 32)


def hostile():
    """Every field of a manifest, of a tensor and of a shard, with every bad value."""
    for path in ((), ("tensors", 1), ("shards", 0)):
        spot = msgpack.unpackb(pack(manifest()))
        for key in path:
            spot = spot[key]
        for field, value in itertools.product(spot, (*BAD, *BAD_TEXT)):
            fields = msgpack.unpackb(pack(manifest()))
            spot = fields
            for key in path:
                spot = spot[key]
            spot[field] = value
            yield fields


def test_a_signed_manifest_with_hostile_sizes_paths_or_counts_is_refused_or_within_its_bounds():
    """Even the trainer's own key gets nothing through that names a file, or is larger than what is declared."""
    taken = 0
    for fields in hostile():
        payload = msgpack.packb(fields)
        sealed = pack(SealedManifest(payload=payload, signature=signing.sign(KEY, payload)))
        try:
            found = open_manifest(sealed, digest_of(sealed), PUBLIC)
        except WireError:
            continue
        taken += 1
        assert all(t.nbytes <= TENSOR_BYTES_MAX and len(t.name) <= NAME_CHARS_MAX for t in found.tensors)
        assert all(0 < s.size_bytes <= SHARD_BYTES_MAX for s in found.shards)
        keys = Keys("run")
        named = [keys.shard(s.sha256) for s in found.shards] + [keys.manifest(found.parent_manifest or "0" * 64)]
        assert all(re.fullmatch(r"run/weights/[0-9a-f]{64}\.(shard|manifest)", name) for name in named)
    assert 0 < taken < 30


def test_more_shards_than_a_manifest_may_have_are_refused():
    fields = msgpack.unpackb(pack(manifest()))
    payload = msgpack.packb({**fields, "shards": fields["shards"] * (SHARDS_MAX + 1)})
    sealed = pack(SealedManifest(payload=payload, signature=signing.sign(KEY, payload)))
    with pytest.raises(WireError):
        open_manifest(sealed, digest_of(sealed), PUBLIC)


def test_nothing_about_versions_asks_what_time_it_is():
    """So no host's clock, however wrong, moves a version, a mirror or a sweep: waits are on monotonic clocks."""
    root = Path(__file__).parents[2]
    files = [*(root / "weight_sync").glob("*.py"), *(root / "trainer").glob("*.py")]
    files += [
        root / "schemas" / "manifest.py",
        root / "rollout_agent" / "head.py",
        root / "rollout_agent" / "weights.py",
    ]
    asked = [
        f"{file.name}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS
    ]
    assert asked == []


WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
