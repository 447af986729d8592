"""What an agent costs beside its engine: tokens a second through it, and what 500 sessions do to its event loop.

`overhead`: the sessions of a block go through the agent (leases, turns, checks, rollouts stored in a stream), then the
very same requests go to the same engine from a bare loop of aiohttp, and so on, alternating; the figure is the median
of the pairs' ratios. With the local engine, which computes on the same cores, and with one that only waits, as a GPU's
would look from here.
`reading`: what a turn's reply costs in a session of 16,384 tokens of a model of 48 layers and 8 experts a token.
`sessions`: that many sessions at once on one agent, whose engine only waits: how late a timer of its event loop fires,
while idle and while all sessions run, and the memory that a session costs.

Run: OMP_NUM_THREADS=1 python -P tests/bench/agent.py [--only overhead|sessions|reading] [--json FILE], see --help
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import structlog
import uvloop

sys.path.insert(0, str(Path(__file__).parent / "lib"))

from agent_run import running

from headway.bus.server import free_port
from headway.rollout_agent.known_routes import joined
from headway.rollout_agent.model_shape import ModelShape
from headway.rollout_agent.replies import Sampling, read_completion
from headway.schemas.config import Config, parse_config
from headway.schemas.messages import Rollout

AT_ONCE, A_BLOCK = 32, 96
"""Sessions at the engine at once, and of one block."""
TOKEN_S, LONG_TOKEN_S = 0.02, 0.3
"""What a token takes an engine that only waits: for the overhead, and for many sessions (turns of 2 to 6 s)."""
LAG_EVERY_S, LAG_S_MAX = 0.005, 0.05
LONG_TOKENS, NEW_TOKENS = 16384, 512
"""A prompt and a turn of a long session."""
TARGET = 0.95
TOML = """
[run]
name = "bench"
[agent]
max_sessions = {at_once}
turn_timeout_s = 120.0
session_timeout_s = 600.0
rollout_timeout_s = 700.0
[dispatch]
ack_wait_s = 60.0
[engine]
slots = 64
"""
LOCAL = """
import sys
from headway.rollout_agent.engine.service import run_engine
from headway.schemas.config import parse_config
run_engine(parse_config(sys.argv[2], "bench"), port=int(sys.argv[1]))
"""


def fake(config: Config, port: int, token_s: float) -> list[str]:
    model = config.model
    shape = [str(model.num_hidden_layers), str(model.num_experts_per_tok)]
    return [
        sys.executable,
        "-P",
        str(Path(__file__).parent / "lib" / "fake_engine.py"),
        str(port),
        str(token_s),
        *shape,
    ]


async def timed(work: Coroutine[Any, Any, Any], engine_pid: int) -> tuple[float, float, float]:
    """Wall seconds, and CPU seconds of this process and of the engine."""
    started, cpu, engine_cpu = time.perf_counter(), time.process_time(), cpu_s(engine_pid)
    await work
    return time.perf_counter() - started, time.process_time() - cpu, cpu_s(engine_pid) - engine_cpu


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, by the scheduler's own account."""
    ran_ns = [int(stat.read_text().split()[0]) for stat in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(ran_ns) / 1e9


def requests_of(rollout: Rollout) -> list[dict[str, Any]]:
    """The bodies that the session's turns sent."""
    found = rollout.trajectory
    assert found is not None, rollout.reason
    ids, mask = found.token_ids.tolist(), found.loss_mask.tolist()
    starts = [t for t in range(1, len(ids)) if mask[t] and not mask[t - 1]]
    return [
        {
            "input_ids": ids[:start],
            "sampling_params": {
                "max_new_tokens": min(20, 192 - start),
                "temperature": 1.0,
                "sampling_seed": int(rollout.task_id[1:]),
                "stop_token_ids": [10, 257],
                "ignore_eos": False,
            },
            "return_logprob": True,
            "return_routed_experts": True,
        }
        for start in starts
    ]


async def bare(url: str, sessions: list[list[dict[str, Any]]]) -> None:
    """What anyone would write in ten lines: turn after turn, so many sessions at once, every reply read."""
    waiting = iter(sessions)

    async def work(http: aiohttp.ClientSession) -> None:
        for requests in waiting:
            for body in requests:
                async with http.post(url + "/generate", json=body) as response:
                    reply = await response.json()
                    assert response.status == 200, reply

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(work(http) for _ in range(AT_ONCE)))


