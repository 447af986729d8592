"""A run to read from: its bus, up or not, or a recording of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.bus.connection import Bus
from headway.bus.ledger import LedgerReader
from headway.bus.recorded import RecordedBus
from headway.bus.recorder import file_key
from headway.bus.recording import Recording
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.rollout_agent.model_shape import hf_config
from headway.schemas import rewards
from headway.schemas.config import LOCAL_SECTIONS, Config
from headway.schemas.errors import ConfigError, InputError
from headway.schemas.ledger import Genesis

CONFIG_JSON, TRAIN, HELDOUT = "config.json", "tasks/train.jsonl", "tasks/heldout.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`files` are those of the run folder that a replay needs; what is absent there is absent here."""

    bus: Bus
    config: Config
    files: Mapping[str, bytes]


Read = Callable[[Source], Coroutine[Any, Any, Any]]


def files_of(folder: RunFolder, config: Config) -> dict[str, bytes]:
    """What a recording takes along."""
    found = {name: (folder.path / name).read_bytes() for name in (TRAIN, HELDOUT) if (folder.path / name).is_file()}
    try:
        return {**found, CONFIG_JSON: hf_config(config.model)}
    except ConfigError:  # the base model is on another host
        return found


async def read_recording(path: Path, read: Read, *, allow_code: bool = False) -> Any:
    """What `read` returns on a recording; one that names code of others needs `allow_code`. Raises InputError."""
    with Recording(path) as recording:
        bus = RecordedBus(recording)
        files = {name: recording.object(file_key(bus.run, name)) for name in (CONFIG_JSON, TRAIN, HELDOUT)}
        config = await _recorded_config(bus)
        if not allow_code:
            _refuse_code(config)
        return await read(Source(bus=bus, config=config, files={n: data for n, data in files.items() if data}))


async def _recorded_config(bus: Bus) -> Config:
    async for link in LedgerReader(bus).links():
        if isinstance(link.record.body, Genesis):
            return _shared(link.record.body.config)
        break
    raise InputError(f"run {bus.run} was recorded before it began", why="there is no genesis in it")


def _shared(recorded: Mapping[str, Any]) -> Config:
    """What a run's services agree on; addresses and folders are the reader's own. Raises InputError."""
    try:
        return Config.model_validate({name: value for name, value in recorded.items() if name not in LOCAL_SECTIONS})
    except ValueError as error:
        raise InputError("the recorded configuration is none", why=str(error)[:300]) from None


def _refuse_code(config: Config) -> None:
    """A recording is foreign, and whoever reads one computes rewards again by the functions that it names."""
    named = [*config.reward.auxiliary, *filter(None, [config.reward.length_penalty])]
    if foreign := [spec for spec in named if not spec.startswith(f"{rewards.__name__}:")]:
        raise InputError(
            f"the recording has code called: {', '.join(foreign)}"[:400],
            why="its rewards are computed by functions that its configuration names",
            hint="--allow-code, if you know where it is from",
        )


async def read_source(name: str, read: Read, *, allow_code: bool = False) -> Any:
    """What `read` returns on a run, given by name or folder, or on a recording, given by its file."""
    if Recording.is_one(Path(name)):
        return await read_recording(Path(name), read, allow_code=allow_code)
    folder = RunFolder.existing(name)
    config = folder.config()
    files = files_of(folder, config)
    return await with_bus(config, folder, lambda bus: read(Source(bus=bus, config=config, files=files)))
