"""Who may say what on a run's bus: a NATS account for each role, as configuration of nats-server.

The streams live in the operator's account. Every other role has an account of its own, which reaches nothing
but what it imports. Permissions alone would not do: the server checks the subject that a client publishes
on, but not the reply subject it names, so a reader could have the server's answer delivered into a stream.
Across accounts an answer only ever reaches the account that asked. Permissions come on top, because they
turn a refusal into an error that says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headway.bus.topology import AGENTS_CONSUMER
from headway.schemas.subjects import ANY, STREAM_SUFFIXES, Subjects

OPERATOR = "operator"
API, HUB_API = "$JS.API", "$JS.hub.API"
"""A region's server passes the first on to nobody, the second to the hub, whose JetStream is of domain `hub`."""
REGIONAL = ("agent", "sandbox", "relay")
"""Roles that connect to their region's server."""
API_INFO = "$JS.API.INFO"
"""Imported by every role: an account that does not gets all of $JS.API from the server, which then answers each
request a second time, and first, with "JetStream not enabled for account"."""
ANSWER_S_MAX = 120
"""How long the server waits for the one answer of a request before it forgets who asked."""
ANSWERS_S_MAX = 30
"""The same where an answer is many messages: its end is unknown to the server, so time alone frees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What one kind of process does on the bus, as subjects and patterns."""

    name: str
    sends: tuple[str, ...] = ()
    """Publishes, and requests with one answer."""
    reads: tuple[str, ...] = ()
    """Requests that are answered by many messages."""
    hears: tuple[tuple[str, str], ...] = ()
    """Subscribes to: the role that publishes, and what."""
    wildcard: str = ""
    """One subscription for all that it hears."""
    answers: tuple[str, ...] = ()
    """Requests that it serves."""
    tells: tuple[str, ...] = ()
    """Publishes for those who hear it, without an answer."""


def roles(run: str) -> tuple[Role, ...]:
    """The roles of a run. The operator, whose account holds the streams, is free in it."""
    s = Subjects(run)
    tasks = s.stream("TASKS")
    agents_info = f"$JS.API.CONSUMER.INFO.{tasks}.{AGENTS_CONSUMER}"
    sandbox = (s.sandbox_create(ANY), s.sandbox_verb(ANY, ANY, ANY))
    infos = tuple(f"$JS.API.STREAM.INFO.{s.stream(suffix)}" for suffix in STREAM_SUFFIXES)
    purges = tuple(f"$JS.API.STREAM.PURGE.{s.stream(suffix)}" for suffix in ("TASKS", "ROLLOUTS"))
    services = (
        _service(
            s,
            "trainer",
            STREAM_SUFFIXES,
            sends=(s.every_ledger, s.every_weights, s.trainer_stamp, agents_info, *purges),
            hears=(("agent", s.beat("agent", ANY)),),
        ),
        _service(s, "dispatcher", ("TASKS", "LEDGER"), sends=(s.task(ANY), agents_info)),
        _service(
            s,
            "agent",
            ("LEDGER",),
            sends=(
                s.rollout(ANY, ANY),
                s.stamp(ANY, ANY),
                s.applied(ANY, ANY),
                f"$JS.ACK.{tasks}.{AGENTS_CONSUMER}.>",
                *sandbox,
            ),
            reads=(f"$JS.API.CONSUMER.MSG.NEXT.{tasks}.{AGENTS_CONSUMER}",),
            hears=(("trainer", s.every_weights),),
        ),
        _service(s, "sandbox", (), answers=sandbox),
        _service(s, "relay", ()),
    )
    viewer = Role(
        name="viewer",
        sends=(API_INFO, *_last(s, STREAM_SUFFIXES), *infos, agents_info),
        reads=_read(s, STREAM_SUFFIXES),
        hears=tuple((role.name, subject) for role in services for subject in _told(role, sandbox)),
        wildcard=s.everything,
    )
    operator = Role(
        name=OPERATOR,
        sends=tuple(s.ctl(role.name, ANY, ANY) for role in services),
        hears=tuple((role.name, s.beat(role.name, ANY)) for role in services),
    )
    return *services, viewer, operator


def _service(
    s: Subjects,
    name: str,
    streams: tuple[str, ...],
    *,
    sends: tuple[str, ...] = (),
    reads: tuple[str, ...] = (),
    hears: tuple[tuple[str, str], ...] = (),
    answers: tuple[str, ...] = (),
) -> Role:
    """A role with what every service does: events, dead letters, heartbeats, control; it reads `streams`."""
    return Role(
        name=name,
        sends=(*sends, API_INFO, s.event(name, ANY), s.dead(ANY), *_last(s, streams)),
        reads=(*reads, *_read(s, streams)),
        hears=hears,
        answers=(*answers, s.ctl(name, ANY, ANY)),
        tells=(s.beat(name, ANY),),
    )