async def overhead(kind: str, blocks: int) -> dict[str, Any]:
    toml, port = TOML.format(at_once=AT_ONCE), free_port()
    config = parse_config(toml, "bench")
    engine = [sys.executable, "-P", "-c", LOCAL, str(port), toml] if kind == "local" else fake(config, port, TOKEN_S)
    seeds, pairs = list(range(A_BLOCK)), []
    with tempfile.TemporaryDirectory() as folder:
        async with running(config, Path(folder), engine, port) as run, run.agent():
            url = os.environ["HEADWAY_ENGINE_URL"]

            async def through_the_agent() -> None:
                await run.issue(seeds)
                await run.until_published(run.issued)

            await through_the_agent()
            rollouts = sorted(await run.new_rollouts(), key=lambda rollout: int(rollout.task_id[1:]))
            sessions = [requests_of(rollout) for rollout in rollouts]
            tokens = sum(int(r.trajectory.loss_mask.sum()) for r in rollouts if r.trajectory is not None)
            turns = sum(len(requests) for requests in sessions)
            await bare(url, sessions)
            for number in range(blocks):
                both = {"agent": through_the_agent(), "bare": bare(url, sessions)}
                order = ("agent", "bare") if number % 2 else ("bare", "agent")
                took = {name: await timed(both[name], run.engine_pid) for name in order}
                pair = {"ratio": took["bare"][0] / took["agent"][0]}
                for name, (wall_s, cpu, engine_cpu) in took.items():
                    pair |= {
                        f"{name}_tok_s": tokens / wall_s,
                        f"{name}_cpu_ms_a_turn": cpu / turns * 1e3,
                        f"{name}_engine_cpu_ms_a_turn": engine_cpu / turns * 1e3,
                    }
                pairs.append(pair)
    medians = {key: statistics.median(pair[key] for pair in pairs) for key in pairs[0]}
    low, _, high = statistics.quantiles((pair["ratio"] for pair in pairs), n=4)
    shape = {"engine": kind, "sessions": A_BLOCK, "at_once": AT_ONCE, "turns": turns, "tokens": tokens}
    return {**shape, **medians, "ratio_quartiles": [low, high], "pairs": pairs}


def reading() -> dict[str, float]:
    """CPU-ms to read a turn's reply in a long session of a large model: with all rows of routes, and the new ones."""
    shape = ModelShape(vocab_size=1000, layers=48, layer_map=tuple(range(48)), experts=128, top_k=8)
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=1.0, seed=1, stop_ids=())
    prompt, rows = [1] * LONG_TOKENS, LONG_TOKENS + NEW_TOKENS - 1
    known = np.tile(np.arange(8, dtype=np.uint8), (LONG_TOKENS - NEW_TOKENS, 48, 1))
    found: dict[str, float] = {}
    for name, start in (("all", 0), ("new", len(known))):
        routes = np.tile(np.arange(8, dtype="<i4"), (rows - start, 48, 1))
        meta = {
            "finish_reason": {"type": "length"},
            "prompt_tokens": LONG_TOKENS,
            "completion_tokens": NEW_TOKENS,
            "weight_versions": [{"version": "0.1", "start": 0, "end": NEW_TOKENS}],
            "output_token_logprobs": [[-0.5, 1, None]] * NEW_TOKENS,
            "routed_experts": base64.b64encode(routes.tobytes()).decode(),
            "routed_experts_versions": [{"version": "0.1", "start": start, "end": rows}],
        }
        body, took = json.dumps({"output_ids": [1] * NEW_TOKENS, "meta_info": meta}).encode(), []
        for _ in range(5):
            before = time.process_time()
            reply = read_completion(json.loads(body), prompt, sampling, shape, start)
            joined(known[:start], [], reply)
            took.append((time.process_time() - before) * 1e3)
        found |= {f"{name}_cpu_ms": statistics.median(took), f"{name}_mb": len(body) / 1e6}
    return found


