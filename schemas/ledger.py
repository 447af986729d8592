"""The ledger's records. One hash chain, one writer a term, signed; the only truth about a run.

A ledger message is a `LedgerEntry`: the record's bytes and the trainer's signature over them. Each
record names the SHA-256 of the previous record's bytes, so that one entry vouches for all before it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headway.schemas import signing
from headway.schemas.errors import WireError
from headway.schemas.ids import Digest, Id
from headway.schemas.version import VersionField
from headway.schemas.wire import H_VERSION, Message, Model, digest_of, pack, unpack

CHAIN_START = "0" * 64
DropReason = Literal[
    "infra_failed",
    "group_incomplete",
    "stale",
    "abandoned",
    "bad_verdict",
    "bad_routes",
    "blob_lost",
    "invalid",
    "disagreed",
    "refused_agent",
    "quarantined",
]
"""`disagreed`: its log-probabilities are not those of the version that it names (P7); `refused_agent`: it comes from an
agent whose rollouts did so before; `quarantined`: the step that was to train on it failed."""
Count = Annotated[int, Field(ge=0)]
DISAGREED_MAX = 3
"""So many rollouts of one agent may violate P7 and only be dropped; with the next one the agent is refused."""
AGENTS_MAX = 1024


class Drop(Model):
    """A rollout that ended untrained. `seq` is its deciding attempt's place in ROLLOUTS."""

    rollout_id: Id
    seq: Count
    reason: DropReason


class Consumed(Model):
    """A rollout that a step trained on, and its deciding attempt's place in ROLLOUTS."""

    rollout_id: Id
    seq: Count
    reward: float


class Counters(Model):
    """Cumulative over the run; survive restarts because they are in the ledger."""

    trained_rollouts: Count = 0
    dropped_rollouts: Count = 0
    void_groups: Count = 0
    trained_groups: Count = 0
    zero_variance_groups: Count = 0
    trained_tokens: Count = 0
    masked_tokens: Count = 0
    disagreed: Annotated[dict[str, Count], Field(max_length=AGENTS_MAX)] = Field(default_factory=dict)
    """By agent (`region/agent`): how many of its rollouts were dropped as `disagreed`."""

    def refuses(self, agent: str) -> bool:
        """Whether nothing of the agent is to be trained on any more."""
        return self.disagreed.get(agent, 0) > DISAGREED_MAX


class Genesis(Model):
    """First record: what every service of the run must agree on."""

    kind: Literal["genesis"] = "genesis"
    run: Id
    config: dict[str, Any]
    config_digest: Digest
    task_set: Digest
    base_manifest: Digest
    base_root: Digest
    trainer_key: bytes
    sandbox_key: bytes
    chat: Digest | Literal[""] = ""
    """Of chat template, tokenizer and tool format (`schemas/chat.py`); empty in runs from before it was recorded."""


class Open(Model):
    """A trainer takes over: term + 1. After it no older writer can append."""

    kind: Literal["open"] = "open"
    instance: Id
    environment: dict[str, str]


class Step(Model):
    """A committed optimizer step, which makes version `version` from `parent`.

    `consumed` is in batch order. `cursor` is the last ROLLOUTS sequence whose fate
    is known or in `pool`; `pool` the sequences of deciding attempts of groups still open. `rng` is the seed, little
    endian, that every random draw of the step is a function of; `micro_batches` are places in `consumed`, in the
    order in which their gradients were added up.
    """

    kind: Literal["step"] = "step"
    version: VersionField
    parent: VersionField
    consumed: list[Consumed]
    drops: list[Drop]
    cursor: Count
    pool: list[Count]
    counters: Counters
    rng: bytes
    micro_batches: list[list[Count]] = Field(default_factory=list)
    metrics: dict[str, float]
    checkpoint: Digest | None
    """None where `grpo.checkpoint_every` left it out."""
    manifest: Digest
    root: Digest


class Drops(Model):
    """Rollouts declared untrained without a step, so that pacing never starves."""

    kind: Literal["drops"] = "drops"
    drops: list[Drop]
    cursor: Count
    pool: list[Count]
    counters: Counters


class Fork(Model):
    """A rollback: the epoch rises, n continues from `base`."""

    kind: Literal["fork"] = "fork"
    version: VersionField
    base: VersionField
    checkpoint: Digest
    manifest: Digest
    root: Digest


class Record(Model):
    """One link of the chain."""

    prev: Digest
    term: Count
    index: Count
    body: Annotated[Genesis | Open | Step | Drops | Fork, Field(discriminator="kind")]


class LedgerEntry(Message):
    """A record as it travels."""

    KIND: ClassVar[str] = "ledger"

    payload: bytes
    signature: bytes
    version: VersionField
    record_kind: Literal["genesis", "open", "step", "drops", "fork"]

    def headers(self) -> dict[str, str]:
        return {H_VERSION: str(self.version), "Headway-Record": self.record_kind}

    def message_id(self) -> str:
        return f"ledger/{digest_of(self.payload)}"

    def open(self, public_key: bytes | None = None) -> Record:
        """The record; its signature is checked when a key is given. Raises WireError."""
        if public_key is not None:
            signing.verify(public_key, self.payload, self.signature)
        record = unpack(Record, self.payload)
        if record.body.kind != self.record_kind:
            raise WireError("invalid", f"a {record.body.kind} record travels as {self.record_kind}")
        return record


def seal_record(record: Record, version: Any, private_key: bytes) -> LedgerEntry:
    """Pack and sign a record."""
    payload = pack(record)
    return LedgerEntry(
        payload=payload,
        signature=signing.sign(private_key, payload),
        version=version,
        record_kind=record.body.kind,
    )
