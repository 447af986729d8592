"""The `repo` task set: small Python packages, each with one fault to find and repair.

A task is a package of ours with one line replaced, the complaint of somebody who met the fault, and calls that decide:
module, function, arguments, and the value that is due. The package's own tests, which the session may run, miss some
faults. The wanted values never enter a box, so only computing them earns anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.schemas.errors import InputError
from headway.schemas.wire import digest_of

ENV = "repo"
FILES_BYTES_MAX = 256 << 10
TASK_SET_BYTES_MAX = 64 << 20
PARTS = ("train", "heldout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`function(*arguments)` of `module` is due to be `want`, as JSON."""

    module: str
    function: str
    arguments: list[Any]
    want: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoTask:
    """What a session starts from and what decides."""

    id: str
    split: str
    statement: str
    files: dict[str, str]
    checks: list[Check]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that is right, and `faults`: (file, text that is replaced, by what, what somebody says of it)."""

    files: dict[str, str]
    checks: tuple[tuple[str, str, list[Any], Any], ...]
    faults: tuple[tuple[str, str, str, str], ...]


SPANS = Package(
    files={
        "spans/__init__.py": "",
        "spans/merge.py": '''"""Half-open spans of whole numbers: [start, end)."""


def merge(spans):
    """The same numbers in as few spans as possible, in order."""
    merged = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def total(spans):
    """How many numbers the spans cover."""
    return sum(end - start for start, end in merge(spans))
''',
        "spans/holes.py": '''"""What spans leave out."""

from spans.merge import merge


def holes(spans, start, end):
    """The spans of [start, end) that are in none of `spans`."""
    found, at = [], start
    for low, high in merge(spans):
        if high <= start or low >= end:
            continue
        if low > at:
            found.append([at, low])
        at = max(at, high)
    if at < end:
        found.append([at, end])
    return found
''',
        "test_spans.py": """import unittest

from spans.holes import holes
from spans.merge import merge, total


class Spans(unittest.TestCase):
    def test_merge(self):
        self.assertEqual(merge([[5, 8], [1, 3]]), [[1, 3], [5, 8]])
        self.assertEqual(merge([[1, 4], [3, 6]]), [[1, 6]])

    def test_total(self):
        self.assertEqual(total([[0, 3], [10, 12]]), 5)

    def test_holes(self):
        self.assertEqual(holes([[2, 4]], 0, 10), [[0, 2], [4, 10]])


if __name__ == "__main__":
    unittest.main()
""",
    },
    checks=(
        ("spans.merge", "merge", [[[3, 5], [1, 3]]], [[1, 5]]),
        ("spans.merge", "merge", [[[1, 9], [2, 3], [9, 9]]], [[1, 9]]),
        ("spans.merge", "merge", [[[4, 2], [7, 8]]], [[7, 8]]),
        ("spans.merge", "merge", [[[5, 5], [1, 2]]], [[1, 2]]),
        ("spans.merge", "total", [[[0, 4], [2, 6], [8, 9]]], 7),
        ("spans.merge", "total", [[]], 0),
        ("spans.holes", "holes", [[[0, 2], [5, 20]], 0, 10], [[2, 5]]),
        ("spans.holes", "holes", [[[1, 8], [2, 3]], 0, 10], [[0, 1], [8, 10]]),
        ("spans.holes", "holes", [[[-5, 1], [9, 12]], 0, 10], [[1, 9]]),
        ("spans.holes", "holes", [[], 3, 3], []),
    ),
    faults=(
        ("spans/merge.py", "start <= merged[-1][1]", "start < merged[-1][1]", "merge keeps spans that touch apart."),
        (
            "spans/merge.py",
            "max(merged[-1][1], end)",
            "end",
            "A span inside another one makes the merged span end too early.",
        ),
        ("spans/merge.py", "if start >= end:", "if start > end:", "An empty span at the end of others is kept."),
        ("spans/merge.py", "in merge(spans))", "in spans)", "total counts numbers twice that are in two spans."),
        ("spans/holes.py", "at = max(at, high)", "at = low", "holes reports numbers as missing that are in a span."),
        ("spans/holes.py", "[at, end]", "[start, end]", "The last hole is too large."),
    ),
)

WORDS = Package(
    files={
        "words/__init__.py": "",
        "words/count.py": '''"""Counting words."""


def words(text):
    """The words of a text in lower case, without punctuation around them."""
    parts = [part.strip(".,;:!?\\"'()") for part in text.lower().split()]
    return [part for part in parts if part]


def most_common(text, count):
    """The `count` most frequent words with how often they occur; of equals the alphabetically first."""
    seen = {}
    for word in words(text):
        seen[word] = seen.get(word, 0) + 1
    ranked = sorted(seen.items(), key=lambda item: (-item[1], item[0]))
    return [list(item) for item in ranked[:count]]
''',
        "words/wrap.py": '''"""Lines of bounded width."""


def wrap(text, width):
    """The words of `text` in lines of at most `width` letters; a longer word gets a line of its own."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    if line:
        lines.append(line)
    return lines
