"""Coverage-guided hostile manifests: reading one ends in a manifest that packs and reads as itself, or in a WireError.

    python -P tests/fuzz/manifests.py -max_total_time=60 [a folder to keep findings in]

Needs the extra `fuzz`. An input is what a trainer's key would have signed; anything but a WireError stops the run.
"""

from __future__ import annotations

import functools
import sys

import atheris

with atheris.instrument_imports(include=["headway.schemas"]):
    from headway.schemas import signing
    from headway.schemas.manifest import Manifest, SealedManifest, ShardRef, TensorEntry, open_manifest, root_of

from headway.schemas.errors import WireError
from headway.schemas.version import Version
from headway.schemas.wire import digest_of, pack

KEY = bytes(range(32))
PUBLIC = signing.public_key(KEY)


@functools.cache
def seeds() -> list[bytes]:
    """Payloads of a first version and of a later one."""
    rows = tuple(
        TensorEntry(name=f"w{n}", dtype=dtype, shape=(n, 3), xxh3=f"{n:032x}")
        for n, dtype in enumerate(("BF16", "F32"))
    )
    tied = (*rows, rows[0].model_copy(update={"name": "w9", "alias": "w0"}))
    shard = ShardRef(sha256="a" * 64, size_bytes=10, kind="anchor")
    first = Manifest(
        version=Version(0, 0),
        root=root_of(tied),
        parent=None,
        parent_root=None,
        parent_manifest=None,
        tensors=tied,
        shards=(shard,),
    )
    parent = {"version": Version(0, 1), "parent": Version(0, 0), "parent_root": "b" * 64, "parent_manifest": "c" * 64}
    return [pack(first), pack(first.model_copy(update=parent))]


def one_input(payload: bytes) -> None:
    sealed = pack(SealedManifest(payload=payload, signature=signing.sign(KEY, payload)))
    try:
        found = open_manifest(sealed, digest_of(sealed), PUBLIC)
    except WireError:
        return
    if found.root != root_of(found.tensors) or open_again(found) != found:
        raise RuntimeError("a manifest that is not what it says")


def open_again(manifest: Manifest) -> Manifest:
    payload = pack(manifest)
    sealed = pack(SealedManifest(payload=payload, signature=signing.sign(KEY, payload)))
    return open_manifest(sealed, digest_of(sealed), PUBLIC)


def main() -> None:
    for payload in seeds():
        one_input(payload)
    atheris.Setup(sys.argv, one_input, custom_mutator=mutate)
    atheris.Fuzz()


def mutate(data: bytes, size_max: int, seed: int) -> bytes:
    base = seeds()[seed % len(seeds())] if seed % 5 == 0 or len(data) < 48 else data
    return bytes(atheris.Mutate(base, max(size_max, 2048)))


if __name__ == "__main__":
    main()
