"""A relay's disk: objects under the SHA-256 in their name, within a bound, the least recently used go first.

Invariants: a name appears only when its file is whole; nothing is handed out that was not hashed since this
process began; what is being served or hashed is never evicted. One process owns a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headway.bus.failpoints import failpoint
from headway.schemas.errors import UnavailableError
from headway.schemas.wire import digest_of

PARTIAL = ".partial"


class ShelfFull(UnavailableError):
    """No room, or no more of it on the disk."""


@dataclass(slots=True)
class _Item:
    size_bytes: int
    hashed: bool
    users: int = 0


class Shelf:
    """Names are `<sha256>.<kind>`."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Index what an earlier process left: oldest first; files it was writing are removed."""
        self._folder, self.bytes_max = folder, bytes_max
        self._items: OrderedDict[str, _Item] = OrderedDict()
        self.held_bytes = self.evictions = 0
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for path in folder.iterdir():
            if path.suffix == PARTIAL:
                path.unlink()
            else:
                found.append((path.stat(), path.name))
        for stat, name in sorted(found, key=lambda one: one[0].st_mtime_ns):
            self._add(name, _Item(stat.st_size, hashed=False))
        with contextlib.suppress(ShelfFull):  # nothing is in use: at worst it is empty now
            self._make_room(0, bytes_max - self.held_bytes)

    def __len__(self) -> int:
        return len(self._items)

    def has(self, name: str) -> bool:
        """Whether `name` can be lent."""
        return name in self._items and self._items[name].hashed

    async def check(self, name: str) -> bool:
        """Hash what an earlier process left under `name`, and remove a file of other bytes."""
        if name not in self._items:
            return False
        with self._used(name) as item:
            data = await asyncio.to_thread((self._folder / name).read_bytes)
            item.hashed = await asyncio.to_thread(digest_of, data) == name.partition(".")[0]
        if not item.hashed:
            self._remove(name)
        return item.hashed

    def fits(self, size_bytes: int) -> bool:
        """Whether an object of that size could be kept now."""
        return size_bytes <= self.bytes_max - sum(item.size_bytes for item in self._items.values() if item.users)

    async def put(self, name: str, data: bytes) -> None:
        """Keep `data`, whose digest was checked. Raises ShelfFull."""
        self._make_room(len(data), self.bytes_max - self.held_bytes)
        self.held_bytes += len(data)
        try:
            try:
                await asyncio.to_thread(self._write, name, data)
            except ShelfFull:  # the disk is smaller than it was said to be
                self._make_room(len(data), 0)
                await asyncio.to_thread(self._write, name, data)
        finally:
            self.held_bytes -= len(data)
        self._add(name, _Item(len(data), hashed=True))

    def _write(self, name: str, data: bytes) -> None:
        partial = self._folder / f"{name}{PARTIAL}"
        try:
            partial.write_bytes(data)
            failpoint("relay.rename.before")
            os.replace(partial, self._folder / name)
            failpoint("relay.rename.after")
        except OSError as error:
            partial.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ShelfFull(f"the disk of {self._folder} is full") from None

    @contextlib.contextmanager
    def lent(self, name: str) -> Iterator[Path]:
        """The file of a name that it has, which stays until the end of the block."""
        path = self._folder / name
        with self._used(name):
            self._items.move_to_end(name)
            os.utime(path)  # so that the order survives a restart
            yield path

    @contextlib.contextmanager
    def _used(self, name: str) -> Iterator[_Item]:
        item = self._items[name]
        item.users += 1
        try:
            yield item
        finally:
            item.users -= 1

    def _add(self, name: str, item: _Item) -> None:
        self._items[name] = item
        self.held_bytes += item.size_bytes

    def _remove(self, name: str) -> None:
        self.held_bytes -= self._items.pop(name).size_bytes
        (self._folder / name).unlink(missing_ok=True)

    def _make_room(self, size_bytes: int, free_bytes: int) -> None:
        for name in [name for name, item in self._items.items() if not item.users]:
            if free_bytes >= size_bytes:
                return
            free_bytes += self._items[name].size_bytes
            self._remove(name)
            self.evictions += 1
        if free_bytes < size_bytes:
            raise ShelfFull(f"{size_bytes} bytes do not fit into {self.bytes_max}")
