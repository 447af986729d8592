"""`headway doctor`: whether this machine, the bus and the store can carry a run, each tried and not assumed.

Works before a run exists (on a trial server that is gone afterwards) and beside a running one, which it only
reads; in the store it leaves nothing behind. A `note` is a promise that holds less far, a `fail` is an obstacle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from headway.bus.blobs import MissingBlob, ObstoreBlobs
from headway.bus.connection import Bus
from headway.bus.health import require_jetstream, require_version
from headway.bus.reader import read_batch
from headway.bus.server import free_port
from headway.bus.service import first_error
from headway.deploy import drift
from headway.deploy.children import THREAD_VARIABLES
from headway.deploy.cli.options import DOCTOR_CHECKS
from headway.deploy.local import connect, embedded_bus, topology
from headway.deploy.run_folder import RunFolder
from headway.schemas.config import Config
from headway.schemas.errors import HeadwayError, UnavailableError

CONNECT_S_MAX = 5.0
MONITOR_S_MAX = 5.0
SKEW_S_NOTED, SKEW_S_MAX = 1.0, 60.0
"""Nothing in a run looks at a clock; object stores refuse requests that are minutes off."""
DISK_BYTES_MIN = 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    level: Literal["ok", "note", "fail"]
    what: str
    why: str = ""
    hint: str = ""

    def __str__(self) -> str:
        rest = [f"      {label}: {text}" for label, text in (("why", self.why), ("try", self.hint)) if text]
        return "\n".join([f"{self.level:<5} {self.what}", *rest])


def ok(what: str) -> Finding:
    return Finding("ok", what)


def failed(error: HeadwayError) -> Finding:
    return Finding("fail", error.what, error.why, error.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """`monitor` is the address of the server's HTTP monitoring, where it has one."""

    config: Config
    folder: RunFolder
    tell: Callable[[Finding], None]
    monitor: str = ""

    async def examine(self, skip: Collection[str] = ()) -> None:
        """Tell findings in the order of DOCTOR_CHECKS. An obstacle in one check does not end the others."""
        for name in DOCTOR_CHECKS:
            if name in skip:
                continue
            try:
                await getattr(self, f"_{name}")()
            except HeadwayError as error:
                self.tell(failed(error))
            except BaseExceptionGroup as group:
                first = first_error(group)
                if not isinstance(first, HeadwayError):
                    raise
                self.tell(failed(first))

    async def _bus(self) -> None:
        url = os.environ.get("HEADWAY_NATS_URL") or self.config.bus.url
        if not url and self.folder.url_file.exists():
            url = self.folder.url_file.read_text()
        if url:
            async with await connect(self.config, self.folder, url, wait_s=CONNECT_S_MAX) as bus:
                await self._server(bus, url)
            return
        with tempfile.TemporaryDirectory() as scratch:
            trial = RunFolder(Path(scratch))
            trial.prepare(self.config)
            async with asyncio.TaskGroup() as tasks, embedded_bus(self.config, trial, tasks, _silent) as (_, __, bus):
                await drift.apply(bus, topology(self.config))
                await replace(self, folder=trial)._server(bus, "a trial of the embedded server")

    async def _server(self, bus: Bus, where: str) -> None:
        self.tell(ok(f"nats-server {require_version(bus.client)} at {where}"))
        await require_jetstream(bus.js)
        self.tell(ok("JetStream answers"))
        self.tell(self._fsync())
        changes = await drift.plan(bus, topology(self.config))
        if changes and all(change.missing for change in changes):
            self.tell(ok(f"run {bus.run} has no streams yet: `headway up` or `headway topology apply` makes them"))
            return
        if changes:
            lines = "\n           ".join(line for change in changes for line in change.lines())
            self.tell(Finding("fail", "streams differ from what is declared", why=lines, hint="headway topology plan"))
        else:
            self.tell(ok("streams and consumer are as declared"))
        found = await read_batch(bus, "LEDGER", 1)
        self.tell(ok(f"batched direct get answers; the ledger {'has records' if found else 'is empty'}"))
        self.tell(await self._skew(bus))

    def _fsync(self) -> Finding:
        """What the server says about syncing, or its configuration where it is ours."""
        interval = ""
        if self.monitor:
            with contextlib.suppress(OSError, ValueError, KeyError):
                with urllib.request.urlopen(f"{self.monitor.rstrip('/')}/varz", timeout=MONITOR_S_MAX) as reply:
                    said = json.load(reply)["jetstream"]["config"]
                interval = "always" if said.get("sync_always") else f"{said['sync_interval'] / 1e9:g}s"
        elif (conf := self.folder.nats / "nats.conf").exists():
            interval = "".join(re.findall(r'sync_interval:\s*"?(\w+)', conf.read_text())[:1])
        if interval == "always":
            return ok("fsync before every acknowledgement: P1 holds through power loss, on the server's side")
        return Finding(
            "note",
            f"fsync {f'every {interval}' if interval else 'at an interval that the server does not tell'}",
            why="P1 holds through the kill of any process; a power loss may take the last acknowledged messages",
            hint="bus.sync_always = true for the embedded server; else sync_interval: always, or replicas"
            + ("" if interval else "; --monitor http://HOST:8222 reads it from the server"),
        )

    async def _skew(self, bus: Bus) -> Finding:
        before_s = time.time()
        reply = await bus.client.request(f"$JS.API.STREAM.INFO.{bus.subjects.stream('LEDGER')}", b"", timeout=5)
        middle_s = (before_s + time.time()) / 2
        stamp = json.loads(reply.data).get("ts", "")
        if not (match := re.fullmatch(r"(.{19})(\.\d{1,6})?\d*Z", stamp)):
            return ok("the server does not tell its time")
        server_s = datetime.fromisoformat(f"{match[1]}{(match[2] or '.0'):0<7}").replace(tzinfo=UTC).timestamp()
        skew_s = server_s - middle_s
        text = f"the server's clock is {abs(skew_s):.2f} s {'ahead' if skew_s > 0 else 'behind'}"
        if abs(skew_s) < SKEW_S_NOTED:
            return ok(text)
        level: Literal["fail", "note"] = "fail" if abs(skew_s) > SKEW_S_MAX else "note"
        return Finding(level, text, why="heartbeats look late; stores refuse old requests", hint="run NTP")

    async def _store(self) -> None:
        """Write, refuse to overwrite, read, delete: for real, under a name of its own."""
        url = self.folder.store_url(self.config)
        local = "://" not in url
        if local and not Path(url).exists():  # noqa: ASYNC240
            url = str(_existing(Path(url)) / f".headway-doctor-{secrets.token_hex(4)}")
        store, key = ObstoreBlobs.open(url, attempts=2), f"{self.config.run.name}/doctor/{secrets.token_hex(8)}"
        try:
            await store.put(key, b"first")
            await store.put(key, b"other")
            kept = (await store.get(key), await store.get_range(key, 1, 3))
            await store.delete(key)
            with contextlib.suppress(MissingBlob):
                await store.get(key)
                raise UnavailableError(f"{url}: a deleted object is still there")
        finally:
            if local and ".headway-doctor-" in url:
                shutil.rmtree(url, ignore_errors=True)
        if kept != (b"first", b"ir"):
            raise UnavailableError(
                f"{url}: an object was overwritten", why=f"read back {kept}", hint="a store with put-if-absent"
            )
        self.tell(ok(f"the store writes, reads, deletes and never overwrites: {self.folder.store_url(self.config)}"))
        if local:
            self.tell(
                Finding(
                    "note",
                    "the store is a local folder, which is not synced",
                    why="after a power loss objects that the ledger names may be missing or short; they are detected",
                    hint="an S3-compatible store, or a file system mounted with sync",
                )
            )

    async def _sandbox(self) -> None:
        from headway.sandbox.isolation import Sandbox
        from headway.sandbox.service import limits_of

        began_s = time.monotonic()
        sandbox = await Sandbox.start(limits_of(self.config.sandbox))  # starts, asks and ends one box
        await sandbox.close()
        self.tell(ok(f"a box was confined, answered and ended in {time.monotonic() - began_s:.2f} s"))

    async def _host(self) -> None:
        try:
            self.tell(ok(f"loopback ports are free, such as {free_port()}"))
        except OSError as error:
            self.tell(Finding("fail", "no free port on 127.0.0.1", why=str(error), hint="ss -tln"))
        folder = _existing(self.folder.path)
        if not os.access(folder, os.W_OK):
            self.tell(Finding("fail", f"{folder} is not writable", hint="--run-dir another one"))
        free_bytes, needed_bytes = shutil.disk_usage(folder).free, 6 * self.config.bus.max_stream_bytes
        text = f"{free_bytes / 2**30:.1f} GiB free in {folder}"
        if free_bytes < DISK_BYTES_MIN:
            self.tell(Finding("fail", text, why=f"less than {DISK_BYTES_MIN >> 30} GiB", hint="free space"))
        elif free_bytes < needed_bytes and not self.config.bus.url:
            why = f"six streams may grow to {needed_bytes / 2**30:.1f} GiB; full ones push back"
            self.tell(Finding("note", text, why=why, hint="lower bus.max_stream_bytes, or free space"))
        else:
            self.tell(ok(text))

    async def _keys(self) -> None:
        folder = Path(os.environ.get("HEADWAY_KEYS_DIR") or self.folder.keys)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]  # noqa: ASYNC240
        if not files:
            self.tell(ok(f"no keys in {folder} yet: `headway up` makes them"))
        for path in files:
            if path.stat().st_mode & 0o077:
                mode = f"{path.stat().st_mode & 0o777:04o}"
                why = f"its mode is {mode}: others can read what signs the ledger or opens the bus"
                self.tell(Finding("fail", f"{path} is not private", why=why, hint=f"chmod 600 {path}"))
        if files and all(not path.stat().st_mode & 0o077 for path in files):
            self.tell(ok(f"{len(files)} secrets in {folder}, readable by their owner alone"))

    async def _numerics(self) -> None:
        import torch

        from headway.kernels.selftest import refusal
        from headway.rollout_agent.engine.service import model_config

        threads, cores = self.config.engine.threads, os.cpu_count()
        torch.set_num_threads(threads)
        where = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {threads} of {cores} threads"
        dtype = getattr(torch, self.config.model.compute_dtype)
        broken = await asyncio.to_thread(refusal, model_config(self.config), dtype)
        if broken is None:
            self.tell(ok(f"arithmetic is bitwise independent of batching ({where})"))
        else:
            bitwise = self.config.engine.numerics == "bitwise"
            hint = "engine.threads = 1, or engine.numerics = 'replay'"
            what = f"arithmetic depends on batching ({where})"
            self.tell(Finding("fail" if bitwise else "note", what, why=broken, hint=hint))
        unset = [name for name in THREAD_VARIABLES if os.environ.get(name) != str(threads)]
        if unset:
            why = "idle BLAS threads spin; `headway up` sets them for its processes, other starters must"
            hint = " ".join(f"{name}={threads}" for name in unset)
            self.tell(Finding("note", f"{', '.join(unset)} not {threads} here", why=why, hint=hint))
        else:
            self.tell(ok(f"BLAS and OpenMP use {threads} thread"))


def _existing(path: Path) -> Path:
    """The nearest folder that exists."""
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def _silent(line: str) -> None:
    """A trial server has nothing to say."""
