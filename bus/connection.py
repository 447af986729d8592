"""One connection to NATS, typed messages in and out, claim checks above 64 KiB.

Invariants: a publish returns only after the stream stored the message; a message that cannot be
decoded is copied to `rl.<run>.dead.<reason>` and never guessed at.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import nats
import structlog
from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from headway.bus.acks import AckWindow, Sent
from headway.bus.blobs import BlobStore, MissingBlob
from headway.bus.client import LeanClient
from headway.bus.direct import StoredMessage as StoredMessage
from headway.bus.direct import get_batch, get_batches, get_one
from headway.bus.failpoints import failpoint
from headway.bus.health import require_version
from headway.schemas.errors import FencedOut, UnavailableError, WireError
from headway.schemas.messages import REASON_CHARS_MAX, Dead, dead_reason
from headway.schemas.subjects import Keys, Subjects
from headway.schemas.wire import (
    H_CLAIM,
    H_DIGEST,
    INLINE_BYTES_MAX,
    Claim,
    Envelope,
    Message,
    open_envelope,
    pack,
    unpack,
)

CONNECT_S_MAX = 30.0
ACK_S_MAX = 5.0
PUBLISH_S_MAX = 60.0
RETRY_S = 0.25
ACKS_WAITED_MAX = 512
"""Acknowledgements under way of one `publish_all`: at most 32 MiB of bodies."""
CLAIMS_AT_ONCE = 8
"""Bodies on their way into the object store of one `publish_all`."""
REASONS_MAX = 4
DEAD_BODY_BYTES_MAX = 32 << 10
WRONG_LAST_SEQUENCE = 10071
STREAM_FULL = frozenset({10047, 10077, 10122})
UNANSWERED = (NatsTimeout, NoRespondersError, ConnectionClosedError, nats.errors.Error, OSError)

M = TypeVar("M", bound=Message)
log = structlog.get_logger()


class StreamFull(UnavailableError):
    """The stream pushes back: keep the message and take no new work."""


class Bus:
    """A run's view of NATS. Use `async with await Bus.connect(...)`."""

    def __init__(self, client: LeanClient, run: str, store: BlobStore | None) -> None:
        self.client, self.run, self.store = client, run, store
        self.subjects, self.keys = Subjects(run), Keys(run)
        self.js: JetStreamContext = client.jetstream(timeout=ACK_S_MAX)
        self._acks = AckWindow(client)

    @classmethod
    async def connect(
        cls,
        url: str,
        run: str,
        *,
        token: str = "",
        user: str = "",
        password: str = "",
        name: str = "headway",
        store: BlobStore | None = None,
        wait_s: float | None = None,
    ) -> Self:
        """Connect as a user, or with a token, within `wait_s`; reconnects for ever afterwards.

        Raises UnavailableError.
        """
        seen: list[str] = []

        shown = url.rsplit("@", 1)[-1]  # without credentials

        async def on_error(error: Exception) -> None:
            if len(seen) < REASONS_MAX and repr(error) not in seen:
                seen.append(repr(error))
            refused = "permissions violation" in str(error)
            (log.warning if refused else log.debug)("bus_refused" if refused else "bus_error", error=repr(error)[:200])

        async def on_lost() -> None:
            log.warning("bus_disconnected", url=shown)

        async def on_back() -> None:
            log.info("bus_reconnected", url=shown)

        client = LeanClient()
        try:
            await asyncio.wait_for(
                client.connect(
                    url,
                    name=name,
                    token=token or None,
                    user=user or None,
                    password=password or None,
                    error_cb=on_error,
                    disconnected_cb=on_lost,
                    reconnected_cb=on_back,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,  # type: ignore[arg-type]  # annotated int, used as seconds
                    allow_reconnect=True,
                    connect_timeout=2,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    pending_size=64 << 20,
                ),
                wait_s or CONNECT_S_MAX,
            )
            require_version(client)
        except BaseException as error:
            await client.close()  # a connection half made leaves a socket
            if not isinstance(error, OSError | TimeoutError | nats.errors.Error):
                raise
            raise UnavailableError(
                f"cannot connect to NATS at {shown}",
                why=", ".join(seen or [repr(error)])[:300],
                hint="is the server up, the user or token (HEADWAY_NATS_*) right? `headway doctor` looks",
            ) from None
        return cls(client, run, store)

    async def close(self) -> None:
        if not self.client.is_closed:
            with contextlib.suppress(RuntimeError):  # uvloop's, where the server went away before
                await self.client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def publish(
        self,
        subject: str,
        message: Message,
        *,
        expect_last_seq: int | None = None,
        deadline_s: float = PUBLISH_S_MAX,
    ) -> int:
        """Store a message in its stream and return its sequence (of the first copy, if a duplicate).

        Retries while NATS is away, until `deadline_s`. With `expect_last_seq` the append succeeds only if
        the stream's last sequence is that.

        Raises:
            FencedOut: somebody else appended first.
            StreamFull: the stream's limit is reached.
            UnavailableError: no acknowledgement until the deadline; the message may or may not be stored.
        """
        envelope = await self._claim_check(Envelope.seal(message))
        if expect_last_seq is not None:
            expected = {"Nats-Expected-Last-Sequence": str(expect_last_seq)}
            envelope = Envelope({**envelope.headers, **expected}, envelope.body)
        return await self._store(subject, message.KIND, envelope, deadline_s)

    async def publish_all(self, messages: Iterable[tuple[str, Message]]) -> list[int]:
        """Store (subject, message) after (subject, message), without waiting for each; their sequences in that order.

        What is not acknowledged at once is published again as by `publish`, behind what was sent meanwhile.
        Raises what `publish` raises; then some are stored and some are not.
        """
        due, seqs = iter(messages), list[int]()
        ready: deque[tuple[str, str, Envelope]] = deque()
        waiting: deque[tuple[str, str, Envelope, Sent]] = deque()
        try:
            while True:
                while len(waiting) < ACKS_WAITED_MAX and (ready or (ready := await self._sealed(due))):
                    subject, kind, envelope = ready.popleft()
                    failpoint(f"publish.{kind}.before")
                    sent = await self._acks.send(subject, envelope.body, envelope.headers, ACK_S_MAX)
                    waiting.append((subject, kind, envelope, sent))
                if not waiting:
                    return seqs
                subject, kind, envelope, sent = waiting.popleft()
                try:
                    seq = await self._acks.stored(sent)
                    failpoint(f"publish.{kind}.after")
                except (APIError, *UNANSWERED):
                    seq = await self._store(subject, kind, envelope, PUBLISH_S_MAX)
                seqs.append(seq)
        finally:
            for *_, sent in waiting:
                self._acks.forget(sent)

    async def _sealed(self, due: Iterator[tuple[str, Message]]) -> deque[tuple[str, str, Envelope]]:
        """(subject, kind, envelope) of the next few; their large bodies go to the store together."""
        few = list(itertools.islice(due, CLAIMS_AT_ONCE))
        envelopes = [Envelope.seal(message) for _, message in few]
        if any(len(envelope.body) > INLINE_BYTES_MAX for envelope in envelopes):
            stored = await asyncio.gather(*map(self._claim_check, envelopes), return_exceptions=True)
            if failed := next((one for one in stored if isinstance(one, BaseException)), None):
                raise failed
            envelopes = [one for one in stored if isinstance(one, Envelope)]
        return deque((one[0], one[1].KIND, envelope) for one, envelope in zip(few, envelopes, strict=True))

    async def _store(self, subject: str, kind: str, envelope: Envelope, deadline_s: float) -> int:
        """Publish until the stream acknowledges or refuses; see `publish`."""
        clock = asyncio.get_running_loop().time
        end = clock() + deadline_s
        while True:
            try:
                failpoint(f"publish.{kind}.before")
                seq = await self._acks.publish(subject, envelope.body, envelope.headers, ACK_S_MAX)
                failpoint(f"publish.{kind}.after")
                return seq
            except APIError as error:
                self._raise_refusal(error, subject)
                reason: Exception = error
            except UNANSWERED as error:
                reason = error
            if clock() > end or self.client.is_closed:
                raise UnavailableError(
                    f"no acknowledgement for {subject}",
                    why=repr(reason)[:200],
                    hint="the NATS server is away, or cannot write: look at its log and its disk",
                ) from None
            await asyncio.sleep(RETRY_S)

    @staticmethod
    def _raise_refusal(error: APIError, subject: str) -> None:
        if error.err_code == WRONG_LAST_SEQUENCE:
            raise FencedOut(f"append to {subject} refused", why=str(error.description)) from None
        if error.err_code in STREAM_FULL:
            raise StreamFull(
                f"{subject}: the stream is full",
                why=str(error.description),
                hint="raise bus.max_stream_bytes",
            ) from None
        if not isinstance(error, ServiceUnavailableError) and (error.code or 503) < 500:
            raise UnavailableError(f"publish to {subject} refused", why=str(error)) from None

    async def _claim_check(self, envelope: Envelope) -> Envelope:
        if len(envelope.body) <= INLINE_BYTES_MAX:
            return envelope
        if self.store is None:
            raise UnavailableError(f"a body of {len(envelope.body)} bytes needs an object store")
        digest = envelope.headers[H_DIGEST]
        key = self.keys.blob(digest)
        await self.store.put(key, envelope.body)
        claim = Claim(key=key, sha256=digest, size_bytes=len(envelope.body))
        return Envelope({**envelope.headers, H_CLAIM: "1"}, pack(claim))

    async def open(self, cls: type[M], stored: StoredMessage) -> M:
        """Decode a stored message, fetching its body from the object store where a claim check travels.

        Raises WireError for what must go to `dead`; UnavailableError when the store cannot be read (wait).
        """
        body = stored.body
        if H_CLAIM in stored.headers:
            body = await self._resolve(unpack(Claim, body), stored.headers.get(H_DIGEST))
        return open_envelope(cls, stored.headers, body)

    async def _resolve(self, claim: Claim, digest: str | None) -> bytes:
        """The body that a claim check names. That its digest is `digest` is for `open_envelope` to see."""
        if claim.sha256 != digest or claim.key != self.keys.blob(claim.sha256):
            raise WireError("bad_claim", f"a claim check names {claim.key[:120]!r}")
        if self.store is None:
            raise UnavailableError("a claim check needs an object store")
        try:
            # One byte more than claimed: the sender's word alone must not size what is loaded.
            body = await self.store.get_range(claim.key, 0, claim.size_bytes + 1)
        except MissingBlob:
            raise WireError("blob_lost", f"the object {claim.key} of a claim check is gone") from None
        return body

    async def bury(self, stored: StoredMessage, error: WireError) -> None:
        """Copy a message that cannot be processed to `dead`, with the reason."""
        reason = dead_reason(error)
        message = Dead(
            reason=reason,
            detail=str(error)[:REASON_CHARS_MAX],
            subject=stored.subject[:512],
            stream_seq=stored.seq,
            original_headers={k[:64]: v[:256] for k, v in list(stored.headers.items())[:64]},
            body=stored.body[:DEAD_BODY_BYTES_MAX],
        )
        log.warning("message_buried", reason=reason, subject=stored.subject, seq=stored.seq, detail=str(error))
        await self.publish(self.subjects.dead(reason), message)

    async def read_batch(self, suffix: str, start_seq: int, filter_subject: str = ">") -> list[StoredMessage]:
        """See `headway.bus.reader.read_batch`."""
        return await get_batch(self.client, self.subjects.stream(suffix), start_seq, filter_subject)

    def batches(
        self, suffix: str, start_seq: int, filter_subject: str = ">"
    ) -> AsyncGenerator[list[StoredMessage], None]:
        """See `headway.bus.reader.batches`."""
        return get_batches(self.client, self.subjects.stream(suffix), start_seq, filter_subject)

    async def read_at(self, suffix: str, seq: int) -> StoredMessage | None:
        """See `headway.bus.reader.read_at`."""
        return await get_one(self.client, self.subjects.stream(suffix), seq)

    async def last(self, suffix: str, subject: str = ">") -> StoredMessage | None:
        """The newest message of stream `suffix` on `subject`. Raises UnavailableError."""
        try:
            raw = await self.js.get_last_msg(self.subjects.stream(suffix), subject, direct=True)
        except NotFoundError:
            return None
        except (nats.errors.Error, OSError) as error:
            raise UnavailableError(f"cannot read {suffix}", why=repr(error)[:200]) from None
        headers = {str(k): str(v) for k, v in (raw.headers or {}).items()}
        return StoredMessage(str(raw.subject), int(raw.seq or 0), headers, raw.data or b"")

    async def request(self, subject: str, fields: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Request/reply of small maps; see `headway.bus.rpc`. Raises UnavailableError, WireError."""
        from headway.bus import rpc

        return await rpc.call(self.client, subject, fields, timeout_s=timeout_s)

    async def beat(self, service: str, instance: str, fields: Mapping[str, Any]) -> None:
        """A heartbeat: JSON, not stored, lost without harm."""
        if self.client.is_connected:
            await self.client.publish(self.subjects.beat(service, instance), json.dumps(dict(fields)).encode())