def _told(role: Role, requests: tuple[str, ...]) -> tuple[str, ...]:
    """What a role tells everyone. Not its requests: with a listener, one that nobody serves would not fail at once."""
    return tuple(
        subject for subject in role.sends + role.tells if subject.startswith("rl.") and subject not in requests
    )


def _read(s: Subjects, streams: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"$JS.API.DIRECT.GET.{s.stream(suffix)}" for suffix in streams)


def _last(s: Subjects, streams: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{subject}.>" for subject in _read(s, streams))


def accounts(run: str, passwords: Mapping[str, str]) -> str:
    """The `accounts` block of nats.conf, with one user a role, named like it."""
    everyone = roles(run)
    block: dict[str, dict[str, Any]] = {
        role.name: {"users": [_user(role, passwords[role.name])], "exports": [], "imports": []} for role in everyone
    }
    block[OPERATOR]["jetstream"] = "enabled"
    for role in everyone:
        for owner, export in _needs(role, everyone):
            _share(block[owner]["exports"], export, role.name)
            kind = "stream" if "stream" in export else "service"
            block[role.name]["imports"].append({kind: {"account": owner, "subject": export[kind]}})
    return f"accounts: {json.dumps(block, indent=1)}\n"


def leaf(run: str, passwords: Mapping[str, str], hub: str) -> str:
    """The `accounts` and `leafnodes` blocks of a region's nats-server, whose hub listens for it at `hub`.

    It has the accounts of REGIONAL alone, each connected to the hub's of that name. What agents ask sandboxes stays
    in the region, also while the hub is away.
    """
    here = {role.name: role for role in roles(run) if role.name in REGIONAL}
    asked = [subject for subject in here["agent"].sends if subject in here["sandbox"].answers]
    block: dict[str, Any] = {
        name: {"users": [_user(role, passwords[name])], "mappings": {f"{API}.>": f"{HUB_API}.>"}}
        for name, role in here.items()
    }
    block["sandbox"]["exports"] = [
        {"service": subject, "response_threshold": f"{ANSWER_S_MAX}s", "accounts": ["agent"]} for subject in asked
    ]
    block["agent"]["imports"] = [{"service": {"account": "sandbox", "subject": subject}} for subject in asked]
    remotes = [
        {
            "url": f"nats-leaf://{name}:{passwords[name]}@{hub}",
            "account": name,
            "deny_exports": asked,
            "deny_imports": asked,
        }
        for name in here
    ]
    link = {"reconnect": "1s", "remotes": remotes}
    return f"accounts: {json.dumps(block, indent=1)}\nleafnodes: {json.dumps(link, indent=1)}\n"


def _user(role: Role, password: str) -> dict[str, Any]:
    user: dict[str, Any] = {"user": role.name, "password": password}
    if role.name != OPERATOR:
        publishes = [*role.sends, *role.reads, *role.tells]
        hears = [role.wildcard] if role.wildcard else [subject for _, subject in role.hears]
        user["permissions"] = {
            "publish": {"allow": [*publishes, *(_from_leaf(publishes) if role.name in REGIONAL else ())]},
            "subscribe": {"allow": [*hears, *role.answers, "_INBOX.>"]},
            "allow_responses": True,
        }
    return user


def _from_leaf(subjects: Iterable[str]) -> Iterator[str]:
    """How a region's server words requests to the hub's JetStream, and the answers to what the hub's accounts ask."""
    yield from (HUB_API + subject.removeprefix(API) for subject in subjects if subject.startswith(API))
    yield "_R_.>"


def _needs(role: Role, everyone: tuple[Role, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    """For each import of a role: the account that exports it, and the export."""
    for subject in role.sends:
        owner = next((other.name for other in everyone if subject in other.answers), OPERATOR)
        yield owner, {"service": subject, "response_threshold": f"{ANSWER_S_MAX}s"}
    for subject in role.reads:
        yield OPERATOR, {"service": subject, "response_type": "stream", "response_threshold": f"{ANSWERS_S_MAX}s"}
    for owner, subject in role.hears:
        yield owner, {"stream": subject}


def _share(exports: list[dict[str, Any]], export: dict[str, Any], importer: str) -> None:
    """Add `importer` to the export's accounts; a subject is exported once."""
    for known in exports:
        if export.items() <= known.items():
            known["accounts"].append(importer)
            return
    exports.append({**export, "accounts": [importer]})
