"""A recording gives back what went in, goes on where it stopped, and names what was damaged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nats.js.errors import APIError

from headway.bus import recording as layout
from headway.bus.blobs import ObstoreBlobs
from headway.bus.direct import StoredMessage
from headway.bus.recorded import RecordedBus, matches
from headway.bus.recorder import Recorder, Selection
from headway.bus.recording import PART_BYTES, Recording
from headway.bus.recording_writer import RecordingWriter
from headway.bus.replayer import Replayer, until
from headway.schemas.errors import InputError, UnavailableError
from headway.schemas.subjects import Subjects

ABOUT: dict[str, Any] = {"run": "r", "selection": {}}


def message(seq: int, size_bytes: int = 10, subject: str = "rl.r.rollout.east.a") -> StoredMessage:
    return StoredMessage(subject, seq, {"Headway-Kind": "rollout"}, bytes([seq % 256]) * size_bytes, seq * 0.25)


def write(path: Path, seqs: range, *, size_bytes: int = 10, commit: bool = True) -> None:
    with RecordingWriter(path, ABOUT) as writer:
        for seq in seqs:
            writer.add("ROLLOUTS", message(seq, size_bytes))
        if commit:
            writer.commit(whole=True)


def seqs_of(path: Path, start: int = 1) -> list[int]:
    found: list[int] = []
    with Recording(path) as recording:
        while batch := recording.batch("ROLLOUTS", start):
            found += [one.seq for one in batch]
            assert all(one == message(one.seq, len(one.body)) for one in batch)
            start = batch[-1].seq + 1
    return found


def test_messages_come_back_in_order_over_many_blocks_and_sessions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for part in (range(1, 40), range(45, 80), range(80, 81)):
        write(path, part, size_bytes=100_000)
    expected = [*range(1, 40), *range(45, 81)]
    assert seqs_of(path) == expected
    assert seqs_of(path, 42) == [seq for seq in expected if seq >= 42]
    with Recording(path) as recording:
        assert len(recording.contents.runs["ROLLOUTS"]) > 5
        assert recording.at("ROLLOUTS", 45) == message(45, 100_000)
        assert recording.at("ROLLOUTS", 42) is None
        assert recording.batch("TASKS", 1) == []
        assert recording.verify() == len(recording.contents.runs["ROLLOUTS"])


def test_a_batch_is_bounded_in_messages_and_bytes(tmp_path: Path) -> None:
    write(tmp_path / "many", range(1, 2 * layout.BATCH_MESSAGES))
    write(tmp_path / "big", range(1, 40), size_bytes=900_000)
    for name in ("many", "big"):
        with Recording(tmp_path / name) as recording:
            batch = recording.batch("ROLLOUTS", 1)
            assert len(batch) <= layout.BATCH_MESSAGES
            assert sum(len(one.body) for one in batch) <= layout.BATCH_BYTES
        assert len(seqs_of(tmp_path / name)) == (2 * layout.BATCH_MESSAGES - 1 if name == "many" else 39)


def test_what_a_killed_writer_left_is_never_read_and_then_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, range(1, 11))
    whole = path.read_bytes()
    write(path, range(11, 60), size_bytes=100_000, commit=False)
    assert path.stat().st_size > len(whole)
    assert seqs_of(path) == list(range(1, 11))
    write(path, range(11, 21))
    assert seqs_of(path) == list(range(1, 21))
    assert path.read_bytes()[: len(whole)] == whole, "the file does not only grow"


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 0.999])
def test_a_file_cut_off_anywhere_holds_what_the_last_whole_index_covers(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "file"
    sizes = []
    for part in range(10):
        write(path, range(part * 10 + 1, part * 10 + 11))
        sizes.append(path.stat().st_size)
    cut = int(sizes[-1] * keep)
    path.write_bytes(path.read_bytes()[:cut])
    assert len(seqs_of(path)) == 10 * sum(size <= cut for size in sizes)


def test_every_flipped_byte_is_found_and_its_place_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with RecordingWriter(path, ABOUT) as writer:
        writer.add("ROLLOUTS", message(1))
        writer.add_object("r/ckpt/x", 3, [writer.add_part("r/ckpt/x", 0, b"abc")])
        writer.commit(whole=True)
    whole = path.read_bytes()
    unnoticed = []
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            with Recording(path) as recording:
                recording.verify()
                if recording.contents.whole:
                    unnoticed.append(place)
        except InputError as error:
            if str(path) not in str(error):
                unnoticed.append(place)
    assert unnoticed == []


def test_objects_come_back_whole_and_by_range_and_gone_ones_are_none(tmp_path: Path) -> None:
    data = bytes(range(256)) * (3 * PART_BYTES // 256) + b"tail"
    path = tmp_path / "file"
    with RecordingWriter(path, ABOUT) as writer:
        parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
        writer.add_object("r/ckpt/a", len(data), [writer.add_part("r/ckpt/a", n, p) for n, p in enumerate(parts)])
        writer.add_absent("r/blobs/b")
        writer.commit(whole=True)
    with Recording(path) as recording:
        assert recording.object("r/ckpt/a") == data
        for start, end in ((0, 5), (PART_BYTES - 2, PART_BYTES + 2), (len(data) - 3, len(data) + 9), (7, 7)):
            assert recording.object("r/ckpt/a", start, end) == data[start:end]
        assert recording.object("r/blobs/b") is None
        assert recording.object("r/blobs/c") is None


def test_other_files_options_and_a_second_writer_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"# not a recording at all")
    with pytest.raises(InputError, match="is no recording"):
        Recording(other)
    with pytest.raises(InputError, match="is no recording"):
        RecordingWriter(other, ABOUT)
    with pytest.raises(UnavailableError):
        Recording(tmp_path / "absent")
    path = tmp_path / "file"
    with RecordingWriter(path, ABOUT), pytest.raises(UnavailableError, match="another process"):
        RecordingWriter(path, ABOUT)
    with pytest.raises(InputError, match="another selection"):
        RecordingWriter(path, {"run": "r", "selection": {"kinds": ["task"]}})
    newer = bytearray(path.read_bytes())
    newer[8] = 9
    path.write_bytes(newer)
    with pytest.raises(InputError, match="format 9"):
        Recording(path)


async def test_a_recorded_bus_filters_subjects_and_publishes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with RecordingWriter(path, ABOUT) as writer:
        for seq in range(1, 4001):
            writer.add("EVENTS", message(seq, subject=f"rl.r.{'dead' if seq % 2000 == 0 else 'event'}.x"))
        writer.commit(whole=True)
    with Recording(path) as recording:
        bus = RecordedBus(recording)
        assert [m.seq for m in await bus.read_batch("EVENTS", 2, "rl.r.dead.>")] == [2000]
        assert [m.seq for m in await bus.read_batch("EVENTS", 2001, "rl.r.dead.>")] == [4000]
        last = await bus.last("EVENTS", "rl.r.event.x")
        assert last is not None
        assert last.seq == 3999
        assert await bus.last("TASKS") is None
        with pytest.raises(UnavailableError, match="can only be read"):
            await bus.publish("rl.r.event.x", None)


def test_subjects_match_as_in_nats() -> None:
    assert matches(">", "a.b")
    assert matches("a.*.c", "a.b.c")
    assert not matches("a.*", "a.b.c")
    assert not matches("a.>", "a")
    assert not matches("a.b.c", "a.b")


@pytest.mark.parametrize(
    "entry",
    [
        ["object", "r/ckpt/x", 3, []],
        ["object", "r/ckpt/x", 3, ["12"]],
        ["object", "r/ckpt/x", 3, [1, 2]],
        ["object", "r/ckpt/x", 1 << 39, [1]],
    ],
)
def test_an_index_whose_objects_do_not_fit_their_parts_is_refused(tmp_path: Path, entry: list[Any]) -> None:
    with RecordingWriter(tmp_path / "file", ABOUT) as writer:
        writer._entries, writer._dirty = [entry], True
        writer.commit(whole=True)
    with pytest.raises(InputError, match="an index cannot be read"):
        Recording(tmp_path / "file")


@pytest.mark.parametrize("previous", [None, "x", -1, 1 << 40])
def test_an_index_that_continues_nothing_is_refused(tmp_path: Path, previous: Any) -> None:
    with RecordingWriter(tmp_path / "file", ABOUT) as writer:
        writer.contents.index = previous
        writer.commit(whole=True)
    with pytest.raises(InputError, match="an index cannot be read"):
        Recording(tmp_path / "file")


def test_a_number_in_place_of_bytes_is_refused_and_not_made_into_so_many_zeros(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with RecordingWriter(path, ABOUT) as writer:
        rows = [[1, "rl.r.rollout.east.a", 0, {}, 1 << 10]]
        writer._note(
            "messages", "ROLLOUTS", 1, 1, 1, writer._append(layout.MESSAGES, {"stream": "ROLLOUTS", "messages": rows})
        )
        offset = writer._append(layout.PART, {"key": "r/ckpt/x", "part": 0, "data": 1 << 10})
        writer.add_object("r/ckpt/x", 3, [offset])
        writer.commit(whole=True)
    with Recording(path) as recording:
        with pytest.raises(InputError, match="not what the index says"):
            recording.batch("ROLLOUTS", 1)
        with pytest.raises(InputError, match="is no part 0"):
            recording.object("r/ckpt/x")


def test_a_recording_that_says_nothing_of_itself_is_refused(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "file", []) as writer:  # type: ignore[arg-type]
        writer.commit(whole=True)
    with pytest.raises(InputError, match="does not say what it records"):
        Recording(tmp_path / "file")


async def test_objects_of_other_runs_are_not_put_into_a_store_that_may_hold_those(tmp_path: Path) -> None:
    path, store = tmp_path / "file", ObstoreBlobs.open("memory://")
    with RecordingWriter(path, ABOUT) as writer:
        for key in ("r/ckpt/x", "other/ckpt/x", "r/files/config.json"):
            writer.add_object(key, 3, [writer.add_part(key, 0, b"abc")])
        writer.commit(whole=True)
    with Recording(path) as recording:
        replayer = Replayer(recording=recording, bus=RecordedBus(recording))
        await replayer.prepare(store, SimpleNamespace(streams=list))  # type: ignore[arg-type]
    assert [key async for key, _ in store.list("")] == ["r/ckpt/x"]


async def test_an_object_is_recorded_as_far_as_it_goes_whatever_size_was_claimed(tmp_path: Path) -> None:
    path, store = tmp_path / "file", ObstoreBlobs.open("memory://")
    await store.put("r/blobs/x", bytes(PART_BYTES))
    with RecordingWriter(path, ABOUT) as writer:
        bus = SimpleNamespace(run="r", store=store)
        recorder = Recorder(bus=bus, writer=writer, selection=Selection())  # type: ignore[arg-type]
        assert await recorder._take_object("r/blobs/x", 3 * PART_BYTES)
        writer.commit(whole=True)
    with Recording(path) as recording:
        assert recording.object("r/blobs/x") == bytes(PART_BYTES)


@pytest.mark.parametrize(
    ("moment", "stream", "headers"),
    [
        ("step=1", "LEDGER", {"Headway-Record": "step", "Headway-Version": "one"}),
        ("step=1", "LEDGER", {"Headway-Record": "step"}),
        ("reward<0", "ROLLOUTS", {"Headway-Reward": "-a lot"}),
        ("reward<0", "ROLLOUTS", {}),
    ],
)
def test_a_header_that_says_nothing_is_no_moment_to_stop_at(moment: str, stream: str, headers: dict[str, str]) -> None:
    assert not until(moment)(stream, StoredMessage("rl.r.x", 1, headers, b""))


async def test_a_filler_that_cannot_be_deleted_is_an_error_in_our_words(tmp_path: Path) -> None:
    class Stream:
        async def publish(self, subject: str, body: bytes, **options: Any) -> Any:
            return SimpleNamespace(seq=1)

        async def delete_msg(self, stream: str, seq: int) -> None:
            raise APIError(code=500, description="not today")

    write(tmp_path / "a.hwr", range(2, 3))
    bus: Any = SimpleNamespace(js=Stream(), subjects=Subjects("r"))
    with Recording(tmp_path / "a.hwr") as recording:
        replayer = Replayer(recording=recording, bus=bus)
        replayer._last["ROLLOUTS"] = 0
        with pytest.raises(UnavailableError, match="cannot delete ROLLOUTS 1"):
            await replayer.run()
