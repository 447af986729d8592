"""An agent's side of its region's relay, over HTTP."""

from __future__ import annotations

import aiohttp

from headway.bus.blobs import MissingBlob
from headway.schemas.errors import UnavailableError
from headway.weight_sync.transfer import SourceDown

H_SIZE = "Headway-Bytes"
"""The object's size, where the asker knows it: the relay then fetches it in parallel ranges."""
FETCHING = 202
"""The relay's answer while it still fetches the object: ask again."""
CONNECT_S_MAX = 3.0
SILENCE_S_MAX = 20.0
"""Longer than a relay takes to say that it is still fetching."""
PATIENCE_MAX = 30
"""How often to ask again for one range: about five minutes."""
OBJECT_BYTES_MAX = 1 << 30
SAID_BYTES_MAX = 300


class RelayClient:
    """The relay at `url`. `http` outlives it."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self._http, self._url = http, url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S_MAX, sock_read=SILENCE_S_MAX)

    async def get(self, key: str) -> bytes:
        """The whole object. Raises MissingBlob, SourceDown, UnavailableError."""
        return await self._get(key, {}, OBJECT_BYTES_MAX)

    async def get_range(self, key: str, start: int, end: int, size_bytes: int) -> bytes:
        """Bytes [start, end) of an object of `size_bytes`. Raises MissingBlob, SourceDown, UnavailableError."""
        return await self._get(key, {"Range": f"bytes={start}-{end - 1}", H_SIZE: str(size_bytes)}, end - start)

    async def _get(self, key: str, headers: dict[str, str], bytes_max: int) -> bytes:
        url = f"{self._url}/{key}"
        try:
            for _ in range(PATIENCE_MAX):
                async with self._http.get(url, headers=self._headers | headers, timeout=self._timeout) as reply:
                    if reply.status in (200, 206):
                        return await _bounded(reply, bytes_max)
                    said = (await reply.content.read(SAID_BYTES_MAX)).decode("utf-8", "replace")
                if reply.status != FETCHING:
                    break
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise SourceDown(f"{url} did not answer", why=repr(error)[:200], hint="is the relay running?") from None
        if reply.status == 404:
            raise MissingBlob(f"{url}: no such object")
        raise UnavailableError(f"{url} answered {reply.status}", why=said)


async def _bounded(reply: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The body, cut off where it is longer than asked for: its digest will tell."""
    parts, size = [], 0
    async for part in reply.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > bytes_max:
            break
    return b"".join(parts)
