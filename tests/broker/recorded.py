"""One finished run, recorded, for every test that only reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.bus import recording as layout
from headway.bus.blobs import ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader
from headway.bus.recorder import Recorder, Selection, about
from headway.bus.recording import Recording
from headway.bus.recording_writer import RecordingWriter
from headway.bus.topology import Topology
from headway.deploy.run_folder import RunFolder
from headway.deploy.sources import files_of
from headway.schemas.config import parse_config
from headway.schemas.ledger import Step
from headway.schemas.messages import Command, Task
from headway.schemas.subjects import STREAM_SUFFIXES
from headway.schemas.version import Version

from ..conftest import NatsProcess

STEPS = 5


def answer_of(run: Any) -> Callable[[Task, Version], Any]:
    """A forged verdict, failed infrastructure, one body above the claim check's limit, the rest as it should be."""

    def answer(task: Task, head: Version) -> Any:
        if (task.group, task.sample) == (3, 1):
            return run.failed(task)
        rollout = run.graded(task, float(task.sample), head)
        if (task.group, task.sample) == (0, 0):
            return rollout.model_copy(update={"reward": 0.5})
        long = {"commands": [Command(tool="x" * 64, ms=1.0, ok=True)] * 1024}
        return rollout.model_copy(update=long) if task.group == 1 else rollout

    return answer


async def record(bus: Any, path: Path, files: dict[str, bytes] | None = None, **chosen: Any) -> Recorder:
    """Record everything that is there."""
    selection = Selection(**chosen)
    with RecordingWriter(path, about(bus.run, selection)) as writer:
        recorder = Recorder(bus=bus, writer=writer, selection=selection, files=files or {})
        await recorder.catch_up()
    return recorder


async def finish(run: Any, steps: int) -> None:
    """Run to step `steps`; its last stamps and events are there too."""
    async with run.dispatcher(), run.trainer() as trainer, run.agent(answer_of(run)):
        await run.wait_for_step(steps)
        async with asyncio.timeout(30):
            while trainer.status.get("phase") != "all steps committed":
                await asyncio.sleep(0.02)


def tamper(path: Path, stream: str, change: Callable[[list[Any]], object], drop_object: str = "") -> None:
    """Change messages (rows of seq, subject, headers, body, time) and make every checksum right, as a forger would.

    `drop_object` is left out, as an object that was gone.
    """
    with Recording(path) as recording:
        runs = recording.contents.runs
        messages = {
            suffix: [m for one in runs[suffix] for m in recording.messages_of(one)] for suffix in STREAM_SUFFIXES
        }
        objects = {key: recording.object(key) for key in recording.contents.objects}
        described = recording.about
    rows = [[m.seq, m.subject, m.headers, m.body, m.time_s] for m in messages[stream]]
    change(rows)
    path.unlink()
    messages[stream] = [layout.StoredMessage(subject, seq, h, body, at) for seq, subject, h, body, at in rows]
    with RecordingWriter(path, described) as writer:
        for key, data in objects.items():
            if data is None or key == drop_object:
                writer.add_absent(key)
            else:
                writer.add_object(key, len(data), [writer.add_part(key, 0, data)])
        for suffix in STREAM_SUFFIXES:
            for message in messages[suffix]:
                writer.add(suffix, message)
        writer.commit(whole=True)


@dataclass(frozen=True, slots=True)
class Made:
    """Recordings of the same run: with every checkpoint, and with none."""

    full: Path
    bare: Path
    steps: list[Step]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    from .conftest import CONFIG, LocalRun

    folder = tmp_path_factory.mktemp("recorded")
    text = CONFIG.format(steps=STEPS).replace("[grpo]", "[grpo]\nretain_steps = 9")
    config = parse_config(text, "test")

    async def make() -> list[Step]:
        nats = NatsProcess(folder / "nats")
        await nats.start()
        try:
            store = ObstoreBlobs.open(str(folder / "store"))
            async with await Bus.connect(nats.settings.url, "test", token=nats.settings.token, store=store) as bus:
                await Topology(run="test", ack_wait_s=1.0).apply(bus.js)
                run = LocalRun(bus, folder, config)
                await finish(run, STEPS)
                files = files_of(RunFolder(folder), config)
                await record(bus, folder / "full.hwr", files, checkpoints="all")
                await record(bus, folder / "bare.hwr", files, checkpoints="none")
                links = [link.record.body async for link in LedgerReader(bus).links()]
                return [body for body in links if isinstance(body, Step)]
        finally:
            nats.stop()

    steps = asyncio.run(make())
    return Made(folder / "full.hwr", folder / "bare.hwr", steps)
