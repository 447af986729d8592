"""Everything that rides on the bus except the ledger: tasks, rollouts, stamps, announcements, events.

Shapes: T tokens of a trajectory (of all its segments), L MoE layers, k experts per token. Token index t counts
from 0; the log-probability at t is log p(token t | tokens < t, of its segment); route row t belongs to the input
token t, so the last token has none.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, ClassVar, Literal, Self

import msgpack
import numpy as np
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from headway.schemas import signing
from headway.schemas.errors import WireError
from headway.schemas.ids import Digest, Id
from headway.schemas.version import VersionField
from headway.schemas.wire import (
    H_VERSION,
    Float32Array,
    Int32Array,
    Message,
    Model,
    RouteArray,
    UInt8Array,
    unpack,
)

TOKENS_MAX = 1 << 20
SPANS_MAX = 4096
REASON_CHARS_MAX = 400

H_ROLLOUT = "Headway-Rollout"
H_OUTCOME = "Headway-Outcome"
H_REWARD = "Headway-Reward"
H_LAG = "Headway-Lag"
H_ROOT = "Headway-Root"

Text = Annotated[str, Field(max_length=REASON_CHARS_MAX)]
Count = Annotated[int, Field(ge=0)]
Purpose = Literal["train", "eval"]
StopReason = Literal["submitted", "malformed", "turn_limit", "length", "deadline", "aborted"]
"""Why a session ended: `length` is a full context, `turn_limit` no turns (or calls) left, `deadline` no time left."""
TurnStop = Literal["stop", "length", "context", "aborted"]
"""Why a turn ended: a stop token, its limit of tokens, a full context, or the engine gave it up."""
COMMANDS_MAX = 1024
TURNS_MAX = 4096
SEGMENTS_MAX = 64


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


class Span(Model):
    """Tokens [start, end) that one weight version wrote."""

    start: Count
    end: Count
    version: VersionField

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"span [{self.start}, {self.end}) is empty")
        return self


def check_spans(spans: list[Span], limit: int) -> None:
    """Spans must ascend without overlap and end within `limit`. Raises ValueError."""
    at = 0
    for span in spans:
        if span.start < at:
            raise ValueError(f"span [{span.start}, {span.end}) overlaps or goes back")
        at = span.end
    if at > limit:
        raise ValueError(f"spans reach {at}, past the end at {limit}")


def span_cover(spans: list[Span], length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """For each index of [0, length) the number of its span, -1 where there is none. int64 [length]."""
    cover = np.full(length, -1, np.int64)
    for number, span in enumerate(spans):
        cover[span.start : span.end] = number
    return cover


class Trajectory(Model):
    """What an engine saw and sampled in one rollout, token in, token out."""

    token_ids: Int32Array
    loss_mask: UInt8Array
    logprobs: Float32Array
    spans: Annotated[list[Span], Field(max_length=SPANS_MAX)]
    routes: RouteArray
    route_spans: Annotated[list[Span], Field(max_length=SPANS_MAX)]
    layer_map: Annotated[list[Count], Field(max_length=1024)]
    temperature: Annotated[float, Field(ge=0.0, le=10.0)]
    """0 is greedy decoding: evaluation only, never trained on."""
    turns: Count
    stop_reason: StopReason
    turn_stops: Annotated[list[TurnStop], Field(max_length=TURNS_MAX)] = Field(default_factory=list)
    """Of each turn, in order; empty where an earlier agent wrote it."""
    segments: Annotated[list[Count], Field(max_length=SEGMENTS_MAX - 1)] = Field(default_factory=list)
    """Where segments after the first begin; see `parts`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        tokens = len(self.token_ids)
        if not 1 <= tokens <= TOKENS_MAX:
            raise ValueError(f"{tokens} tokens")
        if len(self.loss_mask) != tokens or len(self.logprobs) != tokens:
            raise ValueError("token_ids, loss_mask and logprobs differ in length")
        mask, logprobs = self.loss_mask, self.logprobs
        if self.segments:
            self._check_segments(tokens)
        check_spans(self.spans, tokens)
        sampled = np.zeros(tokens, np.uint8)
        for span in self.spans:
            sampled[span.start : span.end] = 1
        if mask[0] or sampled.tobytes() != mask.tobytes():
            if mask[0] or (mask > 1).any():
                raise ValueError("loss_mask is 0 or 1 and the first token is never sampled")
            raise ValueError("the version spans do not cover exactly the sampled tokens")
        if self.token_ids.min() < 0:
            raise ValueError("negative token id")
        if logprobs.max() > 0 or np.logical_and(logprobs, mask == 0).any():
            raise ValueError("a log-probability is at most 0, and 0 where the mask is 0")
        self._check_routes(tokens)
        return self

    def parts(self) -> list[tuple[int, int]]:
        """[start, end) of each segment.

        Each is a sequence of its own: its first token follows nothing. A session that went on from a summary has more
        than one; the summary is the end of the segment that it was sampled in, and is repeated, without loss, in the
        next. Places, spans and rows count through all of them; the row of a segment's last token is missing.
        """
        return list(itertools.pairwise([0, *self.segments, len(self.token_ids)]))

    def _check_segments(self, tokens: int) -> None:
        if any(b <= a for a, b in itertools.pairwise([0, *self.segments, tokens])):
            raise ValueError(f"segments {self.segments[:8]} of {tokens} tokens do not ascend")
        if any(self.loss_mask[at] or not self.loss_mask[at - 1] for at in self.segments):
            raise ValueError("a segment ends with what was sampled and begins with what was not")

    def _check_routes(self, tokens: int) -> None:
        if self.routes.size == 0 and not self.route_spans:
            return  # an engine without route capture: the trainer routes live and counts it
        try:
            if self.routes.shape[:2] != (tokens - 1, len(self.layer_map)):
                raise ValueError(f"routes are {self.routes.shape}, not ({tokens - 1}, {len(self.layer_map)}, k)")
            check_spans(self.route_spans, tokens - 1)
            if (span_cover(self.route_spans, tokens - 1) < 0).any():
                raise ValueError("route row versions do not cover every row")
            if any((self.routes[at - 1] != np.iinfo(self.routes.dtype).max).any() for at in self.segments):
                raise ValueError("the last token of a segment is no input, so nothing routed it")
        except ValueError as error:
            raise PydanticCustomError("bad_routes", "{why}", {"why": str(error)}) from None


class Verdict(Model):
    """What the sandbox host says of a submitted workspace. Travels only signed."""

    run: Id
    rollout_id: Id
    attempt: Id
    task_id: Id
    host: Id
    workspace_digest: Digest
    reward: Annotated[float, Field(ge=-1e6, le=1e6)]
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
    reward: Annotated[float, Field(ge=-1e6, le=1e6)] | None = None
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
