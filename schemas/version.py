"""Weight versions: (epoch, n), written `e.n`. n counts committed steps; a rollback raises the epoch."""

from __future__ import annotations

import functools
from typing import Annotated, Any, NamedTuple

from pydantic import PlainSerializer, PlainValidator

VERSION_MAX = 1 << 40
VERSIONS_CACHED = 256
"""Spans name the same few versions over and over."""


class Version(NamedTuple):
    """A weight version. Ordered; epoch first."""

    epoch: int
    n: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.n}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read `e.n`. Raises ValueError."""
        epoch, dot, n = text.partition(".")
        if not (dot and epoch.isascii() and epoch.isdigit() and n.isascii() and n.isdigit()):
            raise ValueError(f"{text[:40]!r} is not a version such as 0.12")
        version = cls(int(epoch), int(n))
        if max(version) > VERSION_MAX:
            raise ValueError(f"version {text[:40]} is out of range")
        return version


_parse = functools.lru_cache(VERSIONS_CACHED)(Version.parse)


def _coerce(value: Any) -> Version:
    if isinstance(value, Version):
        return value
    if isinstance(value, str):
        return _parse(value)
    raise ValueError("a version is text such as 0.12")


VersionField = Annotated[Version, PlainValidator(_coerce), PlainSerializer(str, return_type=str)]
