"""`headway doctor` on machines, servers and stores that are well and that are not."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.bus.server import find_nats_server, free_port, wait_listening
from headway.bus.topology import Topology
from headway.deploy import doctor as module
from headway.deploy.cli import main as cli
from headway.deploy.doctor import Doctor, Finding
from headway.deploy.run_folder import RunFolder
from headway.kernels import selftest
from headway.sandbox import isolation
from headway.schemas.config import Config, parse_config
from headway.schemas.errors import UnavailableError

CONFIG = parse_config("", "test", {"run.name": "test", "dispatch.ack_wait_s": 1.0})
ALL = frozenset({"bus", "store", "sandbox", "host", "keys", "numerics"})


class Said(list[Finding]):
    """What a doctor told of the checks named."""

    @classmethod
    async def of(cls, folder: Path, *checks: str, config: Config = CONFIG, monitor: str = "") -> Said:
        said = cls()
        await Doctor(config=config, folder=RunFolder(folder), tell=said.append, monitor=monitor).examine(
            ALL - {*checks}
        )
        return said

    def one(self, level: str) -> Finding:
        [found] = [finding for finding in self if finding.level == level]
        return found

    def levels(self) -> set[str]:
        return {finding.level for finding in self}


@pytest.fixture
def server(nats_process: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HEADWAY_NATS_URL", nats_process.settings.url)
    monkeypatch.setenv("HEADWAY_NATS_TOKEN", nats_process.settings.token)
    return nats_process


def test_before_a_run_exists_everything_is_tried_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--run-dir", str(tmp_path / "r")]) == 0
    said = capsys.readouterr().out
    for expected in ("trial of the embedded server", "JetStream answers", "never overwrites", "a box was confined"):
        assert f"ok    {expected}" in said or expected in said
    assert said.endswith(" 0 fail\n")
    assert list(tmp_path.iterdir()) == []


async def test_a_well_server_with_streams_is_ok_and_tells_how_far_p1_holds(
    bus: Any, server: Any, tmp_path: Path
) -> None:
    config = parse_config("", "t", {"run.name": "test", "dispatch.ack_wait_s": 1.0, "regions.local.agents": 1})
    await module.drift.apply(bus, module.topology(config))
    said = await Said.of(tmp_path, "bus", config=config)
    assert said.levels() == {"ok", "note"}
    assert "every 10s" in said.one("note").what
    assert "power loss" in said.one("note").why
    assert any(re.search(r"clock is 0\.\d\d s", finding.what) for finding in said)


async def test_drift_is_an_obstacle_that_names_the_key(bus: Any, server: Any, tmp_path: Path) -> None:
    stream = dataclasses.replace(Topology(run="test").streams()[4], max_age=3600.0)
    await bus.js.update_stream(stream)
    failure = (await Said.of(tmp_path, "bus")).one("fail")
    assert "max_age: 3600 s -> 0 s" in failure.why
    assert failure.hint == "headway topology plan"


async def test_a_server_that_cannot_be_reached_does_not_end_the_other_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_S_MAX", 0.5)
    monkeypatch.setenv("HEADWAY_NATS_URL", f"nats://127.0.0.1:{free_port()}")
    said = await Said.of(tmp_path, "bus", "host")
    assert "cannot connect" in said.one("fail").what
    assert any("GiB free" in finding.what for finding in said)


@pytest.mark.parametrize(("sync", "level"), [('"always"', "ok"), ('"30s"', "note")])
async def test_the_servers_monitoring_tells_how_it_syncs(tmp_path: Path, sync: str, level: str) -> None:
    port, http = free_port(), free_port()
    (tmp_path / "nats.conf").write_text(
        f'listen: "127.0.0.1:{port}"\nhttp: "127.0.0.1:{http}"\n'
        f'jetstream {{ store_dir: "{tmp_path / "js"}", sync_interval: {sync} }}\n'
    )
    process = subprocess.Popen(  # noqa: ASYNC220
        [find_nats_server(), "-c", str(tmp_path / "nats.conf")], stderr=subprocess.DEVNULL
    )
    try:
        await wait_listening(http)
        config = parse_config("", "t", {"bus.url": f"nats://127.0.0.1:{port}"})
        said = await Said.of(tmp_path, "bus", config=config, monitor=f"http://127.0.0.1:{http}")
        assert [finding.level for finding in said if "fsync" in finding.what] == [level]
        assert level == "ok" or "every 30s" in said.one("note").what
    finally:
        process.terminate()
        process.wait(10)


async def test_a_clock_that_is_off_is_an_obstacle(bus: Any, server: Any, tmp_path: Path, monkeypatch: Any) -> None:
    await module.drift.apply(bus, module.topology(CONFIG))
    real = module.time.time
    monkeypatch.setattr(module.time, "time", lambda: real() - 100)
    assert "100.0 s ahead" in (await Said.of(tmp_path, "bus")).one("fail").what.replace("100.00", "100.0")


async def test_a_store_that_overwrites_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await Said.of(tmp_path, "store")).levels() == {"ok", "note"}

    async def overwrite(self: ObstoreBlobs, key: str, data: bytes) -> None:
        await module.asyncio.to_thread(self._store.put, key, data)

    monkeypatch.setattr(ObstoreBlobs, "put", overwrite)
    assert "was overwritten" in (await Said.of(tmp_path, "store")).one("fail").what
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


async def test_a_machine_without_namespaces_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object) -> None:
        raise UnavailableError("no sandbox can be made", why="EPERM", hint="sysctl")

    monkeypatch.setattr(isolation.Sandbox, "start", refused)
    assert (await Said.of(tmp_path, "sandbox")).one("fail") == Finding(
        "fail", "no sandbox can be made", why="EPERM", hint="sysctl"
    )


async def test_a_key_that_others_can_read_is_an_obstacle(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.prepare(Config())
    assert "secrets in" in (await Said.of(tmp_path, "keys")).one("ok").what
    (folder.keys / "trainer" / "trainer.key").chmod(0o644)
    assert "chmod 600" in (await Said.of(tmp_path, "keys")).one("fail").hint


async def test_a_full_disk_is_an_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    assert "0.0 GiB free" in (await Said.of(tmp_path, "host")).one("fail").what


@pytest.mark.parametrize(("numerics", "level"), [("bitwise", "fail"), ("replay", "note")])
async def test_arithmetic_that_depends_on_batching_matters_where_bitwise_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numerics: str, level: str
) -> None:
    monkeypatch.setattr(selftest, "refusal", lambda *_: "scripted")
    config = parse_config("", "t", {"engine.numerics": numerics})
    said = await Said.of(tmp_path, "numerics", config=config)
    assert [finding.level for finding in said if finding.why == "scripted"] == [level]


def test_an_obstacle_is_exit_code_69(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "DISK_BYTES_MIN", 1 << 60)
    skipped = [f"--skip={name}" for name in ALL - {"host"}]
    assert cli.main(["doctor", "--run-dir", str(tmp_path), *skipped]) == 69
    assert "1 fail" in capsys.readouterr().out
