"""The program inside the sandbox: a fork server, the boxes it forks, and a box's command server.

One file without imports of ours: the host passes its text to `python -c` inside bwrap. Three roles follow
each other in one process tree:

  zygote   trusted; runs under bwrap, holds no secret, never sees a byte of a session. For each socket
           that the host sends over it forks a box on that socket.
  box      PID 1 of its own user, pid, mount, net, ipc, uts and cgroup namespaces, without capabilities,
           under the seccomp filter. Serves the host's commands on its socket.
  command  a fresh child per command, so that what it does to its interpreter ends with it. When it is
           over, PID 1 kills every other process of the namespace: nothing outlives a command.

Frame, both ways: u32 header bytes, u32 payload bytes, header (JSON), payload. The host trusts no reply.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

WORK = "/work"
MAX_FRAME_BYTES = 4 << 20
PIPE_BYTES = 1 << 16

CLONE_ALL = 0x10000000 | 0x20000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
CAPABILITY_VERSION_3, LAST_CAP = 0x20080522, 40

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, argument: object = 0, third: object = 0) -> None:
    check(libc.prctl(option, argument, third, 0, 0), f"prctl {option}")


def mount(kind: str, target: str, flags: int, data: str = "") -> None:
    check(libc.mount(kind.encode(), target.encode(), kind.encode(), flags, data.encode()), f"mount {target}")


def write_file(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)  # a third of what a text file object costs
    os.write(descriptor, text.encode())
    os.close(descriptor)


# --- zygote ---------------------------------------------------------------------------------------


def run_zygote(control: socket.socket) -> None:
    """Fork a box for every socket received; answer an empty request with the CPU seconds used so far."""
    config = json.loads(control.recv(1 << 16))
    if config["uid"]:  # started by root: rlimits on processes do not bind root, so stop being it
        # For root bwrap covers parts of /proc; the kernel then forbids boxes a fresh one unless it sees a whole one.
        mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        os.setgroups([])
        os.setresgid(config["uid"], config["uid"], config["uid"])
        os.setresuid(config["uid"], config["uid"], config["uid"])
    drop_capabilities()
    prctl(PR_SET_DUMPABLE, 1)  # or root would own the files of /proc/self written below and in boxes
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # changing the uid forgot what bwrap had set
    write_file("/proc/self/oom_score_adj", "1000")  # when the machine runs out, boxes go first
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 4096, 1)
        reap()
        if not message:
            return
        if not sockets:
            control.send(json.dumps(cpu_s()).encode())
            continue
        try:
            child = os.fork()
        except OSError:
            child = -1  # the host sees the socket close: the box failed to start
        if child == 0:
            control.close()
            with socket.socket(fileno=sockets[0]) as channel:
                start_box(channel, config)
            os._exit(0)
        os.close(sockets[0])


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def drop_capabilities() -> None:
    for capability in range(LAST_CAP + 1):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused where already gone or unknown
    header, nothing = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, nothing), "capset")


# --- box ------------------------------------------------------------------------------------------


def start_box(channel: socket.socket, config: dict[str, Any]) -> None:
    """Enter fresh namespaces, fork their PID 1, hand the host a pidfd of it (the host's only handle)."""
    uid, gid = os.getuid(), os.getgid()
    check(libc.unshare(CLONE_ALL), "unshare")
    prctl(PR_SET_DUMPABLE, 1)
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"1000 {uid} 1")
    write_file("/proc/self/gid_map", f"1000 {gid} 1")
    child = os.fork()
    if child:
        socket.send_fds(channel, [b"\0"], [os.pidfd_open(child)])
        return
    failure = ""
    try:
        confine(config)
    except OSError as error:
        failure = str(error)
    serve(channel, config, failure)


def confine(config: dict[str, Any]) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount private")
    mount("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for target, size in ((WORK, config["work_bytes"]), ("/tmp", config["tmp_bytes"])):
        options = f"size={size},nr_inodes={config['inodes']},mode=0755"
        mount("tmpfs", target, MS_NOSUID | MS_NODEV, options)
    write_file("/proc/sys/user/max_user_namespaces", "0")
    socket.sethostname("box")
    os.chdir(WORK)
    for name, limit in config["rlimits"].items():
        number = getattr(resource, name)
        resource.setrlimit(number, (limit, limit))
    prctl(PR_SET_DUMPABLE, 0)  # a command must not reach PID 1 through /proc/1
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    drop_capabilities()
    code = bytes.fromhex(config["filter"])
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(program, len(program)))


def serve(channel: socket.socket, config: dict[str, Any], failure: str) -> None:
    """Answer commands until the host closes the socket; PID 1's end is the end of the box."""
    while True:
        header, payload = receive(channel)
        try:
            reply, data = COMMANDS[header["op"]](header, payload, config)
            if failure:
                reply = {"error": "SetupFailed", "detail": failure}
        except (OSError, ValueError) as error:
            reply, data = {"error": type(error).__name__, "detail": str(error)[:200]}, b""
        head = json.dumps(reply).encode()
        channel.sendall(struct.pack("<II", len(head), len(data)) + head + data)


def receive(channel: socket.socket) -> tuple[dict[str, Any], bytes]:
    lengths = struct.unpack("<II", receive_exactly(channel, 8))
    return json.loads(receive_exactly(channel, lengths[0])), receive_exactly(channel, lengths[1])


