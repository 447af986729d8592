"""From text to ids and, for reading a call only, back.

Text from models, tools and tasks never becomes a control id: `encode` knows none, and only `encode_pieces` writes
them, where the chat template itself has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.schemas.errors import ConfigError
from headway.schemas.vocab import BOS, EOS, VOCAB_SIZE, encode

FILE_BYTES_MAX = 256 << 20


class Tokenizer(Protocol):
    """What a dialogue needs of one. `controls`: the texts by which a template writes control ids."""

    vocab_size: int
    controls: Mapping[str, int]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, whatever it says; never one of `controls`."""

    def decode(self, ids: Sequence[int]) -> str:
        """For a parser or a person. Never encode the result again."""


@dataclass(frozen=True, slots=True)
class Glue:
    """Text of the template itself: the only place where control tokens stand for ids."""

    text: str


Piece = Glue | str | tuple[int, ...]
"""The template's text, foreign text, or ids as they were sampled."""


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> list[int]:
    """The ids of `pieces` as if the control tokens of foreign text were spelled out.

    Text is encoded between control tokens, over the seams of pieces, just as one string would be. Of sampled ids the
    control ones are left out.
    """
    known = sorted(tokenizer.controls, key=len, reverse=True)
    splitter = re.compile("|".join(map(re.escape, known)) or r"(?!)")
    forbidden = set(tokenizer.controls.values())
    ids: list[int] = []
    run = ""
    for piece in pieces:
        if isinstance(piece, str):
            run += piece
        elif isinstance(piece, tuple):
            ids += [*_plain(tokenizer, run, forbidden), *(t for t in piece if t not in forbidden)]
            run = ""
        else:
            at = 0
            for found in splitter.finditer(piece.text):
                ids += [*_plain(tokenizer, run + piece.text[at : found.start()], forbidden)]
                ids.append(tokenizer.controls[found[0]])
                run, at = "", found.end()
            run += piece.text[at:]
    return ids + _plain(tokenizer, run, forbidden)


def _plain(tokenizer: Tokenizer, text: str, forbidden: set[int]) -> list[int]:
    """Foreign ids: where a vocabulary holds a control token as a word, too, it is spelled letter by letter."""
    text = text.encode("utf-8", "replace").decode()
    ids = tokenizer.encode(text) if text else []
    if not forbidden.isdisjoint(ids):
        ids = [t for letter in text for t in tokenizer.encode(letter) if t not in forbidden]
    return ids


class ByteTokenizer:
    """The demo's vocabulary: a token is a byte. Templates write its control ids as below."""

    vocab_size = VOCAB_SIZE
    controls: Mapping[str, int] = {"<|bos|>": BOS, "<|eos|>": EOS}

    def encode(self, text: str) -> list[int]:
        return encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        names = {number: name.encode() for name, number in self.controls.items()}
        return b"".join(bytes([t]) if t < 256 else names.get(t, b"\x1a") for t in ids).decode("utf-8", "replace")


class HFTokenizer:
    """A `tokenizer.json` as the `tokenizers` library reads it."""

    def __init__(self, source: str) -> None:
        """Raises ConfigError."""
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError(
                "a tokenizer.json needs the tokenizers library", why=str(error), hint="pip install 'headway-rl[chat]'"
            ) from None
        try:
            fields: dict[str, Any] = json.loads(source)
            fields |= {"truncation": None, "padding": None, "post_processor": None}
            self._full = tokenizers.Tokenizer.from_str(json.dumps(fields))
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(fields | {"added_tokens": []}))
            self.controls = {token["content"]: int(token["id"]) for token in fields.get("added_tokens") or ()}
        except Exception as error:  # the library raises bare Exception
            raise ConfigError("the tokenizer.json is not understood", why=str(error)[:200]) from None
        self.vocab_size = self._full.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._full.decode(list(ids), skip_special_tokens=False))


def read_bounded(path: Path) -> str:
    """A text file of a model's folder. Raises ConfigError."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX} bytes")
        return path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}", why=str(error)[:200], hint="agent.tokenizer names the folder"
        ) from None
