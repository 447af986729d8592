"""`headway up --dry-run`: what would start, where, with which settings. Starts, writes and takes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from headway.bus.server import find_nats_server
from headway.deploy.children import Children
from headway.deploy.local import has_tasks
from headway.deploy.run_folder import RunFolder
from headway.deploy.settings import to_toml
from headway.deploy.supervisor import ChildSpec
from headway.schemas.config import Config


def preview(config: Config, folder: RunFolder) -> Iterator[str]:
    """Lines for a person. Raises ConfigError, as `headway up` would, when the run exists with another config."""
    folder.check_same(config)
    yield f"run {config.run.name} would {'go on' if folder.config_file.exists() else 'begin'} in {folder.path}"
    yield f"  bus    {config.bus.url or 'an embedded nats-server on a free port of 127.0.0.1'}"
    yield f"  store  {folder.store_url(config)}"
    yield f"  keys   {folder.keys}"
    yield f"  logs   {folder.logs}"
    children = Children(config=config, folder=folder, nats_url=config.bus.url)
    once = [] if has_tasks(config, folder) else [children.tasks()]
    once += [] if config.model.base or folder.base.exists() else [children.midtrain()]
    if not config.bus.url:
        yield f"would start nats: {find_nats_server()} -c {folder.nats / 'nats.conf'}"
    for spec in once:
        yield f"would run {spec.name} to its end: {_command(spec)}"
    for spec in children.services():
        yield f"would start {spec.name}: {_command(spec)}"
    yield "with these settings:"
    yield to_toml(config).rstrip()


def _command(spec: ChildSpec) -> str:
    argv = list(spec.argv)
    if "--port" in argv:
        argv[argv.index("--port") + 1] = "<a free one>"
    return shlex.join(argv)
