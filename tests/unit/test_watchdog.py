"""The watchdog names who a stalled run waits for; heartbeats are bounded; metrics have base units."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from headway.bus import metrics
from headway.bus.service import Service
from headway.deploy.fleet import BEAT_BYTES_MAX, Beat, Fleet
from headway.deploy.watchdog import Watchdog, blame
from headway.rollout_agent.attempts import Agent
from headway.schemas.errors import ConfigError, InputError, UnavailableError

EXPECTED = ("trainer", "dispatcher", "sandbox", "agent")
WAITING = "waiting for rollouts of 3 groups"


def beats(heard_s: float = 100.0, **phases: str) -> list[Beat]:
    found = {"trainer": WAITING, "dispatcher": "pacing", "sandbox": "serving", "agent": "waiting for tasks", **phases}
    return [
        Beat(service=name, instance=name, heard_s=heard_s, fields={"phase": phase, "sessions": 8})
        for name, phase in found.items()
    ]


@pytest.mark.parametrize(
    ("phases", "blamed"),
    [
        ({"agent": "waiting for the engine"}, "agent agent is 'waiting for the engine'"),
        ({"agent": "waiting for a sandbox"}, "agent agent is 'waiting for a sandbox'"),
        ({"agent": "rolling out"}, "agent agent is 'rolling out' with 8 sessions"),
        ({"dispatcher": "paused"}, "dispatcher is paused"),
        ({"trainer": "training"}, "trainer trainer is 'training'"),
        ({}, "dispatcher dispatcher is 'pacing'"),
    ],
)
def test_the_part_that_everything_waits_for_is_named(phases: dict[str, str], blamed: str) -> None:
    assert blame(EXPECTED, beats(**phases), 100.5).startswith(blamed)


def test_who_is_silent_is_named_before_anything_else() -> None:
    alive = [beat for beat in beats(agent="rolling out") if beat.service != "dispatcher"]
    assert blame(EXPECTED, alive, 100.5) == "no heartbeat of dispatcher"
    found = blame(EXPECTED, beats(heard_s=90.0), 100.5)
    assert found == f"no heartbeat of trainer, last phase '{WAITING}', nor of 3 more"


def test_one_line_a_stall_and_none_while_anything_moves() -> None:
    now, said = [0.0], list[str]()
    fleet = Fleet(clock=lambda: now[0])
    dog = Watchdog(fleet=fleet, stall_s=10.0, say=said.append)

    def beat(**fields: Any) -> None:
        fleet.take(("beat", "agent", "a"), json.dumps({"phase": "rolling out\x1b[2J", **fields}).encode())

    for second in range(30):
        now[0] = float(second)
        beat(ok=second // 5)
        dog.look()
    assert said == []
    for second in range(30, 46):
        now[0] = float(second)
        beat(ok=5)
        dog.look()
    assert len(said) == 2
    assert said[0].startswith("no step, rollout or swap for 10 s: agent a is")
    assert "\x1b" not in said[0]


def test_heartbeats_are_bounded_and_malformed_ones_ignored() -> None:
    fleet = Fleet(clock=lambda: 0.0)
    for tokens, data in (
        (("beat", "agent"), b"{}"),
        (("beat", "agent", "a"), b"{"),
        (("beat", "agent", "a"), b"[]"),
        (("beat", "agent", "a"), b" " * BEAT_BYTES_MAX + b"{}"),
    ):
        fleet.take(tokens, data)
    assert fleet.beats == {}


def test_metrics_have_base_units_and_no_text() -> None:
    text = metrics.render("agent", "a-0", {"phase": "x", "ok": 3, "served": "1.12", "pause_ms": 250.0, "on": True})
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    labels = '{service="agent",instance="a-0"}'
    assert lines == [
        f"headway_up{labels} 1",
        f"headway_ok{labels} 3",
        f"headway_served_step{labels} 12",
        f"headway_pause_seconds{labels} 0.25",
        f"headway_on{labels} 1",
    ]


async def test_metrics_are_served_only_when_a_port_is_given() -> None:
    status = {"ok": 1}
    async with metrics.served("agent", "a", status, {}) as port:
        assert port is None
    async with (
        metrics.served("agent", "a", status, {"HEADWAY_METRICS_PORT": "0"}) as port,
        aiohttp.ClientSession() as s,
    ):
        status["ok"] = 2
        async with s.get(f"http://127.0.0.1:{port}/metrics") as reply:
            assert reply.status == 200
            assert "headway_ok{" in await reply.text()
        with pytest.raises(UnavailableError, match="cannot serve metrics"):
            async with metrics.served("agent", "b", status, {"HEADWAY_METRICS_PORT": str(port)}):
                pass
    with pytest.raises(ConfigError):
        async with metrics.served("agent", "a", status, {"HEADWAY_METRICS_PORT": "99999"}):
            pass


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"refused": True, "attempts": {1}}, "refused by the trainer (P7)"),
        ({"healthy": False, "attempts": {1}}, "waiting for the engine"),
        ({"waiting": 1, "attempts": {1}}, "waiting for a sandbox"),
        ({"pushed_back": True, "attempts": {1}}, "pushed back by a full stream"),
        ({"room": 0, "attempts": {1}}, "waiting for room in the engines"),
        ({"attempts": {1}}, "rolling out"),
        ({"away": "yielding to users", "room": 0}, "yielding to users"),
        ({"fresh": False}, "waiting for weights"),
        ({"served": None, "healthy": False, "fresh": False}, "waiting for weights"),
        ({}, "waiting for tasks"),
    ],
)
def test_an_agent_says_which_part_it_waits_for(changes: dict[str, Any], phase: str) -> None:
    state = {"served": "0.1", "healthy": True, "fresh": True, "waiting": 0, "pushed_back": False, "attempts": set()}
    state |= {"refused": False, "room": 1}
    state |= {"away": "", **changes}
    agent: Any = SimpleNamespace(
        _keeper=SimpleNamespace(
            served=state["served"],
            healthy=state["healthy"],
            may_start=lambda: state["fresh"],
            rotation=SimpleNamespace(room=lambda: state["room"]),
        ),
        _sandbox=SimpleNamespace(waiting=state["waiting"]),
        _refused=state["refused"],
        _outcomes=SimpleNamespace(pushed_back=state["pushed_back"]),
        _away=lambda: state["away"],
        _attempts=state["attempts"],
    )
    assert Agent._phase(agent) == phase


@pytest.mark.parametrize("within_s", [0, -1.0, float("nan"), float("inf"), 1e9, "60", [60]])
def test_a_drain_in_no_time_is_refused_and_drains_nothing(within_s: Any) -> None:
    service: Any = SimpleNamespace(stop=asyncio.Event(), drain_s=None)
    with pytest.raises(InputError, match="within_s"):
        Service.drain(service, {"within_s": within_s})
    assert not service.stop.is_set()
    Service.drain(service, {"within_s": 60})
    assert (service.stop.is_set(), service.drain_s) == (True, 60.0)
