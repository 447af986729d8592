"""How typed messages become bytes and headers, and how hostile bytes are refused.

A body is a MessagePack map of the model's fields; an array is `[dtype, shape, bytes]` (little-endian,
C order) and comes back as a read-only numpy view. Headers repeat what a person wants to see in
`nats sub --headers-only`; the body has authority and a header that disagrees is refused.
Schemas are additive within a number: unknown fields are ignored. A reader takes SCHEMA and SCHEMA - 1.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypeVar

import msgpack
import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    ValidationError,
)

from headway.schemas.errors import WireError
from headway.schemas.version import Version

BODY_BYTES_MAX = 64 << 20
"""No body is decoded above this size."""
INLINE_BYTES_MAX = 64 << 10
"""A larger body goes to the object store and a claim check travels instead."""
ARRAY_DIMS_MAX = 4

H_MSG_ID = "Nats-Msg-Id"
H_KIND = "Headway-Kind"
H_SCHEMA = "Headway-Schema"
H_DIGEST = "Headway-Digest"
H_VERSION = "Headway-Version"
H_CLAIM = "Headway-Claim"

NDArray = np.ndarray[Any, np.dtype[Any]]


@functools.cache
def _little(name: str) -> np.dtype[Any]:
    return np.dtype(name).newbyteorder("<")


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name  # numpy puts the name together each time it is asked


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What an array field must be: one of `dtypes` (numpy names) with exactly `ndim` dimensions."""

    dtypes: tuple[str, ...]
    ndim: int

    def read(self, value: Any) -> NDArray:
        """Check an array, or decode `[dtype, shape, bytes]`. Raises ValueError."""
        array: NDArray
        if isinstance(value, np.ndarray):
            if _name_of(value.dtype) not in self.dtypes:
                raise ValueError(f"dtype {value.dtype.name} is none of {self.dtypes}")
            array = value.view()
            array.flags.writeable = False
        else:
            array = self._from_wire(value)
        if array.ndim != self.ndim:
            raise ValueError(f"{array.ndim} dimensions where {self.ndim} are due")
        if array.dtype.kind == "f" and np.count_nonzero(np.isfinite(array)) != array.size:
            raise ValueError("NaN or infinity in an array")
        return array

    def _from_wire(self, value: Any) -> NDArray:
        """A view of the bytes; read-only, as bytes are."""
        if not (isinstance(value, list) and len(value) == 3):
            raise ValueError("an array is [dtype, shape, bytes]")
        dtype, shape, data = value
        if dtype not in self.dtypes:
            raise ValueError(f"dtype {str(dtype)[:20]!r} is none of {self.dtypes}")
        if not (isinstance(shape, list) and len(shape) <= ARRAY_DIMS_MAX and isinstance(data, bytes)):
            raise ValueError("an array is [dtype, shape, bytes]")
        for size in shape:
            if type(size) is not int or not 0 <= size <= BODY_BYTES_MAX:
                raise ValueError("a shape is a list of sizes")
        kind = _little(dtype)
        if math.prod(shape) * kind.itemsize != len(data):
            raise ValueError(f"shape {shape} of {dtype} does not fit {len(data)} bytes")
        return np.ndarray(shape, kind, data)


def _to_wire(value: NDArray) -> list[Any]:
    """`[dtype, shape, bytes]`, without a copy where the bytes lie as they travel."""
    name = _name_of(value.dtype)
    return [name, list(value.shape), np.ascontiguousarray(value, _little(name)).data]


def _dump_array(value: NDArray) -> list[Any]:
    dtype, shape, data = _to_wire(value)
    return [dtype, shape, bytes(data)]


_DUMP = PlainSerializer(_dump_array)
Int32Array: TypeAlias = Annotated[NDArray, PlainValidator(ArraySpec(("int32",), 1).read), _DUMP]
Float32Array: TypeAlias = Annotated[NDArray, PlainValidator(ArraySpec(("float32",), 1).read), _DUMP]
UInt8Array: TypeAlias = Annotated[NDArray, PlainValidator(ArraySpec(("uint8",), 1).read), _DUMP]
RouteArray: TypeAlias = Annotated[NDArray, PlainValidator(ArraySpec(("uint8", "uint16"), 3).read), _DUMP]


