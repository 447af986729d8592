"""The byte-level vocabulary: a token id is a byte, or one of four control ids above 255.

Control ids cannot be written as text, so tool output can never forge one.
"""

from __future__ import annotations

BOS = 256
EOS = 257
PAD = 258
VOCAB_SIZE = 260
NEWLINE = 10


def encode(text: str | bytes) -> list[int]:
    """The ids of `text` (UTF-8), without control ids."""
    return list(text.encode() if isinstance(text, str) else text)


def decode(token_ids: list[int]) -> str:
    """Text of `token_ids` for a person or a tool-call parser; control ids and bad UTF-8 are replaced.

    Never encode the result again: the ids that were sampled are the truth.
    """
    return bytes(t if t < 256 else 0x1A for t in token_ids).decode("utf-8", "replace")