class Lag:
    """How late a timer fires, and how much of that the event loop itself worked; the rest, it waited for a core."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.own_s: list[float] = []

    async def run(self) -> None:
        while True:
            due, worked_s = time.perf_counter() + LAG_EVERY_S, time.thread_time()
            await asyncio.sleep(LAG_EVERY_S)
            late_s = time.perf_counter() - due
            self.late_s.append(late_s)
            self.own_s.append(min(late_s, time.thread_time() - worked_s))

    async def during(self, work: Coroutine[Any, Any, Any]) -> dict[str, float]:
        watching = asyncio.create_task(self.run())
        await work
        watching.cancel()
        late, own = sorted(self.late_s), sorted(self.own_s)
        return {
            "lag_ms_p50": late[len(late) // 2] * 1e3,
            "lag_ms_p99": late[len(late) * 99 // 100] * 1e3,
            "lag_ms_max": late[-1] * 1e3,
            "own_ms_p99": own[len(own) * 99 // 100] * 1e3,
            "own_ms_max": own[-1] * 1e3,
        }


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def sessions(count: int) -> dict[str, Any]:
    config, port = parse_config(TOML.format(at_once=count), "bench"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        async with running(config, Path(folder), fake(config, port, LONG_TOKEN_S), port) as run, run.agent() as service:
            await _until(lambda: service.status["sessions"] == 0)
            idle = await Lag().during(asyncio.sleep(5))
            before = rss_bytes()
            await run.issue(list(range(3 * count)))
            held, started = rss_bytes(), time.perf_counter()
            peak: list[int] = []

            async def watch() -> None:
                while await run.stored() < 2 * count:
                    peak.append(service.status["sessions"])
                    await asyncio.sleep(0.5)

            cpu = time.process_time()
            busy = await Lag().during(watch())
            took, cpu_s = time.perf_counter() - started, time.process_time() - cpu
            full = rss_bytes()
            await run.until_stored(3 * count, 0.5)
            outcomes = {rollout.outcome for rollout in await run.new_rollouts()}
    return {
        "sessions": count,
        "sessions_at_once_max": max(peak),
        "outcomes": sorted(outcomes),
        "idle": idle,
        "busy": busy,
        "kb_a_session": (full - before) / count / 1e3,
        "kb_issued": (held - before) / 1e3,
        "rollouts_s": 2 * count / took,
        "cpu": cpu_s / took,
    }


async def _until(ready: Callable[[], bool]) -> None:
    while not ready():
        await asyncio.sleep(0.05)


def show_overhead(found: dict[str, Any]) -> None:
    low, high = found["ratio_quartiles"]
    print(
        f"{found['engine']:6} engine: agent {found['agent_tok_s']:6.0f} tok/s, bare {found['bare_tok_s']:6.0f} tok/s, "
        f"ratio {found['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}, {len(found['pairs'])} pairs, due {TARGET}), "
        f"CPU a turn {found['agent_cpu_ms_a_turn']:.2f} ms, bare {found['bare_cpu_ms_a_turn']:.2f} ms, its engine's "
        f"{found['agent_engine_cpu_ms_a_turn']:.2f} and {found['bare_engine_cpu_ms_a_turn']:.2f} ms"
    )


def show_sessions(found: dict[str, Any]) -> None:
    idle, busy = found["idle"], found["busy"]
    print(
        f"{found['sessions_at_once_max']} sessions at once: event loop late p50 {busy['lag_ms_p50']:.1f}, "
        f"p99 {busy['lag_ms_p99']:.1f}, max {busy['lag_ms_max']:.0f} ms, of which its own work p99 "
        f"{busy['own_ms_p99']:.1f}, max {busy['own_ms_max']:.0f} ms (due: p99 {LAG_S_MAX * 1e3:.0f}; idle p99 "
        f"{idle['lag_ms_p99']:.1f}), {found['kb_a_session']:.0f} kB a session, {found['rollouts_s']:.1f} rollouts/s "
        f"on {found['cpu']:.2f} of a core, {' '.join(found['outcomes'])}"
    )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--only", choices=("overhead", "sessions", "reading"))
    parser.add_argument("--engine", choices=("local", "waits"), action="append")
    asked = parser.parse_args()
    gc.collect()
    gc.freeze()  # as a service does when it starts
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    found: dict[str, Any] = {"load": os.getloadavg()}
    if asked.only in (None, "reading"):
        found["reading"] = reading()
        print(" ".join(f"{name} {value:.1f}" for name, value in found["reading"].items()))
    if asked.only in (None, "overhead"):
        found["overhead"] = []
        for kind in asked.engine or ("local", "waits"):
            found["overhead"].append(await overhead(kind, asked.blocks))
            show_overhead(found["overhead"][-1])
    if asked.only in (None, "sessions"):
        found["sessions"] = await sessions(asked.sessions)
        show_sessions(found["sessions"])
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    uvloop.run(main())
