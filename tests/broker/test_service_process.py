"""A service as a process: what it tells systemd, and with which code it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.bus.notify import notify
from headway.bus.server import free_port

SCRIPT = """
import asyncio, errno, sys, time
from headway.bus.service import run_service
from headway.schemas import errors
from headway.schemas.config import Config

async def main(service):
    if sys.argv[1] == "hang":
        time.sleep(2.5)
    elif sys.argv[1] == "drain":
        await service.stop.wait()
        await asyncio.sleep(60)
    elif sys.argv[1] == "full":
        raise OSError(errno.ENOSPC, "No space left on device", "weights.bin")
    elif sys.argv[1] != "serve":
        raise getattr(errors, sys.argv[1])("scripted", why="a test", hint="nothing")
    await service.stop.wait()

sys.exit(run_service("dispatcher", Config(), main))
"""


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """systemd's end of NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


@contextlib.contextmanager
def start(nats: Any, what: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    where = {"HEADWAY_NATS_URL": nats.settings.url, "HEADWAY_NATS_TOKEN": nats.settings.token}
    env = {**os.environ, **where, "HEADWAY_RUN_DIR": str(tmp_path / "r")}
    command = [sys.executable, "-P", "-c", SCRIPT, what]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def until(listener: socket.socket, wanted: bytes) -> list[bytes]:
    heard = [listener.recv(256)]
    while heard[-1] != wanted:
        heard.append(listener.recv(256))
    return heard


def test_systemd_hears_ready_then_a_pulse_then_stopping(
    nats_process: Any, listener: socket.socket, tmp_path: Path
) -> None:
    with start(nats_process, "serve", tmp_path) as process:
        until(listener, b"READY=1")
        assert until(listener, b"WATCHDOG=1")[-1] == b"WATCHDOG=1"
        until(listener, b"WATCHDOG=1")
        process.send_signal(signal.SIGTERM)
        until(listener, b"STOPPING=1")
        assert process.wait(10) == 0


def test_a_second_signal_ends_a_draining_service_at_once(
    nats_process: Any, listener: socket.socket, tmp_path: Path
) -> None:
    with start(nats_process, "drain", tmp_path) as process:
        until(listener, b"READY=1")
        process.send_signal(signal.SIGTERM)
        until(listener, b"STOPPING=1")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 130


def test_a_hanging_event_loop_has_no_pulse(nats_process: Any, listener: socket.socket, tmp_path: Path) -> None:
    with start(nats_process, "hang", tmp_path):
        until(listener, b"READY=1")
        began_s = time.monotonic()
        until(listener, b"WATCHDOG=1")
        assert time.monotonic() - began_s > 2


def test_without_systemd_or_with_a_broken_socket_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "@nobody-listens-here")
    notify("READY=1")


@pytest.mark.parametrize(
    ("what", "code"), [("ConfigError", 64), ("InputError", 65), ("PromiseViolated", 70), ("FencedOut", 75)]
)
def test_a_failure_ends_the_process_with_its_code_and_one_line_of_what_why_and_hint(
    nats_process: Any, tmp_path: Path, what: str, code: int
) -> None:
    with start(nats_process, what, tmp_path) as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == code
    [failure] = [json.loads(line) for line in said.decode().splitlines() if "service_failed" in line]
    assert (failure["kind"], failure["why"], failure["hint"]) == (what, "a test", "nothing")
    assert b"Traceback" not in said


def test_a_full_disk_ends_a_service_with_69_and_the_file(nats_process: Any, tmp_path: Path) -> None:
    with start(nats_process, "full", tmp_path) as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == 69
    assert b"cannot write weights.bin" in said
    assert b"Traceback" not in said


@pytest.fixture
async def old_server() -> Any:
    """Says that it is nats-server 2.9.10, and answers pings."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "x", "version": "2.9.10", "headers": True, "max_payload": 1 << 20, "proto": 1}
        writer.write(f"INFO {json.dumps(info)}\r\n".encode())
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", free_port())
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_a_server_that_is_too_old_is_refused_with_its_version(old_server: int) -> None:
    from headway.bus.connection import Bus
    from headway.schemas.errors import UnavailableError

    with pytest.raises(UnavailableError, match=r"2\.9\.10 is too old") as caught:
        await Bus.connect(f"nats://127.0.0.1:{old_server}", "r")
    assert "2.11" in caught.value.hint


@pytest.mark.parametrize(("token", "why"), [("wrong", "authorization"), ("", "Connect call failed")])
async def test_a_server_that_cannot_be_reached_is_named_with_the_reason(
    nats_process: Any, monkeypatch: pytest.MonkeyPatch, token: str, why: str
) -> None:
    from headway.bus import connection
    from headway.schemas.errors import UnavailableError

    monkeypatch.setattr(connection, "CONNECT_S_MAX", 1.0)
    url = nats_process.settings.url if token else f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError, match="cannot connect to NATS at nats://127") as caught:
        await connection.Bus.connect(url, "r", token=token)
    assert why.lower() in caught.value.why.lower()
    assert caught.value.hint
