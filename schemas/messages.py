"""Everything that rides on the bus except the ledger: tasks, rollouts, stamps, announcements, events."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import msgpack
import numpy as np
from pydantic import Field, model_validator

from headway.schemas import signing
from headway.schemas.errors import WireError
from headway.schemas.ids import Digest, Id
from headway.schemas.trajectory import SPANS_MAX, Span, Trajectory
from headway.schemas.version import VersionField
from headway.schemas.wire import H_VERSION, Message, Model, unpack

REASON_CHARS_MAX = 400
REWARD_MAX = 1e6

H_ROLLOUT = "Headway-Rollout"
H_OUTCOME = "Headway-Outcome"
H_REWARD = "Headway-Reward"
H_LAG = "Headway-Lag"
H_ROOT = "Headway-Root"

Text = Annotated[str, Field(max_length=REASON_CHARS_MAX)]
Count = Annotated[int, Field(ge=0)]
Purpose = Literal["train", "eval"]
COMMANDS_MAX = 1024


class Task(Message):
    """One sample of a group to roll out, or one evaluation rollout of a pinned version.

    `groups_issued` and `eval_blocks_issued` are cumulative and include this task's own, so that the last
    message of TASKS is all a restarted dispatcher needs; `last_of_unit` marks a group's or block's last task.
    """

    KIND: ClassVar[str] = "task"

    rollout_id: Id
    purpose: Purpose
    env: Id
    task_set: Digest
    task_id: Id
    group: Count
    sample: Count
    temperature: Annotated[float, Field(ge=0.0, le=10.0)]
    sampling_seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    pinned: VersionField | None = None
    groups_issued: Count
    eval_blocks_issued: Count
    last_of_unit: bool

    def headers(self) -> dict[str, str]:
        pinned = {H_VERSION: str(self.pinned)} if self.pinned is not None else {}
        return {H_ROLLOUT: self.rollout_id, "Headway-Purpose": self.purpose, **pinned}

    def message_id(self) -> str:
        return f"task/{self.rollout_id}"


class Verdict(Model):
    """What the sandbox host says of a submitted workspace. Travels only signed."""

    run: Id
    rollout_id: Id
    attempt: Id
    task_id: Id
    host: Id
    workspace_digest: Digest
    reward: Annotated[float, Field(ge=-REWARD_MAX, le=REWARD_MAX)]
    parts: Annotated[dict[str, float], Field(max_length=32)]


class Signed(Model):
    """Bytes and their Ed25519 signature."""

    payload: bytes
    signature: bytes

    @classmethod
    def seal(cls, private_key: bytes, payload: bytes) -> Self:
        return cls(payload=payload, signature=signing.sign(private_key, payload))

    def open_verdict(self, public_key: bytes) -> Verdict:
        """The verdict, once its signature verifies. Raises WireError."""
        signing.verify(public_key, self.payload, self.signature)
        return unpack(Verdict, self.payload)

    def peek_verdict(self) -> Verdict:
        """The verdict without looking at the signature: for display only."""
        return unpack(Verdict, self.payload)


class Command(Model):
    """One tool call of a session, for a reader of the log."""

    tool: Annotated[str, Field(max_length=64)]
    ms: Annotated[float, Field(ge=0)]
    ok: bool


class Rollout(Message):
    """The outcome of one attempt at a task.

    `ok` carries a trajectory and a signed verdict. `infra_failed` is no reward: when `terminal` is false
    the task was given back for another attempt. `handed_back` never is terminal.
    """

    KIND: ClassVar[str] = "rollout"

    rollout_id: Id
    attempt: Id
    purpose: Purpose
    outcome: Literal["ok", "infra_failed", "handed_back"]
    terminal: bool
    reason: Text = ""
    group: Count
    sample: Count
    task_id: Id
    task_seq: Count
    delivery: Annotated[int, Field(ge=1)]
    region: Id
    agent: Id
    reward: Annotated[float, Field(ge=-REWARD_MAX, le=REWARD_MAX)] | None = None
    trajectory: Trajectory | None = None
    verdict: Signed | None = None
    timings_ms: Annotated[dict[str, float], Field(max_length=32)] = Field(default_factory=dict)
    commands: Annotated[list[Command], Field(max_length=COMMANDS_MAX)] = Field(default_factory=list)
    reward_parts: Annotated[dict[str, float], Field(max_length=32)] = Field(default_factory=dict)
    """What `reward` is the sum of, the verdict first; empty where it is the verdict alone."""

    @model_validator(mode="after")
    def _outcome_fits(self) -> Self:
        graded = self.trajectory is not None and self.verdict is not None and self.reward is not None
        if (self.outcome == "ok") != graded or (self.outcome == "ok" and not self.terminal):
            raise ValueError("exactly an ok attempt is terminal with trajectory, verdict and reward")
        if self.outcome == "handed_back" and self.terminal:
            raise ValueError("a handed back attempt is not terminal")
        return self

    def headers(self) -> dict[str, str]:
        outcome = self.outcome if self.terminal else f"{self.outcome}:retry"
        found = {H_ROLLOUT: self.rollout_id, H_OUTCOME: outcome, "Headway-Purpose": self.purpose}
        if self.reward is not None:
            found[H_REWARD] = f"{self.reward:g}"
        if self.trajectory is not None and self.trajectory.spans:
            found[H_VERSION] = str(self.trajectory.spans[-1].version)
        return found

    def message_id(self) -> str:
        return f"{self.rollout_id}/{self.attempt}"


class Stamp(Message):
    """An agent's staleness stamp: which versions wrote which tokens, and the head when it ended."""

    KIND: ClassVar[str] = "stamp"

    rollout_id: Id
    attempt: Id
    spans: Annotated[list[Span], Field(max_length=SPANS_MAX)]
    tokens: Count
    head: VersionField

    def headers(self) -> dict[str, str]:
        return {H_ROLLOUT: self.rollout_id, H_VERSION: str(self.head)}

    def message_id(self) -> str:
        return f"stamp/{self.rollout_id}/{self.attempt}"


