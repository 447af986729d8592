"""`headway weights`: on a real run, with objects damaged, removed and swept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.bus import failpoints
from headway.bus.ledger import LedgerReader
from headway.deploy import weight_versions
from headway.deploy.weight_versions import Versions
from headway.schemas import signing
from headway.schemas.errors import FencedOut, InputError, PromiseViolated
from headway.schemas.manifest import Manifest, seal_manifest
from headway.schemas.version import Version
from headway.trainer.audit import audit
from headway.trainer.retention import delete

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def hear_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats come once a second; these tests have no fleet but where they say so."""
    from headway.deploy import control
    from headway.deploy.fleet import Fleet, listen

    async def short(bus: Any) -> Fleet:
        return await listen(bus, 0.05)

    monkeypatch.setattr(weight_versions, "listen", short)
    monkeypatch.setattr(control, "listen", short)


@pytest.fixture
async def run(make_run: Make) -> Any:
    """Twenty steps."""
    made = make_run(steps=20)
    async with made.dispatcher(), made.agent(lambda task, head: made.graded(task, task.sampling_seed % 2 * 1.0, head)):
        async with made.trainer():
            await made.wait_for_step(20)
    made.keeping = made.config.model_copy(
        update={"retention": made.config.retention.model_copy(update={"versions": 4})}
    )
    return made


def key_of(run: Any) -> bytes:
    return signing.load_key(run.folder / "keys" / "trainer.key")


async def shard_of(run: Any, n: int, kind: Any = "delta") -> str:
    versions = await Versions.of(run.bus, run.config)
    manifest = await versions.chain.manifest(versions.digest(Version(0, n)))
    return str(run.bus.keys.shard(manifest.shard_refs(kind)[0].sha256))


async def damage(run: Any, key: str, data: bytes | None) -> None:
    await run.bus.store.delete(key)
    if data is not None:
        await run.bus.store.put(key, data)


async def test_versions_are_listed_shown_and_compared(run: Any) -> None:
    versions = await Versions.of(run.bus, run.config)
    rows = await versions.ls()
    assert [row["version"] for row in rows] == [f"0.{n}" for n in range(21)]
    assert [row["version"] for row in rows if row["anchor_bytes"]] == ["0.0", "0.16"]
    assert [row["version"] for row in rows if row["checkpoint"]] == ["0.18", "0.19", "0.20"]
    head = await versions.show(Version(0, 20))
    assert (head["root"], head["parent"]) == (versions.history.roots[Version(0, 20)], "0.19")
    [same] = {row["changed"] for row in await versions.diff(Version(0, 5), Version(0, 5))}
    assert same == 0
    changed = await versions.diff(Version(0, 3), Version(0, 20))
    assert {row["tensor"] for row in changed} == {t["name"] for t in head["tensors"]}
    assert 0.1 < sum(row["changed"] for row in changed) / sum(row["elements"] for row in changed) <= 1
    assert all(row["fraction"] == row["changed"] / row["elements"] for row in changed)
    for lines in (
        weight_versions.ls_lines(rows),
        weight_versions.show_lines(head),
        weight_versions.diff_lines(changed),
    ):
        assert len(list(lines)) > 3
    with pytest.raises(InputError, match=r"no version 0\.99"):
        versions.digest(Version(0, 99))


async def test_verify_passes_and_names_the_first_bad_object(run: Any) -> None:
    versions = await Versions.of(run.bus, run.config)
    assert (await versions.verify())["versions"] == 21
    key = await shard_of(run, 7)
    data = await run.bus.store.get(key)
    for wrong in (data[:-1], data + b"x", bytes([data[0] ^ 1]) + data[1:], b"", None):
        await damage(run, key, wrong)
        with pytest.raises(InputError, match=key) as caught:
            await versions.verify()
        assert caught.value.exit_code == 65
    await damage(run, await shard_of(run, 3), b"earlier")
    with pytest.raises(InputError, match=await shard_of(run, 3)):
        await versions.verify()
    manifest = run.bus.keys.manifest(versions.digest(Version(0, 2)))
    await damage(run, manifest, b"x")
    with pytest.raises(InputError, match=versions.digest(Version(0, 2))[:16]):
        await versions.verify()
    await damage(run, manifest, None)
    with pytest.raises(InputError, match=r"the manifest of 0\.2, is missing"):
        await versions.verify()


async def test_a_signed_manifest_that_contradicts_the_ledger_is_a_broken_promise(run: Any) -> None:
    versions = await Versions.of(run.bus, run.config)
    right = await versions.chain.manifest(versions.digest(Version(0, 9)))
    fields = {name: getattr(right, name) for name in Manifest.model_fields}
    for lie in ({"version": Version(0, 10)}, {"parent_root": "0" * 64}, {"parent": Version(0, 7)}):
        digest, sealed = seal_manifest(Manifest(**{**fields, **lie}), key_of(run))
        await run.bus.store.put(run.bus.keys.manifest(digest), sealed)
        versions.history.manifests[Version(0, 9)] = digest
        with pytest.raises(PromiseViolated, match="says something else than the ledger") as caught:
            await versions.verify()
        assert caught.value.exit_code == 70


