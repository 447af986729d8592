"""Named points at which a process can be made to die, fail or stall: one on each side of whatever makes something last.

HEADWAY_FAILPOINTS arms them: `[instance@]name:hit:action`, several separated by commas. At the hit-th pass of
the point, `kill` is SIGKILL to itself, `raise` an UnavailableError, `sleep=S` a pause of the whole process;
`*:0:trace` does nothing. With HEADWAY_RUN_DIR set, passes are written to <run>/failpoints/passed.<instance> and
counted over all lives of the instance, and a point that strikes leaves a file of its name there; else they
count from the start of the process.
Unarmed, a pass costs a call and a comparison.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.schemas.errors import ConfigError, UnavailableError

PUBLISHED = ("task", "rollout", "stamp", "trainer_stamp", "weights", "applied", "ledger", "event", "dead")
"""Message kinds; the append of a ledger record is the commit of a step."""
UPLOADED = ("blobs", "ledger", "ckpt", "shard", "manifest", "part", "leases", "sessions")
FILES = (
    "mirror.fsync",
    "mirror.rename",
    "mirror.patch",
    "mirror.flush",
    "mirror.folder",
    "mirror.unmark",
    "weights.rename",
    "checkpoint.fsync",
    "checkpoint.rename",
    "checkpoint.folder",
    "midtrain.rename",
    "export.rename",
    "config.rename",
    "relay.rename",
    "recording.fsync",
)
BOUNDARIES = (
    *(f"publish.{kind}" for kind in PUBLISHED),
    "publish.again",
    "purge",
    "publish.replayed",
    *(f"put.{kind}" for kind in UPLOADED),
    "delete",
    "lease.ack",
    "lease.nak",
    "lease.renew",
    *FILES,
)
POINTS = frozenset(f"{boundary}.{side}" for boundary in BOUNDARIES for side in ("before", "after"))
VARIABLE = "HEADWAY_FAILPOINTS"

Hook = Callable[[str], None]


def failpoint(name: str) -> None:
    """Pass the point `name`."""
    if _hook is not None:
        _hook(name)


def uploaded(key: str) -> str:
    """What kind of object a key names: its extension, else its folder."""
    parts = key.split("/")
    return parts[-1].rpartition(".")[2] if "." in parts[-1] else parts[1] if len(parts) > 2 else key


def install(hook: Hook | None) -> Hook | None:
    """Let `hook` see every pass of this process from now on; returns the hook before it."""
    global _hook
    before, _hook = _hook, hook
    return before


@dataclass(frozen=True, slots=True)
class _Fault:
    name: str
    hit: int
    action: str
    spec: str


def armed(env: Mapping[str, str]) -> Hook | None:
    """The hook that `env` asks for, None when it asks for none. Raises ConfigError."""
    instance, folder = env.get("HEADWAY_INSTANCE", ""), env.get("HEADWAY_RUN_DIR")
    marks = Path(folder) / "failpoints" if folder else None
    faults: dict[str, list[_Fault]] = {}
    for spec in filter(None, env.get(VARIABLE, "").split(",")):
        whose, _, text = spec.rpartition("@")
        fault = _parse(text, spec)
        if whose in ("", instance):
            faults.setdefault(fault.name, []).append(fault)
    if not faults:
        return None
    passed: Counter[str] = Counter()
    if marks is not None:
        marks.mkdir(parents=True, exist_ok=True)
        written = marks / f"passed.{instance}"
        passed.update(written.read_text().splitlines() if written.exists() else ())

    def hook(name: str) -> None:
        passed[name] += 1
        if marks is not None:
            with written.open("a") as file:
                file.write(f"{name}\n")
        for fault in faults.get(name, ()):
            if fault.hit == passed[name]:
                if marks is not None:
                    (marks / fault.spec).touch()
                _strike(fault)

    return hook


def _parse(text: str, spec: str) -> _Fault:
    name, _, rest = text.partition(":")
    hit, _, action = rest.partition(":")
    known = (name in POINTS and action.partition("=")[0] in ("kill", "raise", "sleep")) or text == "*:0:trace"
    if not known or not hit.isdecimal():
        raise ConfigError(
            f"{VARIABLE}: {spec[:80]!r} is no fail point",
            why="[instance@]name:hit:action with a name of headway.bus.failpoints.POINTS",
            hint="publish.ledger.after:2:kill",
        )
    return _Fault(name, int(hit), action, spec)


def _strike(fault: _Fault) -> None:
    action, _, seconds = fault.action.partition("=")
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise UnavailableError(f"fail point {fault.name}", why=f"{VARIABLE} asks for it")
    else:
        time.sleep(float(seconds))


_hook: Hook | None = armed(os.environ)