''',
        "test_words.py": """import unittest

from words.count import most_common, words
from words.wrap import wrap


class Words(unittest.TestCase):
    def test_words(self):
        self.assertEqual(words("One two, one."), ["one", "two", "one"])

    def test_most_common(self):
        self.assertEqual(most_common("a a a b b c", 2), [["a", 3], ["b", 2]])

    def test_wrap(self):
        self.assertEqual(wrap("the cat sat", 8), ["the cat", "sat"])


if __name__ == "__main__":
    unittest.main()
""",
    },
    checks=(
        ("words.count", "words", ['(Who?) Me -- "you"!'], ["who", "me", "--", "you"]),
        ("words.count", "words", [" ... . "], []),
        ("words.count", "most_common", ["b a b a c", 3], [["a", 2], ["b", 2], ["c", 1]]),
        ("words.count", "most_common", ["B, b; B", 1], [["b", 3]]),
        ("words.count", "most_common", ["", 2], []),
        ("words.wrap", "wrap", ["aa bb cc", 5], ["aa bb", "cc"]),
        ("words.wrap", "wrap", ["a longestword b", 4], ["a", "longestword", "b"]),
        ("words.wrap", "wrap", ["aa bb cc", 4], ["aa", "bb", "cc"]),
        ("words.wrap", "wrap", ["", 4], []),
    ),
    faults=(
        ("words/count.py", "text.lower().split()", "text.split()", "most_common counts Word and word apart."),
        ("words/count.py", "(-item[1], item[0])", "-item[1]", "Of words that are equally frequent any comes first."),
        ("words/count.py", "if part]", "]", "A lone dot counts as a word."),
        ("words/wrap.py", "> width", ">= width", "wrap never fills a line to its full width."),
        ("words/wrap.py", "len(line) + 1 + len(word)", "len(line) + len(word)", "Some lines are one letter too wide."),
        ("words/wrap.py", "    if line:\n        lines.append(line)\n", "", "wrap loses the last line."),
    ),
)
PACKAGES = {"spans": SPANS, "words": WORDS}
HELDOUT_EVERY = 4
"""Every fourth fault of a package is held out."""


def tasks() -> Iterator[RepoTask]:
    """Every fault of every package."""
    for name, package in PACKAGES.items():
        checks = [Check(module=m, function=f, arguments=a, want=w) for m, f, a, w in package.checks]
        for number, (file, right, wrong, statement) in enumerate(package.faults):
            assert package.files[file].count(right) == 1, f"{name}: {right!r} does not stand in {file} once"
            yield RepoTask(
                id=f"{name}-{number:03d}",
                split="heldout" if number % HELDOUT_EVERY == HELDOUT_EVERY - 1 else "train",
                statement=statement,
                files={**package.files, file: package.files[file].replace(right, wrong)},
                checks=checks,
            )


def build(out_dir: Path) -> dict[str, Any]:
    """Write train.jsonl, heldout.jsonl and summary.json into `out_dir`; the summary. There are no demonstrations."""
    out_dir.mkdir(parents=True, exist_ok=True)
    everything = list(tasks())
    parts = []
    for part in PARTS:
        lines = [json.dumps(asdict(task), separators=(",", ":")) for task in everything if task.split == part]
        parts.append("".join(line + "\n" for line in lines).encode())
        (out_dir / f"{part}.jsonl").write_bytes(parts[-1])
    (out_dir / "sessions.jsonl").write_text("")
    summary = {
        "env": ENV,
        "task_set": digest_of(b"".join(parts)),
        "train_tasks": parts[0].count(b"\n"),
        "heldout_tasks": parts[1].count(b"\n"),
        "sessions": 0,
    }
    (out_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def load(folder: Path) -> tuple[str, dict[str, RepoTask]]:
    """The digest and the tasks by id, of what `build` or anybody else wrote. Raises InputError."""
    try:
        parts = [(folder / f"{part}.jsonl").read_bytes() for part in PARTS]
        if sum(map(len, parts)) > TASK_SET_BYTES_MAX:
            raise ValueError(f"larger than {TASK_SET_BYTES_MAX} bytes")
        rows = [json.loads(line) for part in parts for line in part.splitlines()]
        found = [RepoTask(**{**row, "checks": [Check(**check) for check in row["checks"]]}) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"no readable task set in {folder}", why=str(error)[:200], hint="build it: `headway tasks build repo`"
        ) from None
    return digest_of(b"".join(parts)), {task.id: task for task in found}
