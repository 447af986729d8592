"""What mid-training reads: Python source as fixed windows of tokens, and demonstrator sessions.

Document boundaries are respected by cutting, not by masks: every window starts with BOS and holds bytes
of one file only, so no token ever attends to another document.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.schemas.errors import InputError
from headway.schemas.vocab import BOS, encode

SKIPPED_FOLDERS = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "turtledemo"})
FILE_BYTES_MAX = 1 << 20
LINE_BYTES_MAX = 1 << 20
SESSIONS_MAX = 1 << 20
BUILD_FIRST = "build the task set first: `headway tasks build`"

IntArray = np.ndarray[Any, np.dtype[np.int32]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One sequence. token_ids: int32 [T], BOS first. trained: bool [T], True where a token is to be predicted."""

    token_ids: IntArray
    trained: BoolArray


def stdlib_files(root: Path | None = None) -> list[Path]:
    """Python sources of the standard library, without tests, in an order that is a pure function of their names.

    Sorted by the SHA-256 of the relative path, so that a prefix of the list is a fair sample of the library.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(name.parts[:-1]) and path.is_file():
            found.append((hashlib.sha256(name.as_posix().encode()).digest(), path))
    return [path for _, path in sorted(found)]


def code_windows(files: list[Path], window_tokens: int, bytes_max: int) -> list[Session]:
    """Windows of BOS + source bytes, all of `window_tokens` tokens, from the first `bytes_max` bytes of `files`.

    They do not overlap; a file's tail that is shorter than a window is left out.
    Raises InputError when not one window results.
    """
    body, left = window_tokens - 1, bytes_max
    trained = np.arange(window_tokens) > 0
    windows = []
    for path in files:
        source = path.read_bytes()[: min(FILE_BYTES_MAX, left)]
        for at in range(0, len(source) - body + 1, body):
            token_ids = np.frombuffer(source[at : at + body], np.uint8).astype(np.int32)
            windows.append(Session(token_ids=np.concatenate([[np.int32(BOS)], token_ids]), trained=trained))
        left -= len(source) // body * body
    if not windows:
        raise InputError(
            f"no code to pretrain on: {len(files)} files give no window of {window_tokens} tokens",
            hint="install the standard library's sources, or set midtrain.pretrain_steps = 0",
        )
    return windows


def read_sessions(path: Path, tokens_max: int) -> list[Session]:
    """Sessions of a JSONL file whose lines are {"segments": [[text, trained], ...]}; BOS is put in front.

    Raises InputError naming file and line for anything else, for a session above `tokens_max` tokens, or
    without a single trained token.
    """
    try:
        with path.open("rb") as file:
            sessions = [_session(line, f"{path} line {number}", tokens_max) for number, line in _lines(file, path)]
    except OSError as error:
        raise InputError(f"cannot read the demonstrator sessions {path}", why=str(error), hint=BUILD_FIRST) from None
    if not sessions:
        raise InputError(f"{path} holds no session", hint=BUILD_FIRST)
    return sessions


def _lines(file: Any, path: Path) -> Iterator[tuple[int, bytes]]:
    for number in range(1, SESSIONS_MAX + 2):
        line = file.readline(LINE_BYTES_MAX + 1)
        if not line:
            return
        if number > SESSIONS_MAX or len(line) > LINE_BYTES_MAX:
            raise InputError(
                f"{path} line {number}: more than {SESSIONS_MAX} lines, or one above {LINE_BYTES_MAX} bytes"
            )
        yield number, line


def _session(line: bytes, where: str, tokens_max: int) -> Session:
    token_ids, trained = [BOS], [False]
    try:
        for text, is_trained in json.loads(line)["segments"]:
            if not isinstance(text, str) or not isinstance(is_trained, bool):
                raise TypeError("a segment is [text, true or false]")
            ids = encode(text)
            token_ids += ids
            trained += [is_trained] * len(ids)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{where}: not a session", why=f"{type(error).__name__}: {str(error)[:200]}") from None
    if len(token_ids) > tokens_max or not any(trained):
        raise InputError(
            f"{where}: {len(token_ids)} tokens, {sum(trained)} of them trained",
            why=f"a session has at most {tokens_max} tokens and at least one trained",
        )
    return Session(token_ids=np.asarray(token_ids, np.int32), trained=np.asarray(trained, np.bool_))


def draw(total: int, count: int, step: int, seed: int) -> list[int]:
    """Indices of step `step` when `total` items are read in seeded epochs, `count` a step.

    A pure function, so that a resumed run reads on exactly where the killed one stood.
    """
    picked: list[int] = []
    for at in range(step * count, (step + 1) * count):
        epoch, offset = divmod(at, total)
        if not picked or offset == 0:
            order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(total)
        picked.append(int(order[offset]))
    return picked
