"""The exception tree and the exit codes.

HeadwayError                 base; carries what happened, why, and what to try
├── ConfigError        (64)  run.toml or an option is wrong
├── InputError         (65)  bad bytes from a file or the wire
│   └── WireError            a message or array that may not be decoded or trusted
├── UnavailableError   (69)  a server, store, engine or sandbox cannot be reached
├── PromiseViolated    (70)  one of P1-P12 does not hold; never continue
└── FencedOut          (75)  another writer holds a newer term
"""

from __future__ import annotations

import errno


class HeadwayError(Exception):
    """An error a person has to act on.

    Args:
        what: what happened, with the offending value and its source.
        why: the cause, where known.
        hint: what to try.
    """

    exit_code = 70

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        self.what, self.why, self.hint = what, why, hint
        parts = [what, f"why: {why}" if why else "", f"try: {hint}" if hint else ""]
        super().__init__("; ".join(part for part in parts if part))


class ConfigError(HeadwayError):
    exit_code = 64


class InputError(HeadwayError):
    exit_code = 65


class WireError(InputError):
    """Bytes from the wire that are malformed, oversized, newer than we read, or inconsistent.

    `reason` is a subject-safe token ([a-z_]+) under which the message goes to `rl.<run>.dead.<reason>`.
    """

    def __init__(self, reason: str, what: str, *, why: str = "", hint: str = "") -> None:
        self.reason = reason
        super().__init__(what, why=why, hint=hint)


class UnavailableError(HeadwayError):
    exit_code = 69


def from_os(error: OSError) -> UnavailableError | None:
    """What a failure of the operating system means to a person; None for one that is a bug of ours."""
    hints = {
        errno.ENOSPC: "free disk space; what was written before is whole",
        errno.EDQUOT: "free disk space or raise the quota; what was written before is whole",
        errno.EROFS: "a folder that can be written (--run-dir, HEADWAY_RUN_DIR)",
        errno.EACCES: "a folder that can be written (--run-dir, HEADWAY_RUN_DIR), or its permissions",
        **dict.fromkeys(
            (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EPERM),
            "another path: this one cannot be made, or is something else already",
        ),
    }
    if error.errno not in hints:
        return None
    return UnavailableError(
        f"cannot write {error.filename or 'a file'}", why=str(error.strerror), hint=hints[error.errno]
    )


class PromiseViolated(HeadwayError):
    exit_code = 70


class FencedOut(HeadwayError):
    exit_code = 75
