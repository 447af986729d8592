"""Reading headers ourselves means what nats-py's own reading means."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from nats.aio.client import Client

from headway.bus.client import LeanClient

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


@settings(max_examples=500, deadline=None)
@given(st.lists(LINES, max_size=6))
def test_headers_mean_what_they_mean_to_nats_py(lines: list[bytes]) -> None:
    raw = b"\r\n".join([*lines, b"", b""])
    assert LeanClient._parse_header_lines(raw) == Client._parse_header_lines(raw)
