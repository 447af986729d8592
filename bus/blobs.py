"""The object store: large, immutable bytes under names that never change meaning.

Put-if-absent only; no pointer lives here (compare-and-set is not portable), pointers are ledger records.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from headway.bus.failpoints import failpoint, uploaded
from headway.schemas.errors import UnavailableError

ATTEMPTS_DEFAULT = 5
BACKOFF_S_FIRST = 0.05
BACKOFF_S_MAX = 2.0
REQUEST_TIMEOUT, CONNECT_TIMEOUT = "120s", "5s"
"""Of one HTTP request; the first bounds how slow a link may be: 64 MiB in two minutes."""

ALLOW_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
"""object_store's own switches for stores without TLS: options given to it hide them."""

T = TypeVar("T")


class BlobStore(Protocol):
    """What the rest of Headway asks of an object store."""

    async def put(self, key: str, data: bytes) -> None: ...
    async def get(self, key: str) -> bytes: ...
    async def get_range(self, key: str, start: int, end: int) -> bytes: ...
    async def exists(self, key: str) -> bool: ...
    async def delete(self, key: str) -> None: ...
    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]: ...
    def once(self) -> BlobStore: ...


class MissingBlob(UnavailableError):
    """The key does not exist. Not retried: absence is an answer."""


class ObstoreBlobs:
    """A BlobStore over obstore: local folder, memory, S3, GCS, Azure.

    Transient errors are retried `attempts` times with exponential backoff and jitter, then raised as
    UnavailableError.
    """

    def __init__(self, store: ObjectStore, *, attempts: int = ATTEMPTS_DEFAULT) -> None:
        self._store, self._attempts = store, attempts

    @classmethod
    def open(cls, url: str, *, attempts: int = ATTEMPTS_DEFAULT) -> ObstoreBlobs:
        """`url` is a folder path, `memory://`, or an obstore URL (credentials from the usual variables).

        Raises UnavailableError when it names no store, or a folder that cannot be made.
        """
        try:
            if url == "memory://":
                return cls(MemoryStore(), attempts=attempts)
            if "://" not in url:
                return cls(LocalStore(Path(url).absolute(), mkdir=True), attempts=attempts)
            options: Any = {"timeout": REQUEST_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT}
            if url.startswith("http://") or "true" in (os.environ.get(name, "") for name in ALLOW_HTTP):
                options["allow_http"] = True
            store = from_url(url, client_options=options, retry_config={"max_retries": 0})  # _retry alone repeats
            return cls(store, attempts=attempts)
        except (BaseError, OSError, ValueError) as error:
            raise UnavailableError(
                f"cannot open the store {url!r}",
                why=str(error).splitlines()[0][:300],
                hint="a folder, or a URL such as s3://bucket/prefix (store.url, HEADWAY_STORE_URL)",
            ) from None

    def once(self) -> ObstoreBlobs:
        """The same store without retries, for callers that do their own."""
        return ObstoreBlobs(self._store, attempts=1)

    async def put(self, key: str, data: bytes) -> None:
        """Store `data` unless the key exists; an existing object is left as it is.

        One of another size was torn, by power loss or a store that does not put atomically, and is replaced.
        """

        async def create() -> None:
            failpoint(f"put.{uploaded(key)}.before")
            try:
                await obstore.put_async(self._store, key, data, mode="create")
            except AlreadyExistsError:
                if (await obstore.head_async(self._store, key))["size"] != len(data):
                    await obstore.put_async(self._store, key, data)
            failpoint(f"put.{uploaded(key)}.after")

        await self._retry(f"put {key}", create)

    async def get(self, key: str) -> bytes:
        """The whole object. Raises MissingBlob, UnavailableError."""

        async def read() -> bytes:
            result = await obstore.get_async(self._store, key)
            return bytes(await result.bytes_async())

        return await self._retry(f"get {key}", read)

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of the object, as far as it goes. Raises MissingBlob, UnavailableError."""

        async def read() -> bytes:
            try:
                return bytes(await obstore.get_range_async(self._store, key, start=start, end=end))
            except BaseError:  # stores refuse a range that begins behind the end, which is no fault of theirs
                if (await obstore.head_async(self._store, key))["size"] <= start:
                    return b""
                raise

        return await self._retry(f"get {key}", read)

    async def exists(self, key: str) -> bool:
        async def head() -> bool:
            await obstore.head_async(self._store, key)
            return True

        try:
            return await self._retry(f"head {key}", head)
        except MissingBlob:
            return False

    async def delete(self, key: str) -> None:
        """Delete; deleting what is absent is fine."""
        failpoint("delete.before")
        with contextlib.suppress(MissingBlob):
            await self._retry(f"delete {key}", lambda: obstore.delete_async(self._store, key))
        failpoint("delete.after")

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """(key, size in bytes) of every object below `prefix`. Raises UnavailableError; some may have come by then."""
        try:
            async for batch in obstore.list(self._store, prefix=prefix):
                for meta in batch:
                    yield meta["path"], meta["size"]
        except (BaseError, OSError) as error:
            raise _unavailable(f"list {prefix}", 1, error) from None

    async def _retry(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        wait_s = BACKOFF_S_FIRST
        for attempt in range(1, self._attempts + 1):
            try:
                return await call()
            except (NotFoundError, FileNotFoundError):
                raise MissingBlob(f"{what}: no such object") from None
            except (BaseError, OSError) as error:
                if attempt == self._attempts:
                    raise _unavailable(what, attempt, error) from None
                await asyncio.sleep(wait_s * (0.5 + random.random()))
                wait_s = min(wait_s * 2, BACKOFF_S_MAX)
        raise AssertionError("unreachable")


def _unavailable(what: str, attempts: int, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"{what} failed {attempts} time{'s' if attempts > 1 else ''}",
        why=(str(error).splitlines() or [repr(error)])[0][:300],
        hint="check the store's address, credentials and free space",
    )
