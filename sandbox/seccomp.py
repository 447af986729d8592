"""The system calls that no box may make, as a BPF program for the kernel.

A denylist over namespaces, which already hide files, processes and networks: it removes the kernel's
larger attack surfaces (io_uring, bpf, keys, namespaces, mounts), memory that no rlimit counts
(memfd, System V), and socket families that a network namespace does not contain (vsock reaches the hypervisor).
"""

from __future__ import annotations

import errno
import tempfile

from headway.schemas.errors import UnavailableError

REFUSED = (
    "io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key ptrace process_vm_readv "
    "process_vm_writev process_madvise kcmp pidfd_getfd bpf perf_event_open userfaultfd mount umount "
    "umount2 pivot_root chroot fsopen fsmount fsconfig fspick move_mount open_tree mount_setattr swapon "
    "swapoff quotactl acct reboot kexec_load kexec_file_load init_module finit_module delete_module iopl "
    "ioperm modify_ldt unshare setns name_to_handle_at open_by_handle_at lookup_dcookie syslog "
    "settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname vhangup fanotify_init "
    "mbind set_mempolicy migrate_pages move_pages memfd_create memfd_secret shmget semget msgget mq_open "
    "nfsservctl "
)
NAMESPACE_FLAGS = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
UNIX, LAST_INET_FAMILY = 1, 10
ALLOWED_FAMILIES = (UNIX, 2, LAST_INET_FAMILY)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C


def filter_program() -> bytes:
    """The BPF program. Raises UnavailableError without libseccomp."""
    try:
        import pyseccomp as seccomp  # type: ignore[import-untyped]
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(
            "the sandbox has no libseccomp", why=str(error), hint="install the system package libseccomp2"
        ) from None
    denied, arg = seccomp.ERRNO(errno.EPERM), seccomp.Arg
    program = seccomp.SyscallFilter(seccomp.ALLOW)
    for name in REFUSED.split():
        try:
            program.add_rule(denied, name)
        except ValueError:
            continue  # this libseccomp or architecture has no such call
    program.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")  # its flags are behind a pointer; libc uses clone then
    for flag in NAMESPACE_FLAGS:
        program.add_rule(denied, "clone", arg(0, seccomp.MASKED_EQ, flag, flag))
    program.add_rule(denied, "socket", arg(0, seccomp.GT, LAST_INET_FAMILY))
    for family in set(range(LAST_INET_FAMILY)) - set(ALLOWED_FAMILIES):
        program.add_rule(denied, "socket", arg(0, seccomp.EQ, family))
    for request in (TIOCSTI, TIOCLINUX):
        program.add_rule(denied, "ioctl", arg(1, seccomp.MASKED_EQ, 0xFFFFFFFF, request))
    with tempfile.TemporaryFile() as file:
        program.export_bpf(file)
        file.seek(0)
        return file.read()
