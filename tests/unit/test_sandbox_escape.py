"""P12 against real boxes: model-written code reaches no network, host file, secret, grader or other session."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headway.sandbox import isolation
from headway.sandbox.isolation import Box, BoxFailed, Limits, Sandbox
from headway.schemas.errors import UnavailableError

REPO = Path(isolation.__file__).parents[1]
LIMITS = Limits(command_s=2.0, memory_bytes=256 << 20, work_bytes=2 << 20, tmp_bytes=2 << 20)


@pytest.fixture
async def sandbox(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandbox]:
    monkeypatch.setenv("HEADWAY_SECRET", "tell-nobody")
    sandbox = await Sandbox.start(LIMITS)
    yield sandbox
    await sandbox.close()


@pytest.fixture
async def box(sandbox: Sandbox) -> AsyncIterator[Box]:
    box = await sandbox.create()
    yield box
    await box.destroy()


async def run(box: Box, code: str, wall_s: float = 2.0) -> tuple[dict[str, object], str]:
    reply, data = await box.request("exec", code=code, wall_s=wall_s, output_bytes=4096)
    return reply, data.decode()


async def said(box: Box, code: str) -> str:
    return (await run(box, code))[1].strip()


def system_call(number: int, arguments: str) -> str:
    return f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall({number}, {arguments}), ctypes.get_errno())
"""


