"""A run recorded while it goes on and afterwards, and audited from the file alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zstandard

from headway.bus import recording as layout
from headway.bus.recorded import RecordedBus
from headway.bus.recorder import Recorder, Selection, about
from headway.bus.recording import Recording
from headway.bus.recording_writer import RecordingWriter
from headway.deploy.cli.main import main
from headway.schemas.errors import InputError
from headway.schemas.ledger import Step
from headway.schemas.subjects import STREAM_SUFFIXES
from headway.trainer.audit import audit

from .recorded import answer_of, finish, record, tamper

Make = Callable[..., Any]
STEPS = 4


async def streams(bus: Any) -> dict[str, list[Any]]:
    from headway.bus.reader import read_all

    return {suffix: [stored async for stored in read_all(bus, suffix)] for suffix in STREAM_SUFFIXES}


async def test_a_recording_is_the_run_and_audits_like_it(make_run: Make, tmp_path: Path) -> None:
    run, path = make_run(steps=STEPS), tmp_path / "run.hwr"
    await finish(run, STEPS)
    await record(run.bus, path, checkpoints="all")
    with Recording(path) as recording:
        bus = RecordedBus(recording)
        assert await streams(bus) == await streams(run.bus)
        live, recorded = await audit(run.bus), await audit(bus)
        assert recorded == live
        assert recorded.violations == []
        assert recorded.attempts == {"deciding": 2 * (STEPS * 2 + 2)}
        keys = {key async for key, _ in bus.store.list("test/")}
        stored = {key async for key, _ in run.bus.store.list("test/")}
        assert any(key.startswith("test/blobs/") for key in keys)
        assert keys == {key for key in stored if not key.startswith("test/ledger/")}
        for key in keys:
            assert await bus.store.get(key) == await run.bus.store.get(key)


async def test_recording_a_run_as_it_goes_with_a_killed_recorder_gives_the_same_messages(
    make_run: Make, tmp_path: Path
) -> None:
    run, path = make_run(steps=30), tmp_path / "run.hwr"
    selection = Selection()
    async with run.dispatcher(), run.trainer(), run.agent(answer_of(run)):
        for n in (5, 12, 30):
            with RecordingWriter(path, about("test", selection)) as writer:
                recorder = Recorder(bus=run.bus, writer=writer, selection=selection)
                following = asyncio.create_task(recorder.follow(asyncio.Event()))
                await run.wait_for_step(n)
                following.cancel()  # as a kill: what was taken since the last commit is lost
                await asyncio.wait({following})
            with Recording(path) as recording:
                if recording.contents.whole:
                    assert (await audit(RecordedBus(recording))).violations == []
    await record(run.bus, path)
    with Recording(path) as recording:
        assert await streams(RecordedBus(recording)) == await streams(run.bus)
        assert (await audit(RecordedBus(recording))).violations == []


async def test_parts_of_a_run_are_recorded_by_step_kind_and_time_and_not_audited_as_a_whole(
    make_run: Make, tmp_path: Path
) -> None:
    run = make_run(steps=STEPS)
    await finish(run, STEPS)
    whole = await streams(run.bus)
    links = [link.record.body async for link in _links(run.bus)]
    third = next(body for body in links if isinstance(body, Step) and body.version.n == 3)
    await record(run.bus, tmp_path / "steps", steps=(3, 3), checkpoints="none")
    await record(run.bus, tmp_path / "kinds", kinds=("rollout",))
    late_s = whole["ROLLOUTS"][8].time_s
    await record(run.bus, tmp_path / "since", since_s=late_s)
    with Recording(tmp_path / "steps") as recording:
        found = await streams(RecordedBus(recording))
        settled = {one.rollout_id for one in third.consumed}
        for suffix in ("ROLLOUTS", "TASKS"):
            assert {m.headers["Headway-Rollout"] for m in found[suffix]} == settled
        assert found["LEDGER"] == whole["LEDGER"]
        assert [m.headers["Headway-Version"] for m in found["WEIGHTS"]] == ["0.2", "0.3"]
        with pytest.raises(InputError, match="only a part"):
            await audit(RecordedBus(recording))
    with Recording(tmp_path / "kinds") as recording:
        found = await streams(RecordedBus(recording))
        assert found["ROLLOUTS"] == whole["ROLLOUTS"]
        assert found["TASKS"] == found["WEIGHTS"] == []
        assert not any(key.endswith(".shard") for key in recording.contents.objects)
    with Recording(tmp_path / "since") as recording:
        found = await streams(RecordedBus(recording))
        assert found["ROLLOUTS"] == [m for m in whole["ROLLOUTS"] if m.time_s >= late_s]


async def _links(bus: Any) -> Any:
    from headway.bus.ledger import LedgerReader

    async for link in LedgerReader(bus).links():
        yield link


def _forge_record(rows: list[Any]) -> None:
    from headway.schemas.wire import digest_of

    seq, subject, headers, body, at = rows[3]
    fields = msgpack.unpackb(body)
    fields["payload"] = fields["payload"].replace(b"trained", b"drained")
    forged = msgpack.packb(fields)
    rows[3] = [seq, subject, {**headers, "Headway-Digest": digest_of(forged)}, forged, at]


@pytest.mark.parametrize(
    ("stream", "change", "found"),
    [
        ("LEDGER", _forge_record, r"ledger sequence 4 cannot be trusted"),
        ("LEDGER", lambda rows: rows.pop(2), r"chain breaks at sequence 4"),
        ("ROLLOUTS", lambda rows: rows.pop(1), r"was settled by attempt 2, its first terminal attempt is nowhere"),
        ("TASKS", lambda rows: rows.pop(1), r"g0000000s001 was settled and never issued"),
        ("WEIGHTS", lambda rows: rows.append([99, *_other(rows)]), r"WEIGHTS 99 announces 0\.1 otherwise"),
    ],
)
async def test_a_tampered_recording_fails_the_audit_with_ids_and_sequences(
    make_run: Make, tmp_path: Path, stream: str, change: Any, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = make_run(steps=STEPS), tmp_path / "run.hwr"
    await finish(run, STEPS)
    await record(run.bus, path, checkpoints="none")
    tamper(path, "EVENTS", lambda rows: None)
    with Recording(path) as recording:
        assert (await audit(RecordedBus(recording))).violations == []
    tamper(path, stream, change)
    with Recording(path) as recording:
        report = await audit(RecordedBus(recording))
    assert any(re.search(found, violation) for violation in report.violations), report.violations
    assert (report.broken_link is not None) == (stream == "LEDGER")
    if report.broken_link:
        assert report.broken_link["seq"] == 4


def _other(rows: list[Any]) -> list[Any]:
    """The announcement of 0.1 with the manifest of 0.2."""
    from headway.schemas.messages import WeightsAnnounced
    from headway.schemas.wire import Envelope, unpack

    first, second = (unpack(WeightsAnnounced, row[3]) for row in rows[1:3])
    sealed = Envelope.seal(first.model_copy(update={"manifest": second.manifest}))
    return [rows[1][1], sealed.headers, sealed.body, rows[1][4]]


async def test_the_audit_of_a_recording_needs_no_torch_and_no_server_and_exits_0_or_70(
    make_run: Make, tmp_path: Path
) -> None:
    run, path = make_run(steps=2), tmp_path / "run.hwr"
    await finish(run, 2)
    await record(run.bus, path, checkpoints="none")
    blocked = "import sys; sys.modules['torch'] = None; from headway.deploy.cli.main import main; sys.exit(main({}))"
    command = [sys.executable, "-P", "-c", blocked.format(["audit", "--from", str(path)])]
    env = {**os.environ, "PATH": "/nonexistent"}

    def run_it() -> Any:
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)

    done = run_it()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["violations"] == []
    tamper(path, "LEDGER", lambda rows: rows.pop(2))
    done = run_it()
    assert done.returncode == 70
    assert "chain breaks at sequence 4" in done.stderr
    path.write_bytes(path.read_bytes()[:-40])
    assert run_it().returncode == 65


def test_auditing_nothing_or_two_things_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit"]) == 64
    assert main(["audit", "x", "--from", "y"]) == 64
    assert "a run or a recording is due" in capsys.readouterr().err


def test_a_hostile_block_is_not_decompressed_beyond_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    with RecordingWriter(path, {"run": "r"}) as writer:
        writer.commit(whole=True)
    data = bytearray(path.read_bytes())
    bomb = zstandard.compress(bytes(layout.RAW_BYTES_MAX * 4))
    head = layout.BLOCK.pack(layout.BLOCK_MAGIC, layout.ABOUT, len(bomb), 10, layout.checksum(layout.ABOUT, 10, bomb))
    path.write_bytes(bytes(data[: layout.START.size]) + head + bomb)
    with pytest.raises(InputError, match="cannot be read") as refused:
        Recording(path)
    assert "unpacks to more" in refused.value.why