def receive_exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            os._exit(0)
        parts += part
    return bytes(parts)


def do_ping(header: dict[str, Any], payload: bytes, config: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    return {}, b""


def do_write(header: dict[str, Any], payload: bytes, config: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Replace a file; with `check`, only when its text compiles as Python."""
    if header.get("check"):
        try:
            compile(payload, header["path"], "exec", dont_inherit=True)
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            return {"error": "SyntaxError", "detail": type(error).__name__}, b""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    os.makedirs(os.path.dirname(header["path"]) or ".", exist_ok=True)
    with open(os.open(header["path"], flags, 0o644), "wb") as file:
        file.write(payload)
    return {}, b""


def do_read(header: dict[str, Any], payload: bytes, config: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """A regular file's first `limit` bytes; nothing that blocks, no link."""
    descriptor = os.open(header["path"], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        return {"size": os.fstat(descriptor).st_size}, file.read(min(header["limit"], MAX_FRAME_BYTES))


def do_call(header: dict[str, Any], payload: bytes, config: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Call one function of a Python file on each input; a JSON line per call, as far as they got."""

    def body(output: int) -> None:
        with open(header["path"], "rb") as file:
            source = file.read()
        namespace: dict[str, Any] = {"__name__": "workspace"}
        exec(compile(source, header["path"], "exec", dont_inherit=True), namespace)  # noqa: S102
        function = namespace[header["function"]]
        for value in header["inputs"]:
            os.write(output, call_once(function, value).encode() + b"\n")

    return run_child(body, header, config)


def call_once(function: Callable[[int], object], argument: int) -> str:
    try:
        value = function(argument)
        if type(value) is int:
            return json.dumps(["int", value]) if abs(value) < 1 << 62 else '["error", "too large"]'
        return json.dumps(["other", repr(value)[:40]])
    except BaseException as error:  # whatever the model's code raises is its result
        return json.dumps(["error", type(error).__name__[:40]])


def do_exec(header: dict[str, Any], payload: bytes, config: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Run argv, or `code` as Python in the forked interpreter; the payload is what it printed."""

    def body(output: int) -> None:
        os.dup2(output, 1)
        os.dup2(output, 2)
        prctl(PR_SET_DUMPABLE, 1)
        environment = config["environment"]
        os.environ.clear()
        os.environ.update(environment)
        if "code" in header:
            exec(compile(header["code"], "<code>", "exec", dont_inherit=True), {"__name__": "__main__"})  # noqa: S102
            sys.stdout.flush()
        else:
            os.execvpe(header["argv"][0], header["argv"], environment)

    return run_child(body, header, config)


def run_child(
    body: Callable[[int], None], header: dict[str, Any], config: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    """Fork, run body(write end of a pipe), gather at most `output_bytes` until exit or deadline.

    Returns when the child itself is gone, whatever still holds its output; then kills the namespace's rest.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        child_main(body, writer, header)
    os.close(writer)
    exited = os.pidfd_open(child)
    poller = select.poll()
    poller.register(exited, select.POLLIN)
    if header["op"] == "exec":  # the pipe holds all of a call's output: sleep through it
        poller.register(reader, select.POLLIN)
    output, limit = bytearray(), header["output_bytes"]
    deadline = time.monotonic() + header["wall_s"]
    timed_out = True
    while (left_s := deadline - time.monotonic()) > 0 and len(output) <= limit:
        ready = dict(poller.poll(left_s * 1000 + 1))
        if exited in ready:  # a daemon may still hold the pipe; it is not waited for
            timed_out = False
            break
        if reader in ready:
            part = os.read(reader, PIPE_BYTES)
            output += part
            if not part:
                poller.unregister(reader)
    status = kill_the_rest(child)
    while len(output) <= limit and (part := os.read(reader, PIPE_BYTES)):  # ends: no writer is left
        output += part
    reply = {"status": status, "truncated": len(output) > limit}
    reply["timed_out"] = timed_out and not reply["truncated"]
    os.close(reader)
    os.close(exited)
    return reply, bytes(output[:limit])


def child_main(body: Callable[[int], None], writer: int, header: dict[str, Any]) -> None:
    """The command's own process: keeps the output pipe and nothing else of the server's."""
    try:
        os.setsid()
        os.dup2(writer, 3)
        os.closerange(4, 1 << 20)
        cpu = int(header["wall_s"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        body(3)
        os._exit(0)
    except SystemExit as error:
        os._exit(error.code if type(error.code) is int else 1)
    except BaseException as error:  # its traceback would show our frames; the name is enough
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:4096])
    finally:
        os._exit(1)


def kill_the_rest(child: int) -> int:
    """SIGKILL everything but PID 1, reap it all; the child's exit code, or minus its signal."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    status = -int(signal.SIGKILL)
    try:
        while True:
            pid, raw = os.waitpid(-1, 0)
            if pid == child:
                status = os.waitstatus_to_exitcode(raw)
    except ChildProcessError:
        return status


COMMANDS = {"ping": do_ping, "write": do_write, "read": do_read, "call": do_call, "exec": do_exec}

if __name__ == "__main__":
    run_zygote(socket.socket(fileno=int(sys.argv[1])))
