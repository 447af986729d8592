"""Headers that we read and write ourselves are what nats-py reads and writes; replies to requests are always some."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import Error

from headway.bus import rpc
from headway.bus.client import LeanClient
from headway.schemas.errors import InputError

LINES = st.binary(max_size=12) | st.sampled_from(
    [
        b"a: b",
        b"a:b",
        b"a : b ",
        b"a:\tb:c",
        b"no colon",
        b": nameless",
        b"two words: x",
        b"\xff: x",
        b"a: \xff\xc3",
        b"",
    ]
)


NAMES = st.text(max_size=4) | st.sampled_from(["A", "Headway-Kind", "a b", " a", "a:", "a\r\nb", ""])
VALUES = st.text(max_size=6) | st.sampled_from(["", "x", "0.3", " x ", "x y", "x\r\nb: y", "x\n", "a: b", "ü"])


@settings(max_examples=500, deadline=None)
@given(st.lists(LINES, max_size=6))
def test_headers_mean_what_they_mean_to_nats_py(lines: list[bytes]) -> None:
    raw = b"\r\n".join([*lines, b"", b""])
    assert LeanClient._parse_header_lines(raw) == Client._parse_header_lines(raw)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=4) | st.none(), st.sampled_from(["a.b", ""]), st.binary(max_size=4))
def test_what_is_sent_is_what_nats_py_sends(headers: dict[str, str] | None, subject: str, body: bytes) -> None:
    assert sent(LeanClient(), subject, body, headers) == sent(Client(), subject, body, headers)


def sent(client: Client, subject: str, body: bytes, headers: dict[str, str] | None) -> object:
    """The bytes that wait to be written and what the client counted, or how it refused."""
    try:
        asyncio.run(client._send_publish(subject, "reply", body, len(body), headers))
    except (Error, UnicodeEncodeError) as error:
        return repr(error)
    return b"".join(client._pending), client._pending_data_size, client.stats


async def test_a_reply_that_cannot_be_packed_is_an_error_for_who_asked_and_no_end_of_the_service() -> None:
    async def unpackable(_: dict[str, Any]) -> dict[str, Any]:
        return {"answer": object()}

    async def refusing(_: dict[str, Any]) -> dict[str, Any]:
        raise InputError("no file \udcff")

    asked: Any = SimpleNamespace(data=msgpack.packb({}))
    failed = msgpack.unpackb(await rpc._answer(asked, unpackable, "rl.r.x"))
    assert failed["error"]["what"] == "TypeError while serving rl.r.x"
    refused = msgpack.unpackb(await rpc._answer(asked, refusing, "rl.r.x"))
    assert refused["error"]["what"] == r"no file \udcff"
