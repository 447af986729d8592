"""`headway decode`: a message body as JSON, for `nats stream view --translate 'headway decode'`."""

from __future__ import annotations

import json
from typing import BinaryIO

import msgpack

from headway.schemas.errors import InputError
from headway.schemas.messages import render
from headway.schemas.wire import BODY_BYTES_MAX


def decode(stream: BinaryIO) -> str:
    """ASCII JSON of the MessagePack map on `stream`. Nothing in it is trusted, so nothing of it is validated.

    Raises InputError.
    """
    body = stream.read(BODY_BYTES_MAX + 1)
    if len(body) > BODY_BYTES_MAX:
        raise InputError(f"a body of more than {BODY_BYTES_MAX} bytes")
    try:
        fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
        return json.dumps(render(fields), indent=1, default=str)
    except Exception as error:  # msgpack raises many types on hostile bytes; deep nesting is a RecursionError
        raise InputError(
            f"{len(body)} bytes on standard input are no message body",
            why=f"{type(error).__name__}: {error}"[:200],
            hint="a body is MessagePack, as it lies in a stream",
        ) from None