async def test_no_network_not_even_the_hosts_loopback(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\ns=socket.socket()\ns.settimeout(1)\nprint(s.connect_ex(('127.0.0.1', {port})))"
        assert int(await said(box, code)) not in (0,)
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    code = "import socket\ns=socket.socket()\ns.settimeout(1)\nprint(s.connect_ex(('192.0.2.1', 80)))"
    assert await said(box, code) == "101", "ENETUNREACH"


@pytest.mark.parametrize("family", [16, 17, 38, 40, 0x100000028, 4, 9])
async def test_no_socket_family_that_a_network_namespace_does_not_hold(box: Box, family: int) -> None:
    assert await said(box, system_call(41, f"ctypes.c_long({family}), 2, 0")) == "-1 1", "EPERM"


async def test_no_host_files(box: Box) -> None:
    paths = ["/etc/shadow", "/etc/passwd", "/home", "/var", "/sys", "/run", str(REPO), str(Path.home() / ".ssh")]
    paths += [sys.prefix, __file__]
    code = (
        f"import os\nfor p in {paths!r}:\n  if os.path.exists(p): print(p, os.listdir(p) if os.path.isdir(p) else '')"
    )
    assert await said(box, code) == ""


async def test_no_environment_of_the_host(box: Box) -> None:
    code = """
import os
print(dict(os.environ))
for p in os.listdir('/proc'):
    if p.isdigit():
        for name in ('environ', 'cmdline', 'stack', 'syscall'):
            try: text = open(f'/proc/{p}/{name}', errors='replace').read()
            except OSError: continue
            print(p, name, 'tell-' + 'nobody' in text, 'HEADWAY' in text)
"""
    text = await said(box, code)
    assert "environ False" in text, "its own is readable"
    assert "True" not in text


async def test_no_sight_of_other_sessions(sandbox: Sandbox, box: Box) -> None:
    other = await sandbox.create()
    await other.request("write", b"secret", path="theirs.txt")
    busy = asyncio.create_task(
        run(other, "import socket,time\ns=socket.socket(1)\ns.bind(b'\\0theirs')\ns.listen()\ntime.sleep(1.5)")
    )
    await asyncio.sleep(0.3)
    code = """
import os, socket
print(sorted(p for p in os.listdir('/proc') if p.isdigit()), os.getpid(), os.listdir('/work'), os.listdir('/tmp'))
print(socket.socket(1).connect_ex(b'\\0theirs'))
"""
    pids, refused = (await said(box, code)).splitlines()
    assert pids.startswith("['1', ")
    assert pids.count("'") == 4, "PID 1 and itself"
    assert pids.endswith("[] []")
    assert refused == "111"
    await busy
    await other.destroy()


async def test_fork_bomb_is_bounded_and_ends_with_its_command(box: Box) -> None:
    code = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        n += 1
except OSError as e:
    print(n, e.errno, flush=True)
"""
    count, number = (await said(box, code)).split()
    assert int(count) <= LIMITS.processes
    assert number == "11", "EAGAIN"
    assert await said(box, "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))") == "2"


async def test_memory_is_bounded(box: Box) -> None:
    code = "try:\n  bytearray(1 << 30); print('got it')\nexcept MemoryError: print('refused')"
    assert await said(box, code) == "refused"


async def test_disk_is_bounded(box: Box) -> None:
    code = """
for folder in ('/work', '/tmp'):
    total = 0
    try:
        for n in range(64):
            with open(f'{folder}/{n}', 'wb', 0) as f:
                for _ in range(16):
                    total += f.write(bytes(65536))
    except OSError as e:
        print(e.errno, total <= 2 << 20)
    try:
        for n in range(100000): open(f'{folder}/e{n}', 'w').close()
    except OSError as e:
        print(e.errno, n < 3000)
"""
    assert (await said(box, code)).splitlines() == ["28 True"] * 4


async def test_endless_output_is_cut(box: Box) -> None:
    started_s = time.monotonic()
    reply, text = await run(box, "while True: print('y' * 1000)")
    assert reply["truncated"] is True
    assert len(text) == 4096
    assert time.monotonic() - started_s < 1.5


async def test_endless_time_is_cut_and_the_box_lives(box: Box) -> None:
    reply, _ = await run(box, "while True: pass", wall_s=0.3)
    assert reply["timed_out"] is True
    assert await said(box, "print(1)") == "1"


async def test_a_daemon_that_holds_the_output_neither_keeps_the_command_open_nor_lives_on(box: Box) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
print('done', flush=True)
"""
    started_s = time.monotonic()
    assert await said(box, code) == "done"
    assert time.monotonic() - started_s < 1.5
    assert await said(box, "import os; print(len([p for p in os.listdir('/proc') if p.isdigit()]))") == "2"


async def test_nothing_of_the_system_is_writable(box: Box) -> None:
    code = """
import os
for path in ('/x', '/dev/x', '/dev/shm/x', '/usr/x', '/etc/x', '/root/x', '/proc/sys/kernel/core_pattern',
             '/proc/sys/user/max_user_namespaces', '/proc/sysrq-trigger', '/proc/1/mem', '/proc/1/oom_score_adj'):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
        print('wrote', path)
    except OSError: pass
"""
    assert await said(box, code) == ""


REFUSED_CALLS = {
    "io_uring_setup": (425, "8, b'x'*256"), "keyctl": (250, "0, -3, 1"), "add_key": (248, "b'user', b'a', b'b', 1, -2"),
    "ptrace": (101, "0, 0, 0, 0"), "bpf": (321, "0, 0, 0"), "perf_event_open": (298, "0, 0, -1, -1, 0"),
    "userfaultfd": (323, "1"), "mount": (165, "b'x', b'/tmp', b'tmpfs', 0, 0"), "unshare user": (272, "0x10000000"),
    "setns": (308, "0, 0"), "clone user": (56, "0x10000011, 0, 0, 0, 0"), "memfd_create": (319, "b'x', 0"),
    "process_vm_readv": (310, "1, 0, 0, 0, 0, 0"), "chroot": (161, "b'/tmp'"), "open_by_handle_at": (304, "0, 0, 0"),
    "shmget": (29, "0, 1<<20, 0o1600"), "pivot_root": (155, "b'/tmp', b'/tmp'"), "pidfd_getfd": (438, "0, 0, 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_CALLS)
async def test_dangerous_system_calls_are_refused(box: Box, name: str) -> None:
    number, arguments = REFUSED_CALLS[name]
    assert await said(box, system_call(number, arguments)) == "-1 1", "EPERM, from the filter"


async def test_clone3_looks_absent_and_no_capability_is_left(box: Box) -> None:
    code = """
import ctypes
l = ctypes.CDLL(None, use_errno=True)
print(l.syscall(435, 0, 0), ctypes.get_errno())
print({line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')})
print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('NoNewPrivs', 'Seccomp:'))])
print(open('/proc/sys/user/max_user_namespaces').read())
"""
    assert (await said(box, code)).split("\n")[:4] == ["-1 38", "{'0000000000000000'}", "['1', '2']", "0"]


async def test_a_command_cannot_touch_the_server_that_runs_it(box: Box) -> None:
    code = """
import os, signal
for number in (9, 15, 19, 11):
    try: os.kill(1, number)
    except OSError as e: print(e.errno)
for path in ('/proc/1/mem', '/proc/1/fd', '/proc/1/root/'):
    try: print(os.listdir(path) if path[-1] != 'm' else open(path, 'r+b'))
    except OSError as e: print('refused')
import gc, sys
sys.modules.clear(); gc.collect()
"""
    assert await said(box, code) == "refused\nrefused\nrefused"
    assert await said(box, "import os; print(os.listdir('/proc/self/fd'))") == "['0', '1', '2', '3', '4']"


async def test_programs_run_as_well_as_snippets(box: Box) -> None:
    reply, data = await box.request("exec", argv=["python3", "-c", "print(6*7)"], wall_s=2.0, output_bytes=99)
    assert (reply["status"], data) == (0, b"42\n")
    reply, data = await box.request("exec", argv=["no-such-program"], wall_s=2.0, output_bytes=99)
    assert reply["status"] == 1
    assert b"FileNotFoundError" in data


@pytest.mark.parametrize("make", ["os.mkfifo('f.py')", "os.symlink('/dev/zero', 'f.py')", "os.mkdir('f.py')"])
async def test_reading_a_trap_neither_hangs_nor_follows(box: Box, make: str) -> None:
    await run(box, f"import os; {make}")
    reply, data = await box.request("read", path="f.py", limit=1000)
    assert reply["error"] == "OSError" or reply["error"] == "IsADirectoryError"
    assert data == b""


async def test_a_box_that_dies_or_hangs_is_a_failure_of_the_box(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await sandbox.create()
    signal.pidfd_send_signal(box.pidfd, signal.SIGKILL)
    with pytest.raises(BoxFailed):
        await box.request("ping")
    await box.destroy()
    box = await sandbox.create()
    signal.pidfd_send_signal(box.pidfd, signal.SIGSTOP)
    monkeypatch.setattr(isolation, "GRACE_S", 0.1)
    with pytest.raises(BoxFailed, match="Timeout"):
        await box.request("ping", wall_s=0.1)
    await box.destroy()


async def test_a_lying_box_cannot_flood_or_confuse_the_host() -> None:
    for frame in (
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x01\0\0\0\0\0\0\0{",
        b"\0" * 8,
        b"\x02\0\0\0\0\0\0\0{}extra",
    ):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        child = subprocess.Popen(["sleep", "30"])  # noqa: ASYNC220
        box = Box(ours, os.pidfd_open(child.pid))
        theirs.sendall(frame)
        with pytest.raises(BoxFailed):
            await box.request("ping", wall_s=0.1)
        child.wait(5)
        await box.destroy()
        theirs.close()


HOST = """
import asyncio, os, sys
from headway.sandbox.isolation import Sandbox, Limits
async def main():
    sandbox = await Sandbox.start(Limits())
    box = await sandbox.create()
    await box.request("write", b"def f(x):\\n    return x+1\\n", path="f.py")
    _, data = await box.request("call", path="f.py", function="f", inputs=[1], output_bytes=99)
    pids = [open(f"/proc/self/fdinfo/{box.pidfd}").read().split("\\nPid:")[1].split()[0], sandbox._process.pid]
    print(data.decode().strip(), *pids, flush=True)
    if "stay" in sys.argv:
        await box.request("exec", code="import time; time.sleep(60)", wall_s=60.0, output_bytes=9)
    await box.destroy()
    await sandbox.close()
asyncio.run(main())
"""


def test_a_killed_host_leaves_no_process_behind() -> None:
    host = subprocess.Popen([sys.executable, "-c", HOST, "stay"], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    *_, inner, outer = host.stdout.readline().split()
    assert Path("/proc", inner).exists()
    host.kill()
    host.wait()
    host.stdout.close()
    end_s = time.monotonic() + 5
    while Path("/proc", inner).exists() or Path("/proc", outer).exists():
        assert time.monotonic() < end_s, "the box outlived its host"
        time.sleep(0.02)


def as_unprivileged_user(*options: str) -> subprocess.CompletedProcess[str]:
    """Run HOST as an ordinary user, in a view where that user can read our Python, whatever lies above it."""
    paths = {Path(p).resolve() for p in (sys.base_prefix, sys.prefix, REPO)}
    view = ["--dev-bind", "/", "/"]  # with the host's own /proc: a covered one forbids fresh ones
    ours = [path for path in sorted(paths) if not path.is_relative_to("/usr")]
    for top in sorted({Path("/", path.parts[1]) for path in ours} - set(ours)):
        view += ["--perms", "1777", "--tmpfs", str(top)]
    for path in ours:
        for parent in reversed(path.parents[:-2]):
            view += ["--perms", "0755", "--dir", str(parent)]
        view += ["--ro-bind", str(path), str(path)]
    drop = [] if options else ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "--"]
    command = [isolation._bwrap(), *view, *options, "--", *drop, sys.executable, "-c", HOST]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run unprivileged already")
def test_boxes_work_for_an_unprivileged_user() -> None:
    done = as_unprivileged_user()
    assert done.stdout.startswith('["int", 2]'), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a view in which user namespaces are off")
def test_without_user_namespaces_it_refuses_and_says_what_to_enable() -> None:
    done = as_unprivileged_user("--unshare-user", "--disable-userns", "--uid", "12345", "--gid", "12345")
    assert done.returncode != 0
    assert "UnavailableError" in done.stderr
    assert "nothing runs outside one" in done.stderr
    assert "namespaces" in done.stderr


async def test_without_bwrap_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_bwrap", lambda: "/bin/false")
    with pytest.raises(UnavailableError, match="no sandbox can be made"):
        await Sandbox.start(LIMITS)
