"""The only place that builds or parses a subject, a stream name or an object key prefix."""

from __future__ import annotations

from dataclasses import dataclass

from headway.schemas.errors import WireError
from headway.schemas.ids import check_id
from headway.schemas.version import Version


class _Any(str):
    """Stands for every id. A type of its own, so that no id from the wire can be one."""


ANY = _Any("*")
"""In place of an id: makes the pattern of all such subjects, for subscriptions and permissions."""
LEDGER_KINDS = ("genesis", "open", "step", "drops", "fork")
STREAM_SUFFIXES = ("TASKS", "ROLLOUTS", "STAMPS", "WEIGHTS", "LEDGER", "EVENTS")


@dataclass(frozen=True, slots=True)
class Subjects:
    """Subjects of one run. Every id is checked, so no token can smuggle a dot or a wildcard."""

    run: str

    def __post_init__(self) -> None:
        check_id(self.run)

    def _join(self, *tokens: str) -> str:
        return ".".join(("rl", self.run, *(token if isinstance(token, _Any) else check_id(token) for token in tokens)))

    @property
    def everything(self) -> str:
        return f"rl.{self.run}.>"

    def stream(self, suffix: str) -> str:
        if suffix not in STREAM_SUFFIXES:
            raise ValueError(f"no stream {suffix!r}; one of {STREAM_SUFFIXES}")
        return f"HW-{self.run}-{suffix}"

    def task(self, env: str) -> str:
        return self._join("task", env)

    def rollout(self, region: str, agent: str) -> str:
        return self._join("rollout", region, agent)

    def stamp(self, region: str, agent: str) -> str:
        return self._join("stamp", region, agent)

    @property
    def trainer_stamp(self) -> str:
        return self._join("stamp", "trainer")

    def weights(self, version: Version) -> str:
        return self._join("weights", str(version.epoch), str(version.n))

    @property
    def every_weights(self) -> str:
        return self._join("weights", ANY, ANY)

    def applied(self, region: str, agent: str) -> str:
        return self._join("applied", region, agent)

    def ledger(self, version: Version, kind: str) -> str:
        if kind not in LEDGER_KINDS:
            raise ValueError(f"no ledger kind {kind!r}; one of {LEDGER_KINDS}")
        return self._join("ledger", str(version.epoch), str(version.n), kind)

    @property
    def every_ledger(self) -> str:
        return self._join("ledger", ANY, ANY, ANY)

    def event(self, service: str, kind: str) -> str:
        return self._join("event", service, kind)

    def dead(self, reason: str) -> str:
        return self._join("dead", reason)

    def sandbox_create(self, region: str) -> str:
        return self._join("sandbox", region, "create")

    def sandbox_verb(self, region: str, host: str, verb: str) -> str:
        return self._join("sandbox", region, host, verb)

    def ctl(self, service: str, instance: str, verb: str) -> str:
        return self._join("ctl", service, instance, verb)

    def beat(self, service: str, instance: str) -> str:
        return self._join("beat", service, instance)

    def parse(self, subject: str) -> tuple[str, ...]:
        """The tokens after `rl.<run>.`. Raises WireError("bad_subject") for another run's subject."""
        prefix, tokens = f"rl.{self.run}.", subject.split(".")
        if not subject.startswith(prefix) or len(tokens) > 8 or not all(tokens):
            raise WireError("bad_subject", f"{subject[:120]!r} is not a subject of run {self.run!r}")
        return tuple(tokens[2:])


@dataclass(frozen=True, slots=True)
class Keys:
    """Object keys of one run."""

    run: str

    def __post_init__(self) -> None:
        check_id(self.run)

    def blob(self, digest: str) -> str:
        return f"{self.run}/blobs/{digest}"

    def ledger(self, digest: str) -> str:
        return f"{self.run}/ledger/{digest}"

    def checkpoint(self, digest: str) -> str:
        return f"{self.run}/ckpt/{digest}"

    def shard(self, digest: str) -> str:
        return f"{self.run}/weights/{digest}.shard"

    def manifest(self, digest: str) -> str:
        return f"{self.run}/weights/{digest}.manifest"

    def part(self, name: str) -> str:
        """What one rank put of a version, for the rank that puts the manifest; swept like a shard nobody names."""
        return f"{self.run}/weights/{check_id(name)}.part"

    def session(self, rollout_id: str, name: str = "") -> str:
        """A saved session; without `name` the prefix of all of a rollout's."""
        return f"{self.run}/sessions/{check_id(rollout_id)}/{name}"

    def lease(self, name: str) -> str:
        return f"{self.run}/leases/{check_id(name)}"
