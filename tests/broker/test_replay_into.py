"""A recording's streams on a server again: the same sequences, at a chosen speed, up to a chosen moment."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus, StoredMessage
from headway.bus.reader import read_all
from headway.bus.recorded import RecordedBus
from headway.bus.recording import Recording
from headway.bus.replayer import H_RECORDED_SEQ, H_RECORDED_TIME, Replayer, in_order, until
from headway.bus.topology import Topology
from headway.deploy.cli.main import main
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.schemas.errors import ConfigError, InputError
from headway.schemas.subjects import STREAM_SUFFIXES

from ..conftest import NatsProcess
from .recorded import STEPS, Made, tamper


def essence(message: StoredMessage) -> Any:
    dropped = (H_RECORDED_SEQ, H_RECORDED_TIME, "Nats-Msg-Id", "Nats-Expected-Last-Sequence")
    return message.seq, message.subject, message.body, {k: v for k, v in message.headers.items() if k not in dropped}


async def everything(bus: Any) -> dict[str, list[Any]]:
    return {suffix: [essence(m) async for m in read_all(bus, suffix)] for suffix in STREAM_SUFFIXES}


def in_folder(folder: Path, read: Any) -> Any:
    run = RunFolder(folder)
    return asyncio.run(with_bus(run.config(), run, read))


def test_a_replayed_run_is_watched_inspected_and_audited_like_the_original(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "again")
    assert main(["replay", str(made.full), "--run-dir", folder]) == 0
    assert "messages published, at its end" in capsys.readouterr().out
    assert main(["audit", "--from", str(made.full)]) == 0
    recorded = json.loads(capsys.readouterr().out)
    assert main(["audit", folder]) == 0
    assert json.loads(capsys.readouterr().out) == recorded
    assert main(["top", folder, "--once"]) == 0
    assert f"step {STEPS}/{STEPS}   version 0.{STEPS}" in capsys.readouterr().out
    assert main(["inspect", "step", "0.2", folder]) == 0
    assert made.steps[1].root in capsys.readouterr().out
    assert main(["replay", "step", "2", folder]) == 0
    assert "is exact, bit for bit" in capsys.readouterr().out

    async def read(bus: Bus) -> Any:
        last = await bus.last("LEDGER")
        assert last is not None
        assert last.headers[H_RECORDED_SEQ] == str(last.seq)
        return await everything(bus)

    with Recording(made.full) as recording:
        assert in_folder(Path(folder), read) == asyncio.run(everything(RecordedBus(recording)))


def test_a_replay_stops_at_a_moment_and_goes_on_from_there(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "again")
    assert main(["replay", str(made.bare), "--run-dir", folder, "--until", "step=2"]) == 0
    assert "stopped at LEDGER" in capsys.readouterr().out
    assert main(["audit", folder]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] == 3
    assert main(["replay", str(made.bare), "--run-dir", folder, "--until", "reward>0.9"]) == 0
    said = capsys.readouterr().out
    assert "stopped at ROLLOUTS" in said
    assert "reward 1" in said
    assert main(["replay", str(made.bare), "--run-dir", folder]) == 0
    capsys.readouterr()
    assert main(["audit", folder]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] == STEPS + 1


async def test_lost_sequences_stay_lost_and_a_foreign_stream_is_refused(
    made: Made, tmp_path: Path, nats_process: NatsProcess
) -> None:
    own = Path(shutil.copy(made.bare, tmp_path / "own.hwr"))
    tamper(own, "STAMPS", lambda rows: [rows.pop(4), rows.pop(0)])
    store = ObstoreBlobs.open(str(tmp_path / "store"))
    settings = nats_process.settings
    with Recording(own) as recording:
        async with await Bus.connect(settings.url, "test", token=settings.token, store=store) as bus:
            replayer = Replayer(recording=recording, bus=bus)
            await replayer.prepare(store, Topology(run="test"))
            assert await replayer.run() is None
            seqs = [m.seq async for m in read_all(bus, "STAMPS")]
            assert seqs == [m.seq for m in recording.batch("STAMPS", 1)]
            assert seqs[:4] == [2, 3, 4, 6]
            again = Replayer(recording=recording, bus=bus)
            await again.prepare(store, Topology(run="test"))
            assert (await again.run(), again.published) == (None, 0)
            await bus.js.publish("rl.test.event.x.y", b"foreign")
            with pytest.raises(InputError, match="holds something else"):
                await Replayer(recording=recording, bus=bus).prepare(store, Topology(run="test"))


@pytest.mark.parametrize("speed", [1.0, 10.0])
async def test_the_original_pace_is_kept_or_multiplied(made: Made, bus: Bus, speed: float) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    with Recording(made.bare) as recording:
        times = [message.time_s for _, message in in_order(recording, {})]
        assert times == sorted(times)
        replayer = Replayer(recording=recording, bus=bus, speed=speed, sleep=sleep)
        assert bus.store is not None
        await replayer.prepare(bus.store, Topology(run="test"))
        began = asyncio.get_running_loop().time()
        await replayer.run()
        took = asyncio.get_running_loop().time() - began
    length = (times[-1] - times[0]) / speed
    assert max(waited) <= length
    assert waited[-1] == pytest.approx(max(0.0, length - took), abs=0.5)


def test_moments_are_read_strictly() -> None:
    def message(**headers: str) -> StoredMessage:
        return StoredMessage("s", 7, {k.replace("_", "-"): v for k, v in headers.items()}, b"")

    assert until("seq=7")("ROLLOUTS", message())
    assert not until("seq=7")("LEDGER", message())
    assert until("seq=LEDGER:6")("LEDGER", message())
    step = message(Headway_Record="step", Headway_Version="1.4")
    assert until("step=4")("LEDGER", step)
    assert until("step=1.4")("LEDGER", step)
    assert not until("step=0.4")("LEDGER", step)
    assert not until("step=5")("LEDGER", step)
    assert until("reward<0")("ROLLOUTS", message(Headway_Reward="-0.25"))
    assert not until("reward<0")("ROLLOUTS", message(Headway_Reward="0"))
    assert not until("reward<0")("ROLLOUTS", message())
    for text in ("soon", "step=x", "reward!0", "seq=NOWHERE:3", "reward<x"):
        with pytest.raises(ConfigError, match="no such moment"):
            until(text)
