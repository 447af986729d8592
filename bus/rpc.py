"""Request/reply over NATS: bounded MessagePack maps; errors travel as what, why, hint.

A reply is {"ok": map} or {"error": {"kind", "what", "why", "hint"}}. Nobody unpickles anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgpack
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from headway.schemas.errors import HeadwayError, InputError, UnavailableError, WireError

RPC_BYTES_MAX = 1 << 20
Handler = Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]
log = structlog.get_logger()


def _decode(data: bytes) -> dict[str, Any]:
    if len(data) > RPC_BYTES_MAX:
        raise WireError("oversize", f"a request or reply of {len(data)} bytes")
    try:
        fields = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises many types on hostile bytes
        raise WireError("malformed", "not MessagePack", why=str(error)[:200]) from None
    if not isinstance(fields, dict):
        raise WireError("malformed", "a request or reply is a map")
    return fields


async def call(client: Client, subject: str, fields: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Ask and wait for the answer.

    Raises:
        InputError: the other side refused the request as wrong.
        UnavailableError: nobody answers, or the other side is unavailable or busy.
    """
    try:
        reply = await client.request(subject, msgpack.packb(dict(fields)), timeout=timeout_s)
    except (nats.errors.Error, OSError, TimeoutError) as failure:
        raise UnavailableError(f"no answer on {subject}", why=repr(failure)[:200]) from None
    answer = _decode(reply.data)
    if "error" in answer:
        found = answer["error"] if isinstance(answer["error"], dict) else {}
        kind = InputError if found.get("kind") == "input" else UnavailableError
        what, why, hint = (str(found.get(key, ""))[:400] for key in ("what", "why", "hint"))
        raise kind(what, why=why, hint=hint)
    result = answer.get("ok")
    if not isinstance(result, dict):
        raise WireError("malformed", f"the reply on {subject} has no result")
    return result


async def serve(
    client: Client,
    subject: str,
    handler: Handler,
    *,
    tasks: asyncio.TaskGroup,
    queue: str = "",
    concurrent_max: int = 256,
) -> Subscription:
    """Answer requests on `subject`, each in its own task of `tasks`, at most `concurrent_max` at once."""
    gate = asyncio.Semaphore(concurrent_max)

    async def answer_one(message: Msg) -> None:
        try:
            answer = await _answer(message, handler, subject)
        finally:
            gate.release()
        if message.reply and not client.is_closed:
            try:
                await message.respond(answer)
            except (nats.errors.Error, OSError) as error:  # the caller asks again; the service goes on
                log.warning("rpc_reply_lost", subject=subject, why=repr(error)[:200])

    async def on_message(message: Msg) -> None:
        await gate.acquire()
        tasks.create_task(answer_one(message))

    return await client.subscribe(subject, queue=queue, cb=on_message)


async def _answer(message: Msg, handler: Handler, subject: str) -> bytes:
    try:
        answer: bytes = msgpack.packb({"ok": dict(await handler(_decode(message.data)))})
        return answer
    except HeadwayError as error:
        kind = "input" if isinstance(error, InputError) else "unavailable"
        fields = {"kind": kind, "what": error.what, "why": error.why, "hint": error.hint}
    except Exception as error:  # a handler's bug must reach the caller as an error, not end the service
        log.exception("rpc_handler_failed", subject=subject)
        what = f"{type(error).__name__} while serving {subject}"
        fields = {"kind": "unavailable", "what": what, "why": "", "hint": "see the service's log"}
    refusal: bytes = msgpack.packb({"error": fields}, unicode_errors="backslashreplace")  # a path need be no text
    return refusal
