"""`headway topology plan | apply` on a real server."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from nats.js.api import RetentionPolicy, StorageType, StreamConfig

from headway.bus.connection import Bus
from headway.bus.server import find_nats_server, free_port, wait_listening
from headway.bus.topology import Topology
from headway.deploy import drift
from headway.deploy.cli import main as cli
from headway.schemas.errors import ConfigError, UnavailableError
from headway.schemas.messages import Event

DECLARED = Topology(run="test", ack_wait_s=1.0)


def stream(suffix: str) -> StreamConfig:
    return next(one for one in DECLARED.streams() if str(one.name).endswith(suffix))


def lines(changes: list[drift.Change]) -> list[str]:
    return [line.strip() for change in changes for line in change.lines()]


async def test_an_empty_server_is_planned_then_filled_and_applying_again_changes_nothing(bus: Bus) -> None:
    other = Bus(bus.client, "other", None)
    declared = Topology(run="other")
    planned = await drift.plan(other, declared)
    assert len(planned) == 7
    assert all(change.missing for change in planned)
    assert lines(await drift.apply(other, declared)) == lines(planned)
    assert await drift.apply(other, declared) == []


async def test_a_limit_that_nobody_declared_is_drift_and_is_removed(bus: Bus) -> None:
    await bus.js.update_stream(dataclasses.replace(stream("LEDGER"), max_age=3600.0, max_msgs=5))
    found = await drift.plan(bus, dataclasses.replace(DECLARED, ack_wait_s=4.0))
    assert lines(found) == [
        "~ HW-test-LEDGER",
        "max_msgs: 5 -> -1",
        "max_age: 3600 s -> 0 s",
        "~ HW-test-TASKS consumer agents",
        "ack_wait: 1 s -> 4 s",
    ]
    await drift.apply(bus, DECLARED)
    assert await drift.plan(bus, DECLARED) == []
    assert not (await bus.js.stream_info("HW-test-LEDGER")).config.max_age


async def test_what_cannot_be_changed_is_refused_before_anything_is(bus: Bus) -> None:
    await bus.js.delete_stream("HW-test-WEIGHTS")
    await bus.js.add_stream(dataclasses.replace(stream("WEIGHTS"), storage=StorageType.MEMORY))
    await bus.js.update_stream(dataclasses.replace(stream("TASKS"), max_msgs=5))
    with pytest.raises(ConfigError, match="HW-test-WEIGHTS has storage = memory") as caught:
        await drift.apply(bus, DECLARED)
    assert "cannot change storage" in caught.value.why
    assert caught.value.hint
    assert (await bus.js.stream_info("HW-test-TASKS")).config.max_msgs == 5


async def test_a_limit_below_what_is_stored_is_refused_and_nothing_is_forgotten(bus: Bus) -> None:
    for number in range(20):
        event = Event(service="t", instance="t", name="seen", fields={"number": number, "pad": "x" * 100})
        await bus.publish(bus.subjects.event("t", "seen"), event)
    with pytest.raises(ConfigError, match="would be cut to 1000"):
        await drift.apply(bus, dataclasses.replace(DECLARED, max_stream_bytes=1000))
    assert (await bus.js.stream_info("HW-test-EVENTS")).state.messages == 20


async def test_a_foreign_stream_in_the_way_is_refused_with_the_servers_words(bus: Bus) -> None:
    await bus.js.delete_stream("HW-test-WEIGHTS")
    await bus.js.add_stream(StreamConfig(name="MINE", subjects=["rl.test.weights.>"], retention=RetentionPolicy.LIMITS))
    with pytest.raises(UnavailableError, match=r"refuses HW-test-WEIGHTS.*overlap"):
        await drift.apply(bus, DECLARED)


async def test_a_disk_too_small_for_the_streams_is_named_with_the_setting(bus: Bus) -> None:
    with pytest.raises(UnavailableError, match="max_stream_bytes") as caught:
        await drift.apply(Bus(bus.client, "big", None), Topology(run="big", max_stream_bytes=1 << 50))
    assert "insufficient storage" in caught.value.why


def test_the_command_shows_drift_and_applies_it(
    nats_process, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_NATS_URL", nats_process.settings.url)
    monkeypatch.setenv("HEADWAY_NATS_TOKEN", nats_process.settings.token)
    arguments = ["--run-dir", str(tmp_path / "r"), "--set", "run.name=r"]
    assert cli.main(["topology", "plan", *arguments]) == 0
    assert "+ HW-r-LEDGER" in capsys.readouterr().out
    assert cli.main(["topology", "apply", *arguments]) == 0
    assert cli.main(["topology", "plan", *arguments]) == 0
    assert "no drift: 6 streams and 1 consumer of run r" in capsys.readouterr().out


async def test_a_server_without_jetstream_is_named(tmp_path: Path) -> None:
    port = free_port()
    server = subprocess.Popen([find_nats_server(), "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        await wait_listening(port)
        async with await Bus.connect(f"nats://127.0.0.1:{port}", "test") as bus:
            with pytest.raises(UnavailableError, match=r"does not offer JetStream.*jetstream"):
                await drift.plan(bus, DECLARED)
    finally:
        server.terminate()
        server.wait(10)
