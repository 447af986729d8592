"""Engines as processes of their own, local or SGLang, started as `headway up` starts them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from headway.bus.server import free_port
from headway.deploy.children import Children
from headway.deploy.run_folder import RunFolder
from headway.deploy.supervisor import ChildSpec
from headway.schemas import signing
from headway.schemas.config import Config, parse_config
from headway.schemas.manifest import Manifest, root_of, seal_manifest
from headway.schemas.version import Version
from headway.weight_sync.mirror import HostMirror
from headway.weight_sync.patch import Patch
from headway.weight_sync.staged import FetchStats, StagedUpdate
from headway.weight_sync.tensors import table_of
from headway.weight_sync.torch_apply import raw_tensors

START_S_MAX = 240.0
SMALL = """
[model]
hidden_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
moe_intermediate_size = 32
[engine]
kind = "KIND"
numerics = "replay"
max_batch = 8
[agent]
max_session_tokens = 256
"""


def small(kind: str) -> Config:
    return parse_config(SMALL.replace("KIND", kind), "test")


def engine_spec(config: Config, folder: Path, port: int) -> ChildSpec:
    run = RunFolder(folder)
    run.prepare(config)
    return Children(config=config, folder=run, nats_url="").engine("engine", port, {"HEADWAY_ENGINE_KEY": ""})


@contextlib.contextmanager
def running(config: Config, folder: Path, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL of an engine once it answers, and its process, which leads a group of its own."""
    port = port or free_port()
    spec = engine_spec(config, folder, port)
    with (folder / "engine.log").open("ab") as log:
        process = subprocess.Popen(spec.argv, env=dict(spec.env), stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_answering(url, process)
        yield url, process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def wait_answering(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return once /ready is answered, with whatever."""
    end_s = time.monotonic() + START_S_MAX
    while True:
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=5).close()
            return
        except urllib.error.HTTPError as error:
            error.close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > end_s:
                raise
            time.sleep(0.2)


class Trainer:
    """Makes versions out of weights, as a trainer would, for one mirror."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        signing.create_key(folder / "trainer.key")
        self._key = signing.load_key(folder / "trainer.key")
        self.mirror = HostMirror(folder, signing.public_key(self._key), fsync=False)
        self._n = -1

    def stage(self, weights: Mapping[str, Tensor], version: Version | None = None) -> StagedUpdate:
        """The step from the mirror's version to `weights`."""
        self._n += 1
        raw = raw_tensors(weights)
        table, head = table_of(raw), self.mirror.head
        parent = (head.version, head.root, self.mirror.digest) if head is not None else (None, None, None)
        manifest = Manifest(
            version=version or Version(0, self._n),
            root=root_of(table),
            parent=parent[0],
            parent_root=parent[1],
            parent_manifest=parent[2],
            tensors=table,
            shards=(),
        )
        digest, sealed = seal_manifest(manifest, self._key)
        held = {entry.name: entry.xxh3 for entry in head.tensors} if head is not None else {}
        return StagedUpdate(
            manifest=manifest,
            digest=digest,
            sealed=sealed,
            base_root=head.root if head is not None else None,
            patches={
                entry.name: Patch.whole(raw[entry.name].data) for entry in table if held.get(entry.name) != entry.xxh3
            },
            stats=FetchStats(
                fetched_bytes=0, fetch_ms=0.0, stage_ms=0.0, hops=1, refetches=0, from_anchor=head is None
            ),
        )
