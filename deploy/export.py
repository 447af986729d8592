"""`headway export`: a committed version of a run as a Hugging Face folder, and runs that begin from one.

The ledger binds the version to a manifest; every shard and tensor is verified against it before a byte is
written, and the folder appears whole or not at all.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from headway.bus.connection import Bus
from headway.bus.failpoints import failpoint
from headway.bus.ledger import LedgerReader
from headway.deploy.local import with_bus
from headway.deploy.run_folder import RunFolder
from headway.rollout_agent.model_shape import hf_config
from headway.schemas.config import Config
from headway.schemas.errors import ConfigError
from headway.schemas.ids import check_id
from headway.schemas.version import Version
from headway.trainer.history import History
from headway.weight_sync.fetcher import Fetcher
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.transfer import Retrier, TransferLimits

DTYPE = "bfloat16"
"""Versions are what engines serve: the bf16 cast of the trainer's masters."""


async def committed(bus: Bus) -> History:
    """What the ledger binds. Raises ConfigError when the run has not begun, PromiseViolated, UnavailableError."""
    history = History()
    history.extend(await LedgerReader(bus).read_new())
    if history.genesis is None:
        raise ConfigError(f"run {bus.run} has no version yet", why="its ledger is empty", hint="`headway up` begins it")
    return history


async def export(bus: Bus, history: History, version: Version, model_config: bytes, out: Path) -> str:
    """Write the version to `out`, which must not exist; its weight root.

    Raises ConfigError, WireError for objects that are not what was published, UnavailableError.
    """
    if out.exists():  # noqa: ASYNC240
        raise ConfigError(f"{out} exists", why="an export never overwrites", hint="--out another folder, or remove it")
    if version not in history.manifests:
        raise ConfigError(
            f"run {bus.run} has no version {version}", why=f"the newest is {history.head}", hint="--version e.n"
        )
    assert bus.store is not None
    assert history.genesis is not None
    key, retrier = history.genesis.trainer_key, Retrier(limits=TransferLimits(), rng=random.Random())
    fetcher = Fetcher(store=bus.store.once(), keys=bus.keys, public_key=key, retrier=retrier)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        mirror = HostMirror(Path(scratch, "mirror"), key, fsync=False)
        staged = await fetcher.stage(version, history.manifests[version], mirror)
        described = json.dumps({**json.loads(model_config), "dtype": DTYPE}, indent=2, sort_keys=True) + "\n"
        mirror.stage_partial_checkpoint(Path(scratch, "model"), described.encode(), staged, full=True)
        failpoint("export.rename.before")
        Path(scratch, "model").rename(out)  # noqa: ASYNC240
        failpoint("export.rename.after")
    return staged.manifest.root


def config_json(folder: RunFolder, config: Config) -> bytes:
    """The model's `config.json`: that of the base this run made, else of its settings."""
    made_here = folder.base / "config.json"
    return made_here.read_bytes() if not config.model.base and made_here.is_file() else hf_config(config.model)


async def export_run(folder: RunFolder, version: Version | None, out: Path | None) -> tuple[Version, Path]:
    """Export from a run, up or not: the version, else the head; to `out`, else once into the run's `versions/`."""
    config = folder.config()
    described = config_json(folder, config)

    async def read(bus: Bus) -> tuple[Version, Path]:
        history = await committed(bus)
        found = version or history.head
        target = out or folder.path / "versions" / str(found)
        if out is not None or not target.is_dir():
            await export(bus, history, found, described, target)
        return found, target

    return await with_bus(config, folder, read)  # type: ignore[no-any-return]


def fork_base(folder: RunFolder, name: str) -> Path:
    """Where a run that was forked from the one in `folder` keeps its version 0."""
    return folder.path.parent / check_id(name) / "base"


def forked(config: Config, folder: RunFolder, name: str) -> Config:
    """`config` as run `name`, whose version 0 is a version of the run in `folder`."""
    run = {**config.run.model_dump(), "name": name}
    model = {**config.model.model_dump(), "base": str(fork_base(folder, name))}
    return Config.model_validate({**config.model_dump(), "run": run, "model": model})
