"""Every boundary of durability has a fail point on both sides, and a fail point does what it is told, once."""

from __future__ import annotations

import ast
import fnmatch
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.bus import failpoints
from headway.bus.failpoints import POINTS, PUBLISHED, UPLOADED, armed, failpoint, uploaded
from headway.schemas.errors import ConfigError, UnavailableError
from headway.schemas.ledger import LedgerEntry
from headway.schemas.messages import BUS_MESSAGES
from headway.schemas.subjects import Keys

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "bus", "sandbox", "kernels", "weight_sync", "rollout_agent", "trainer", "deploy")
LASTING = {"fsync", "rename", "put_async", "delete_async", "ack", "nak", "in_progress", "replace", "flush", "unlink"}
NOT_LASTING = {
    "bus/failpoints.py": "the fail points themselves",
    "deploy/keys.py": "a scratch file of a key",
    "deploy/local.py": "a hint where the bus is",
    "shelf.py:__init__": "a cache: what is gone is read again",
    "shelf.py:_remove": "a cache: what is gone is read again",
    "shelf.py:_write:unlink": "a file that nobody has seen",
    "held.py": "a hint: a file too few or too many costs a wait or a doubled attempt",
    "mirror.py:reset": "emptying twice is the same",
    "mirror.py:_allocate": "under the marker: emptied at the next start",
}


def is_boundary(call: ast.Call) -> bool:
    """Whether the call publishes, acknowledges, syncs, renames, uploads or deletes."""
    if not isinstance(call.func, ast.Attribute):
        return False
    name, owner = call.func.attr, ast.unparse(call.func.value)
    if name in ("publish", "send"):
        return owner.endswith((".js", "._acks"))
    if name == "replace":  # text has two arguments, dataclasses.replace keywords
        return owner == "os" or (len(call.args) == 1 and not call.keywords)
    if name == "flush":  # of a file's buffer: to the kernel only; of a map: to the disk
        return owner.endswith("_map")
    return name in LASTING and owner != "lease"  # a lease's methods hold the boundary themselves


def boundaries() -> Iterator[tuple[str, ast.Call, ast.AST]]:
    """(place, call, the outermost function around it)."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            for owner in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
                for function in owner.body:
                    for call in ast.walk(function) if isinstance(function, FUNCTION) else ():
                        if isinstance(call, ast.Call) and is_boundary(call):
                            yield f"{path.relative_to(ROOT)}:{function.name}:{call.func.attr}", call, function


FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def passes(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of each fail point; what a formatted name leaves open is `*`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint":
            (name,) = node.args
            parts = name.values if isinstance(name, ast.JoinedStr) else [name]
            found.append((node.lineno, "".join(p.value if isinstance(p, ast.Constant) else "*" for p in parts)))
    return found


def test_every_boundary_has_a_fail_point_on_both_sides() -> None:
    bare = []
    places = list(boundaries())
    assert len(places) > 15, "the scan finds nothing any more"
    for place, call, function in places:
        if any(part in place for part in NOT_LASTING):
            continue
        sides = {
            "before": max((line, name) for line, name in [(0, ""), *passes(function)] if line < call.lineno)[1],
            "after": min((line, name) for line, name in [(1 << 30, ""), *passes(function)] if line > call.lineno)[1],
        }
        stems = {name.removesuffix(f".{side}") for side, name in sides.items() if name.endswith(f".{side}")}
        if len(stems) != 1 or not all(name.endswith(f".{side}") for side, name in sides.items()):
            bare.append(f"{place} (line {call.lineno}): {sides}")
    assert not bare, "\n".join(bare)


def test_the_registry_names_exactly_the_points_of_the_code() -> None:
    used = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for _, name in passes(ast.parse(path.read_text()))
        if path.name != "failpoints.py"
    }
    unknown = {name for name in used if not fnmatch.filter(POINTS, name)}
    unused = {name for name in POINTS if not any(fnmatch.fnmatch(name, pattern) for pattern in used)}
    assert (unknown, unused) == (set(), set())
    assert {*BUS_MESSAGES, LedgerEntry.KIND} == set(PUBLISHED)
    keys = Keys("run")
    named = {uploaded(getattr(keys, name)("0" * 64)) for name in dir(Keys) if name in KEY_METHODS}
    assert named == set(UPLOADED)


KEY_METHODS = [name for name, value in vars(Keys).items() if callable(value) and not name.startswith("_")]


def passed(points: list[str], env: dict[str, str]) -> None:
    before = failpoints.install(armed(env))
    try:
        for point in points:
            failpoint(point)
    finally:
        failpoints.install(before)


def test_it_strikes_at_the_named_hit_of_the_named_instance_counted_over_all_lives(tmp_path: Path) -> None:
    spec = "trainer@put.ckpt.after:2:raise"
    env = {"HEADWAY_FAILPOINTS": spec, "HEADWAY_INSTANCE": "trainer", "HEADWAY_RUN_DIR": str(tmp_path)}
    passed(["put.ckpt.after", "put.ckpt.before"], env)
    passed(["put.ckpt.after"] * 2, env | {"HEADWAY_INSTANCE": "other"})
    assert not (tmp_path / "failpoints" / spec).exists()
    with pytest.raises(UnavailableError, match=r"put\.ckpt\.after"):
        passed(["put.ckpt.after"], env)
    assert (tmp_path / "failpoints" / spec).exists()
    passed(["put.ckpt.after"] * 3, env)


def test_kill_is_sigkill(tmp_path: Path) -> None:
    code = "from headway.bus.failpoints import failpoint; failpoint('delete.before'); print('alive')"
    env = {**os.environ, "HEADWAY_FAILPOINTS": "delete.before:1:kill"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_every_pass_can_be_written_down(tmp_path: Path) -> None:
    env = {"HEADWAY_FAILPOINTS": "*:0:trace", "HEADWAY_INSTANCE": "a", "HEADWAY_RUN_DIR": str(tmp_path)}
    passed(["delete.before", "delete.after"], env)
    assert (tmp_path / "failpoints" / "passed.a").read_text() == "delete.before\ndelete.after\n"


@pytest.mark.parametrize("spec", ["nowhere:1:kill", "delete.before:x:kill", "delete.before:1:explode", "delete.before"])
def test_a_misspelt_point_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="no fail point"):
        armed({"HEADWAY_FAILPOINTS": spec})