class TrainerStamp(Message):
    """The trainer's verdict on a rollout: trained by which step at which lag, or dropped and why."""

    KIND: ClassVar[str] = "trainer_stamp"

    rollout_id: Id
    version: VersionField
    outcome: Annotated[str, Field(pattern=r"^(trained|dropped:[a-z_]+)$")]
    lag_min: int
    lag_max: int
    tokens_trained: Count
    tokens_masked: Count

    def headers(self) -> dict[str, str]:
        lag = f"{self.lag_min}..{self.lag_max}"
        return {H_ROLLOUT: self.rollout_id, H_OUTCOME: self.outcome, H_VERSION: str(self.version), H_LAG: lag}

    def message_id(self) -> str:
        return f"verdict/{self.rollout_id}/{self.version.epoch}"


class WeightsAnnounced(Message):
    """A weight version exists. Agents believe it only when the ledger binds the same manifest digest."""

    KIND: ClassVar[str] = "weights"

    version: VersionField
    parent: VersionField | None
    manifest: Digest
    root: Digest
    delta_bytes: Count
    full_bytes: Count
    changed_fraction: Annotated[float, Field(ge=0, le=1)]

    def headers(self) -> dict[str, str]:
        return {H_VERSION: str(self.version), H_ROOT: self.root}

    def message_id(self) -> str:
        return f"weights/{self.version}/{self.manifest[:16]}"


class Applied(Message):
    """An agent serves a version, proven by the engine's own checksum root."""

    KIND: ClassVar[str] = "applied"

    region: Id
    agent: Id
    version: VersionField
    root: Digest
    fetched_bytes: Count
    fetch_ms: Annotated[float, Field(ge=0)]
    stage_ms: Annotated[float, Field(ge=0)]
    pause_ms: Annotated[float, Field(ge=0)]
    in_flight: Count
    way: Literal["disk", "full", "sparse"] = "disk"
    """A checkpoint of what changed, one of everything, or writes in place by our loader."""
    head_ms: Annotated[float, Field(ge=0)] = 0.0
    """From the moment the agent read of the version in the ledger to serving it."""

    def headers(self) -> dict[str, str]:
        return {H_VERSION: str(self.version), H_ROOT: self.root}


class Event(Message):
    """Anything else worth keeping. `fields` is flat and small."""

    KIND: ClassVar[str] = "event"

    service: Id
    instance: Id
    name: Id
    fields: Annotated[dict[str, str | int | float | bool], Field(max_length=128)] = Field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        return {"Headway-Event": self.name, "Headway-Instance": self.instance}


class Dead(Message):
    """A message nobody could process: the reason, where it came from, and the bytes."""

    KIND: ClassVar[str] = "dead"

    reason: Id
    detail: Text
    subject: Annotated[str, Field(max_length=512)]
    stream_seq: Count
    original_headers: Annotated[dict[str, str], Field(max_length=64)]
    body: bytes

    def headers(self) -> dict[str, str]:
        return {"Headway-Reason": self.reason, "Headway-Seq": str(self.stream_seq)}

    def message_id(self) -> str:
        return f"dead/{self.subject}/{self.stream_seq}/{self.reason}"


BUS_MESSAGES: dict[str, type[Message]] = {
    cls.KIND: cls for cls in (Task, Rollout, Stamp, TrainerStamp, WeightsAnnounced, Applied, Event, Dead)
}


def dead_reason(error: WireError) -> str:
    """The subject token under which a message refused with `error` is kept."""
    return error.reason if error.reason.replace("_", "").isalpha() else "invalid"


def render(value: Any, bytes_shown: int = 16) -> Any:
    """A JSON-able picture of a decoded body: arrays and bytes are shortened."""
    if isinstance(value, dict):
        return {str(key): render(item, bytes_shown) for key, item in value.items()}
    if isinstance(value, list):
        if len(value) == 3 and isinstance(value[0], str) and isinstance(value[2], bytes):
            try:
                array = np.frombuffer(value[2], np.dtype(value[0])).reshape(value[1])
                return f"{value[0]}{value[1]} {np.array2string(array.ravel()[:12], separator=' ')}"
            except (TypeError, ValueError):
                return f"bad array {str(value[:2])[:80]}"
        return [render(item, bytes_shown) for item in value[:64]] + (
            [f"… {len(value) - 64} more"] if len(value) > 64 else []
        )
    if isinstance(value, bytes):
        return _render_bytes(value, bytes_shown)
    return value


def _render_bytes(value: bytes, bytes_shown: int) -> Any:
    try:
        inner = msgpack.unpackb(value, raw=False)
    except Exception:  # any bytes may not be MessagePack, and msgpack raises many types for that
        inner = None
    if isinstance(inner, dict):
        return render(inner, bytes_shown)
    return f"{len(value)} bytes {value[:bytes_shown].hex()}"
