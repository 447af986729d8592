"""How long `headway audit` takes on a recorded run of 10,000 rollouts, in a process without torch.

    python -P tests/bench/audit.py [--rollouts 10000] [--tokens 512] [--out FILE]

The run is made up (trajectories of `--tokens` tokens with routes and signed verdicts, sixteen groups of eight a
step) and lies in a recording; the audit of the command line is timed as a whole, start-up included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from headway.bus.direct import StoredMessage
from headway.bus.ledger import CHAIN_START
from headway.bus.recording_writer import RecordingWriter
from headway.schemas import signing
from headway.schemas.config import parse_config
from headway.schemas.ledger import Consumed, Counters, Genesis, Open, Record, Step, seal_record
from headway.schemas.messages import Rollout, Signed, Verdict
from headway.schemas.trajectory import Span, Trajectory
from headway.schemas.version import Version
from headway.schemas.wire import Envelope, Message, digest_of, pack
from headway.trainer.plan import Plan, TaskSet

GROUPS, SAMPLES = 16, 8
COMMAND = (
    "import sys; sys.modules['torch'] = None; from headway.deploy.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


class Made:
    """A made-up run, written as it goes."""

    def __init__(self, writer: RecordingWriter, tokens: int) -> None:
        self._writer, self._tokens = writer, tokens
        self._seqs: dict[str, int] = {}
        self._key, self._sandbox = bytes(range(32)), bytes(range(1, 33))
        self._prev, self._index = CHAIN_START, 0
        config = parse_config(f"[grpo]\ngroups_per_step = {GROUPS}\nsamples_per_group = {SAMPLES}\n", "x")
        tasks = TaskSet(digest="0" * 64, train=tuple(f"t{i}" for i in range(500)), heldout=("h",))
        self._plan, self._rng = Plan(config=config, tasks=tasks), np.random.default_rng(0)

    def put(self, stream: str, subject: str, message: Message) -> int:
        self._seqs[stream] = seq = self._seqs.get(stream, 0) + 1
        sealed = Envelope.seal(message)
        self._writer.add(stream, StoredMessage(subject, seq, sealed.headers, sealed.body, seq * 0.01))
        return seq

    def append(self, body: Any, version: Version) -> None:
        record = Record(prev=self._prev, term=int(self._index > 0), index=self._index, body=body)
        entry = seal_record(record, version, self._key)
        self.put("LEDGER", f"rl.r.ledger.0.{version.n}.{body.kind}", entry)
        self._prev, self._index = digest_of(entry.payload), self._index + 1

    def rollout(self, task: Any, n: int) -> Rollout:
        tokens, attempt = self._tokens, f"a{task.rollout_id}"
        mask = np.zeros(tokens, np.uint8)
        mask[tokens // 2 :] = 1
        verdict = Verdict(
            run="r", rollout_id=task.rollout_id, attempt=attempt, task_id=task.task_id, host="h",
            workspace_digest="0" * 64, reward=1.0, parts={},
        )  # fmt: skip
        trajectory = Trajectory(
            token_ids=self._rng.integers(0, 50_000, tokens).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask == 1, -self._rng.random(tokens), 0).astype(np.float32),
            spans=[Span(start=tokens // 2, end=tokens, version=Version(0, n))],
            routes=self._rng.integers(0, 64, (tokens - 1, 4, 8)).astype(np.uint8),
            route_spans=[Span(start=0, end=tokens - 1, version=Version(0, n))],
            layer_map=[0, 1, 2, 3], temperature=1.0, turns=3, stop_reason="submitted",
        )  # fmt: skip
        return Rollout(
            rollout_id=task.rollout_id, attempt=attempt, purpose="train", outcome="ok", terminal=True,
            group=task.group, sample=task.sample, task_id=task.task_id, task_seq=1, delivery=1, region="r",
            agent="a", reward=1.0, trajectory=trajectory, verdict=Signed.seal(self._sandbox, pack(verdict)),
        )  # fmt: skip

    def run(self, rollouts: int) -> None:
        config, zero = self._plan.config, "0" * 64
        self.append(
            Genesis(
                run="r", config=config.shared(), config_digest=config.shared_digest(), task_set=zero,
                base_manifest=zero, base_root=zero, trainer_key=signing.public_key(self._key),
                sandbox_key=signing.public_key(self._sandbox),
            ),
            Version(0, 0),
        )  # fmt: skip
        self.append(Open(instance="t", environment={}), Version(0, 0))
        for n in range(-(-rollouts // (GROUPS * SAMPLES))):
            consumed = []
            for group in range(n * GROUPS, (n + 1) * GROUPS):
                for task in self._plan.group(group, 0):
                    self.put("TASKS", "rl.r.task.expr", task)
                    rollout = self.rollout(task, n)
                    seq = self.put("ROLLOUTS", "rl.r.rollout.r.a", rollout)
                    consumed.append(Consumed(rollout_id=task.rollout_id, seq=seq, reward=1.0))
            made = Version(0, n + 1)
            counters = Counters(trained_rollouts=(n + 1) * GROUPS * SAMPLES, trained_groups=(n + 1) * GROUPS)
            step = Step(
                version=made, parent=Version(0, n), consumed=consumed, drops=[], cursor=consumed[-1].seq, pool=[],
                counters=counters, rng=b"", metrics={}, checkpoint=digest_of(f"c{n}".encode()),
                manifest=digest_of(f"m{n}".encode()), root=digest_of(f"r{n}".encode()),
            )  # fmt: skip
            self.append(step, made)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "run.hwr")
        with RecordingWriter(path, {"run": "r", "selection": {}}) as writer:
            Made(writer, options.tokens).run(options.rollouts)
            writer.commit(whole=True)
        walls, cpus = [], []
        for _ in range(options.repeats):
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            command = [sys.executable, "-P", "-c", COMMAND, "audit", "--from", str(path)]
            report = json.loads(subprocess.run(command, check=True, capture_output=True, env=os.environ).stdout)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            walls.append(time.perf_counter() - began)
            cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert report["violations"] == []
        found = {
            "rollouts": report["trained"],
            "tokens": options.tokens,
            "recording_mb": round(path.stat().st_size / 1e6, 1),
            "wall_s": round(sorted(walls)[len(walls) // 2], 2),
            "cpu_s": round(sorted(cpus)[len(cpus) // 2], 2),
            "peak_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3, 1),
            "python": platform.python_version(),
        }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
