"""Do the dispatcher and the trainer's intake keep up with 2,000 agents on one core?

    python tests/bench/intake.py [--agents 2000] [--seconds 15] [--rate 200]

One process runs the real dispatcher and the real intake (decode, signature, judgement, pool) on an embedded server;
another plays the agents: it leases as many tasks as there are agents and publishes each rollout (2 KB, signed) when
its drawn time is over. `--rate` is rollouts a second over the whole fleet, 0 as fast as tasks come. Printed: rollouts
judged a second, what one costs the first process, and how long it took from publish to judgement. The last line is
JSON: name, figures, targets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from bus import rollout
from headway.bus.connection import Bus
from headway.bus.leases import Lease, TaskQueue
from headway.bus.ledger import LedgerTail, LedgerWriter
from headway.bus.server import ServerSettings, free_port, wait_listening
from headway.bus.service import Service, Settings
from headway.bus.topology import Topology
from headway.schemas import signing
from headway.schemas.config import Config
from headway.schemas.ledger import Genesis
from headway.schemas.messages import Rollout, Signed, Verdict
from headway.schemas.rewards import Scoring
from headway.schemas.version import Version
from headway.schemas.wire import pack
from headway.trainer.dispatcher import Dispatcher
from headway.trainer.groups import Decided, Pool
from headway.trainer.history import History
from headway.trainer.intake import Intake, Judge
from headway.trainer.plan import Plan, TaskSet

RUN = "bench"
KEY = b"k" * signing.KEY_BYTES
SAMPLES = 8
BODY_BYTES = 2_000
P99_MS_MAX = 1000.0
MODEL = SimpleNamespace(vocab_size=260, num_hidden_layers=1, num_experts_per_tok=1, num_experts=2)


def config(agents: int) -> Config:
    """One step of more groups than are ever issued: nothing waits for a trainer."""
    return Config.model_validate(
        {
            "run": {"name": RUN, "steps": 1},
            "grpo": {"groups_per_step": 1 << 20, "samples_per_group": SAMPLES, "min_graded": 2},
            "staleness": {"max_lag": 0, "swap_slack": 0},
            "dispatch": {"max_in_flight": 2 * agents},
            "agent": {"max_session_tokens": 4096},
            "model": {"max_position_embeddings": 4096},
            "eval": {"at": []},
            "engine": {"numerics": "off"},
        }
    )


def answer(task_rollout: str, task: Any, seq: int, template: Rollout) -> Rollout:
    """A graded attempt at the task, sampled by version 0.0; sent now."""
    attempt = f"a{seq}"
    verdict = Verdict(
        run=RUN, rollout_id=task_rollout, attempt=attempt, task_id=task.task_id, host="h", workspace_digest="0" * 64,
        reward=1.0, parts={},
    )  # fmt: skip
    return template.model_copy(
        update={
            "rollout_id": task_rollout, "attempt": attempt, "group": task.group, "sample": task.sample,
            "task_id": task.task_id, "task_seq": seq, "verdict": Signed.seal(KEY, pack(verdict)),
            "timings_ms": {"sent": time.time() * 1e3},
        }
    )  # fmt: skip


async def play(url: str, agents: int, rate: float, seconds: float) -> None:
    """The fleet, in a process of its own."""
    rng, template = random.Random(1), rollout(BODY_BYTES, 0)
    end_s = time.monotonic() + seconds
    async with await Bus.connect(url, RUN, token="t") as bus, asyncio.TaskGroup() as tasks:
        queue, free = TaskQueue(bus), asyncio.Semaphore(agents)

        async def work(lease: Lease) -> None:
            try:
                if rate:
                    await asyncio.sleep(rng.expovariate(rate / agents))
                message = answer(lease.task.rollout_id, lease.task, lease.seq, template)
                await bus.publish(bus.subjects.rollout("east", f"agent{lease.seq % agents}"), message)
                await lease.ack()
            finally:
                free.release()

        while time.monotonic() < end_s:
            await free.acquire()
            free.release()
            for lease in await queue.fetch(min(256, free._value), 0.5):
                await free.acquire()
                tasks.create_task(work(lease))


class TimedPool(Pool[Rollout]):
    """Notes how long each rollout took from its publish until it was judged."""

    waits_ms: list[float]

    def observe(self, decided: Decided[Rollout]) -> bool:
        assert decided.payload is not None
        self.waits_ms.append(time.time() * 1e3 - decided.payload.timings_ms["sent"])
        return super().observe(decided)


async def serve(url: str, agents: int, rate: float, seconds: float) -> dict[str, float]:
    """Dispatcher and intake, against the fleet in another process."""
    made = config(agents)
    plan = Plan(config=made, tasks=TaskSet(digest="0" * 64, train=tuple(f"t{n}" for n in range(500)), heldout=("h",)))
    genesis = Genesis(
        run=RUN, config=made.shared(), config_digest=made.shared_digest(), task_set=plan.tasks.digest,
        base_manifest="0" * 64, base_root="0" * 64, trainer_key=signing.public_key(KEY),
        sandbox_key=signing.public_key(KEY),
    )  # fmt: skip
    async with await Bus.connect(url, RUN, token="t") as bus, asyncio.TaskGroup() as tasks:
        await Topology(run=RUN, max_ack_pending=4 * agents, max_stream_bytes=4 << 30).apply(bus.js)
        link = await LedgerWriter(bus, KEY, LedgerTail()).append(genesis, Version(0, 0))
        history = History()
        history.add(link)
        settings = Settings(nats_url="", run_dir=Path(), keys_dir=Path(), store_url="", region="east", instance="bench")
        service = Service(
            name="dispatcher", config=made, settings=settings, bus=bus, store=None, tasks=tasks,  # type: ignore[arg-type]
            stop=asyncio.Event(),
        )  # fmt: skip
        waits_ms: list[float] = []
        pool = TimedPool(samples=SAMPLES, min_graded=2)
        pool.waits_ms = waits_ms
        judge = Judge(run=RUN, genesis=genesis, model=MODEL, plan=plan, scoring=Scoring(made.reward))  # type: ignore[arg-type]
        intake = tasks.create_task(Intake(bus, judge, pool, history).run())
        dispatching = tasks.create_task(Dispatcher(service, plan).run())
        arguments = ["--play", url, "--agents", str(agents), "--rate", str(rate), "--seconds", str(seconds)]
        fleet = await asyncio.create_subprocess_exec(sys.executable, "-P", __file__, *arguments)
        while not waits_ms:
            await asyncio.sleep(0.05)
        waits_ms.clear()
        began_s, cpu_s = time.monotonic(), time.process_time()
        await asyncio.sleep(seconds - 5)
        wall_s, cpu_s, seen = time.monotonic() - began_s, time.process_time() - cpu_s, len(waits_ms)
        taken = np.array(waits_ms[:seen])
        intake.cancel()
        service.stop.set()
        await dispatching
        await fleet.wait()
    return {
        "agents": agents,
        "rollouts_per_s": seen / wall_s,
        "cpu_ms_per_rollout": cpu_s / max(seen, 1) * 1e3,
        "core_share": cpu_s / wall_s,
        "p50_ms": float(np.percentile(taken, 50)),
        "p99_ms": float(np.percentile(taken, 99)),
    }


async def run(args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        settings = ServerSettings(folder=Path(name) / "nats", port=free_port(), token="t")
        server = subprocess.Popen(settings.command(), stdin=subprocess.DEVNULL)  # noqa: ASYNC220
        try:
            await wait_listening(settings.port)
            return await serve(settings.url, args.agents, args.rate, args.seconds)
        finally:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--play", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        uvloop.run(play(args.play, args.agents, args.rate, args.seconds))
        return
    found = {name: round(value, 2) for name, value in uvloop.run(run(args)).items()}
    for name, value in found.items():
        print(f"{name:<20}{value:>12,.2f}")
    met = found["p99_ms"] <= P99_MS_MAX
    print(
        json.dumps(
            {"name": "intake", "figures": found, "targets": {"p99_ms": [found["p99_ms"], "<=", P99_MS_MAX, met]}}
        )
    )


if __name__ == "__main__":
    main()