async def test_gc_says_and_then_deletes_what_nothing_needs_in_a_term_of_its_own(run: Any) -> None:
    versions = await Versions.of(run.bus, run.keeping)
    said = await versions.garbage()
    assert len(said) > 16
    assert all([await run.bus.store.exists(key) for key in said])
    assert (await weight_versions.gc(run.bus, run.keeping, key_of(run)))["deleted"] == said
    assert not any([await run.bus.store.exists(key) for key in said])
    with pytest.raises(FencedOut):  # whoever still believes to be the trainer
        await delete(run.bus, ["test/weights/x"], versions.history.term, versions.key)
    after = await Versions.of(run.bus, run.keeping)
    assert await after.garbage() == {}
    verified = await after.verify()
    assert (verified["versions"], verified["gone"]) == (5, 16)
    states = [weight_versions._state(row) for row in await after.ls()]
    assert states == ["gone"] * 16 + ["kept"] * 5
    assert [link.record.body.kind for link in await LedgerReader(run.bus).read_new()][-1] == "open"
    assert (await audit(run.bus)).violations == []
    await run.bus.store.delete(await shard_of(run, 16, "anchor"))
    with pytest.raises(InputError, match="anchor shard, is missing"):
        await after.verify()


async def test_gc_is_refused_while_a_trainer_is_heard(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.deploy import control
    from headway.deploy.fleet import Fleet

    async def busy(bus: Any) -> Fleet:
        fleet = Fleet(clock=lambda: 0.0)
        fleet.take(("beat", "trainer", "t"), b"{}")
        return fleet

    monkeypatch.setattr(control, "listen", busy)
    tail = await run.bus.last("LEDGER")
    with pytest.raises(InputError, match="trainer t is running"):
        await weight_versions.gc(run.bus, run.keeping, key_of(run))
    assert (await run.bus.last("LEDGER")).seq == tail.seq


async def test_the_command_prints_a_table_or_json(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from headway.deploy.cli.options import parser

    async def with_bus(config: Any, folder: Any, read: Any) -> Any:
        return await read(run.bus)

    class Folder:
        def environment(self, role: str, config: Any) -> dict[str, str]:
            return {"HEADWAY_KEYS_DIR": str(run.folder / "keys")}

    monkeypatch.setattr(weight_versions, "with_bus", with_bus)

    async def says(*argv: str) -> list[str]:
        lines: list[str] = []
        await weight_versions.command(parser().parse_args(["weights", *argv]), Folder(), run.keeping, lines.append)  # type: ignore[arg-type]
        return lines

    assert (await says("ls", "r"))[1].split()[0] == "0.0"
    assert [row["version"] for row in json.loads("".join(await says("ls", "r", "--json")))][-1] == "0.20"
    assert (await says("show", "r"))[0] == "version: 0.20"
    assert (await says("verify", "r"))[0].startswith("21 versions in ")
    assert (await says("diff", "r", "0.19", "0.20"))[0].split() == ["changed", "of", "fraction", "tensor"]
    dry = json.loads("".join(await says("gc", "r", "--dry-run", "--json")))["would_be_deleted"]
    assert (await says("gc", "r", "--dry-run"))[-1].endswith("would be deleted")
    assert (await says("gc", "r"))[-1] == f"{len(dry)} objects of {sum(dry.values())} bytes deleted"


async def test_a_sweep_that_dies_anywhere_leaves_everything_that_is_needed(run: Any) -> None:
    """Killed again and again after a few more deletions: what the ledger needs verifies, nothing names what is gone."""

    class Died(BaseException):
        pass

    def dying(after: int) -> Any:
        left = [after]

        def hook(name: str) -> None:
            left[0] -= name.startswith("delete.")
            if left[0] < 0:
                raise Died

        return hook

    lives, before = 0, failpoints.install(None)
    try:
        while True:
            versions = await Versions.of(run.bus, run.keeping)
            assert (await versions.verify())["versions"] >= 5
            gone = [row["version"] for row in await versions.ls() if not row["stored"]]
            assert not set(gone) & {str(version) for version in versions.keep.versions}
            garbage = await versions.garbage()
            failpoints.install(dying(3 + lives))
            try:
                await delete(run.bus, garbage, versions.history.term, versions.key)
                break
            except Died:
                lives += 1
            finally:
                failpoints.install(None)
    finally:
        failpoints.install(before)
    assert lives > 4
    assert await (await Versions.of(run.bus, run.keeping)).garbage() == {}
