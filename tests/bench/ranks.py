"""What a step costs that several ranks take together: the demo's model, 64 synthetic sessions, gloo over loopback.

    python tests/bench/ranks.py [--rounds 7] [--ranks 2]

Once with one rank, once with several, each a process with one thread. CPU seconds of a step by rank, medians: a quiet
machine with a core for each rank takes at least as long as the busiest one. Wall seconds and peak memory beside it. The
states after the last step must have the same digest. The last line is JSON: name, figures.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from commit import batch

from headway.bus.server import free_port
from headway.deploy.children import MALLOC_TUNABLES
from headway.kernels.config import ModelConfig
from headway.kernels.weights import init_weights
from headway.rollout_agent.model_shape import hf_config
from headway.schemas.config import Config
from headway.schemas.version import Version
from headway.schemas.wire import digest_of
from headway.trainer.checkpoint import to_bytes
from headway.trainer.learner import Learner
from headway.trainer.mesh import mesh_of

MEASURED = "HEADWAY_BENCH_RANK"
UNIT_TOKENS = 8 * 103
"""Eight sessions a micro-batch, so that there are eight; the default would make one of all."""


def rank(rounds: int) -> None:
    """One rank: prints its seconds of each step but the first, its memory, and on rank 0 the state's digest."""
    torch.set_num_threads(1)
    mesh, config = mesh_of(os.environ), Config()
    model = ModelConfig.from_hf(json.loads(hf_config(config.model)))
    grpo = config.grpo.model_copy(update={"micro_batch_tokens": UNIT_TOKENS})
    learner = Learner(
        init_weights(model, 0), model, grpo, numerics="bitwise", compute_dtype=torch.float32, max_lag=2, seed=1,
        mesh=mesh,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    wall_s, cpu_s, micros = [], [], 0
    for n in range(rounds + 1):
        samples = batch(Version(0, n), rng)
        began = time.perf_counter(), time.process_time()
        micros = len(learner.step(samples).micro_batches)
        wall_s.append(time.perf_counter() - began[0])
        cpu_s.append(time.process_time() - began[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    state = learner.state(copied=False)
    found = {"wall_s": statistics.median(wall_s[1:]), "cpu_s": statistics.median(cpu_s[1:]), "peak_mib": peak}
    print(json.dumps(found | {"micros": micros, "state": digest_of(to_bytes(state)) if mesh.rank == 0 else ""}))
    mesh.close()


def measure(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """What each rank told."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    env = os.environ | where | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": MALLOC_TUNABLES, MEASURED: "1"}
    command = [sys.executable, "-P", __file__, "--rounds", str(rounds)]
    started = [
        subprocess.Popen(command, env=env | {"RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(ranks)
    ]
    return [json.loads(process.communicate(timeout=1200)[0]) for process in started]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if MEASURED in os.environ:
        rank(options.rounds)
        return
    one, several = measure(1, options.rounds), measure(options.ranks, options.rounds)
    assert one[0]["state"] == several[0]["state"], "the bits are those of one rank"
    for told in (one, several):
        for number, found in enumerate(told):
            figures = f"{found['cpu_s']:.2f} s CPU, {found['wall_s']:.2f} s wall, peak {found['peak_mib']:.0f} MiB"
            print(f"rank {number} of {len(told)}: {figures}; {found['micros']} micro-batches a step")
    busiest, all_s = max(found["cpu_s"] for found in several), sum(found["cpu_s"] for found in several)
    figures = {
        "ranks": options.ranks,
        "one_cpu_s": one[0]["cpu_s"],
        "busiest_cpu_s": busiest,
        "all_cpu_s": all_s,
        "one_wall_s": one[0]["wall_s"],
        "several_wall_s": several[0]["wall_s"],
    }
    print(json.dumps({"name": "ranks", "figures": {key: round(value, 3) for key, value in figures.items()}}))


if __name__ == "__main__":
    main()