class Model(BaseModel):
    """Base of everything that travels: immutable, strictly typed, finite, additive."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", allow_inf_nan=False, arbitrary_types_allowed=True
    )


class Message(Model):
    """A model that travels on the bus on its own."""

    KIND: ClassVar[str]
    SCHEMA: ClassVar[int] = 1

    def headers(self) -> dict[str, str]:
        """What the headers repeat of the body, beyond kind, schema and digest."""
        return {}

    def message_id(self) -> str | None:
        """The dedup id, where publishing twice must store once."""
        return None


M = TypeVar("M", bound=Message)
P = TypeVar("P", bound=Model)


def pack(model: Model) -> bytes:
    """The body of `model`. The same model gives the same bytes."""
    packed: bytes = msgpack.packb(model.__dict__, default=_plain, use_bin_type=True, strict_types=True)
    return packed


def _plain(value: Any) -> Any:
    """What MessagePack has no type for. Of a model, `__dict__` holds the fields alone, in their order."""
    if isinstance(value, Model):
        return value.__dict__
    if isinstance(value, np.ndarray):
        return _to_wire(value)
    if isinstance(value, Version):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    for exact in (int, float, str):
        if isinstance(value, exact):
            return exact(value)  # numpy's numbers and enumerations are subclasses
    raise TypeError(f"a {type(value).__name__} does not travel")


def unpack(cls: type[P], body: bytes) -> P:
    """Decode and validate a body. Raises WireError(oversize | malformed | invalid | bad_routes)."""
    if len(body) > BODY_BYTES_MAX:
        raise WireError("oversize", f"a body of {len(body)} bytes", why=f"the limit is {BODY_BYTES_MAX}")
    try:
        fields = msgpack.unpackb(body, raw=False, strict_map_key=True, use_list=True)
    except Exception as error:  # msgpack raises many types, some plain ValueError, on hostile bytes
        raise WireError("malformed", f"{cls.__name__}: not MessagePack", why=str(error)[:200]) from None
    if not isinstance(fields, dict):
        raise WireError("malformed", f"{cls.__name__}: the body is no map")
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        reason = "bad_routes" if first["type"] == "bad_routes" else "invalid"
        raise WireError(reason, f"{cls.__name__}.{where}: {first['msg'][:200]}") from None


def digest_of(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


class Claim(Model):
    """The claim check that travels instead of a body above INLINE_BYTES_MAX."""

    key: str
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: Annotated[int, Field(ge=0, le=BODY_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message ready to publish."""

    headers: dict[str, str]
    body: bytes

    @classmethod
    def seal(cls, message: Message) -> Self:
        body = pack(message)
        headers = {
            H_KIND: message.KIND,
            H_SCHEMA: str(message.SCHEMA),
            H_DIGEST: digest_of(body),
            **message.headers(),
        }
        if (message_id := message.message_id()) is not None:
            headers[H_MSG_ID] = message_id
        return cls(headers, body)


def open_envelope(cls: type[M], headers: Mapping[str, str] | None, body: bytes) -> M:
    """Decode a message whose claim check, if any, was already resolved into `body`.

    Raises WireError: wrong_kind, unknown_schema, digest_mismatch, header_mismatch, or unpack's.
    """
    headers = headers or {}
    if headers.get(H_KIND) != cls.KIND:
        raise WireError("wrong_kind", f"kind {headers.get(H_KIND)!r} where {cls.KIND!r} is due")
    schema = headers.get(H_SCHEMA, "")
    if schema not in (str(cls.SCHEMA), str(cls.SCHEMA - 1)) or schema == "0":
        raise WireError(
            "unknown_schema",
            f"{cls.KIND} of schema {schema[:20]!r}",
            why=f"this build reads {cls.SCHEMA} and {cls.SCHEMA - 1}",
            hint="upgrade the reader first",
        )
    if headers.get(H_DIGEST) != digest_of(body):
        raise WireError("digest_mismatch", f"{cls.KIND}: the body does not match its digest")
    message = unpack(cls, body)
    for name, value in message.headers().items():
        if headers.get(name) != value:
            raise WireError(
                "header_mismatch", f"{cls.KIND}: header {name} is {headers.get(name)!r}, body says {value!r}"
            )
    return message
