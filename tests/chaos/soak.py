"""`make soak`: one run under a random fault every 20 seconds, for an hour; then the audit, memory, and what leaked.

    python -P tests/chaos/soak.py [--minutes 60] [--seed 1]

A fault is SIGKILL of one or two processes (the server too), SIGSTOP of one for three seconds, or SIGTERM. The last
line is JSON: steps, faults, audit, megabytes an hour by process, open files, boxes, consumers. Exit code 0 when the
audit is clean and nothing leaked, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))

from conftest import CONFIG, HEADWAY, REGIONS, RUN_S_MAX, Run

from headway.bus.connection import Bus
from headway.deploy.local import with_bus
from headway.trainer.audit import audit

FAULT_EVERY_S = 20.0
SAMPLE_EVERY_S = 5.0
STOPPED_S = 3.0
STEPS = 1_000_000
SLOPE_S_MIN = 60.0
"""Only lives longer than that, and only after their first third, tell how memory and files grow."""
FILES_MORE_MAX = 20

Sample = tuple[float, float, int]
"""seconds, resident MB, open files"""


def sample(pid: int) -> tuple[float, int] | None:
    """Resident MB and open files of a process, None when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, ValueError, IndexError):
        return None


def strike(run: Run, rng: random.Random) -> str:
    """One fault; what it was."""
    pids = run.pids()
    names = rng.sample(sorted(pids), min(len(pids), rng.choice([1, 1, 2])))
    kind = rng.choice(["kill", "kill", "stop", "term"])
    for name in names:
        try:
            if kind == "stop":
                os.kill(pids[name], signal.SIGSTOP)
            else:
                os.kill(pids[name], signal.SIGKILL if kind == "kill" or name == "nats" else signal.SIGTERM)
        except ProcessLookupError:
            continue
    if kind == "stop":
        time.sleep(STOPPED_S)
        for name in names:
            try:
                os.kill(pids[name], signal.SIGCONT)
            except ProcessLookupError:
                continue
    return f"{kind} {'+'.join(names)}"


def soak(run: Run, minutes: float, rng: random.Random) -> tuple[list[str], dict[tuple[str, int], list[Sample]]]:
    """Faults and samples until the time is over."""
    faults: list[str] = []
    samples: dict[tuple[str, int], list[Sample]] = {}
    began_s = time.monotonic()
    next_fault_s = began_s + FAULT_EVERY_S
    while time.monotonic() < began_s + minutes * 60:
        assert run.up is not None
        if run.up.poll() is not None:
            raise SystemExit(f"the run ended by itself with {run.up.returncode}:\n{run.output[-3000:]}")
        for name, pid in {**run.pids(), "up": run.up.pid}.items():
            if (found := sample(pid)) is not None:
                samples.setdefault((name, pid), []).append((time.monotonic() - began_s, *found))
        if time.monotonic() >= next_fault_s:
            faults.append(strike(run, rng))
            next_fault_s += FAULT_EVERY_S
        time.sleep(SAMPLE_EVERY_S)
    return faults, samples


def longest(samples: dict[tuple[str, int], list[Sample]]) -> dict[str, NDArray[np.float64]]:
    """The longest life of each process, [n, 3], without its first third, in which it grows to its size."""
    found: dict[str, NDArray[np.float64]] = {}
    for (name, _), life in samples.items():
        late = np.array(life[len(life) // 3 :])
        if len(late) > 3 and np.ptp(late[:, 0]) > max(SLOPE_S_MIN, np.ptp(found.get(name, late[:1])[:, 0])):
            found[name] = late
    return dict(sorted(found.items()))


def slopes(lives: dict[str, NDArray[np.float64]]) -> dict[str, float]:
    """MB an hour."""
    return {name: round(float(np.polyfit(life[:, 0], life[:, 1], 1)[0] * 3600), 1) for name, life in lives.items()}


def grown_files(lives: dict[str, NDArray[np.float64]]) -> dict[str, int]:
    """Processes that have many more files open in the second half than in the first.

    On average: an engine has a connection open for each session of the moment.
    """
    grown = {}
    for name, life in lives.items():
        earlier, later = np.array_split(life[:, 2], 2)
        grown[name] = int(later.mean() - earlier.mean())
    return {name: more for name, more in grown.items() if more > FILES_MORE_MAX}


def left_behind(folder: Path) -> list[str]:
    """Processes that still name the run's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if str(folder) in command and str(os.getpid()) != path.parts[2]:
            found.append(command[:120])
    return found


async def inspect(bus: Bus) -> tuple[Any, int]:
    info = await bus.js.consumers_info(bus.subjects.stream("TASKS"))
    return await audit(bus), len(info)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-soak-") as name:
        seed, folder = Path(name) / "seed", Path(name) / "run"
        for made in (seed, folder):
            made.mkdir()
        (seed / "given.toml").write_text(CONFIG + REGIONS)
        files = ["--config", str(seed / "given.toml"), "--run-dir", str(seed)]
        for command in (["tasks", "build", "expr"], ["midtrain"]):
            subprocess.run([*HEADWAY, *command, *files], check=True, timeout=RUN_S_MAX, stdout=subprocess.DEVNULL)
        (seed / "tasks").rename(folder / "tasks")
        run = Run(folder, {"run.steps": STEPS, "model.base": str(seed / "base")}, {}, "", REGIONS)
        run.start()
        try:
            run.until_step(1)
            faults, samples = soak(run, args.minutes, random.Random(args.seed))
            code = run.signal(signal.SIGTERM)
        finally:
            run.abandon()
        left = left_behind(folder)
        report, consumers = asyncio.run(with_bus(run.folder.config(), run.folder, inspect))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    lives = longest(samples)
    grown = grown_files(lives)
    clean = not (report.violations or report.lost or report.trained_twice or left or grown) and consumers == 1
    figures = {
        "minutes": args.minutes,
        "faults": len(faults),
        "kinds": dict(Counter(fault.split()[0] for fault in faults)),
        "versions": report.versions,
        "terms": report.terms,
        "trained": report.trained,
        "dropped": report.dropped,
        "duplicates": report.duplicates,
        "violations": report.violations,
        "drain_exit_code": code,
        "mb_per_hour": slopes(lives),
        "files_grown": grown,
        "left_behind": left,
        "consumers": consumers,
        "run_folder_mb": round(size / 1e6, 1),
    }
    for fault in faults:
        print(fault)
    print(json.dumps({"name": "soak", "clean": clean and code == 0, "figures": figures}))
    return 0 if clean and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
