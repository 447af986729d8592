"""What a client may ask of the engine: SGLang's `/generate`, read strictly.

An unknown key is refused instead of ignored, and so is every sampling option that would make the
returned log-probability something else than fp32 log-softmax(logits / temperature) over the vocabulary.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from headway.schemas.errors import InputError

TEMPERATURE_MAX = 10.0
STOP_IDS_MAX = 64
NAME_CHARS_MAX = 128
SEED_LIMIT = 1 << 63

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1,),
    "min_p": (0,),
    "n": (1,),
    "repetition_penalty": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "min_new_tokens": (0,),
    "logit_bias": (None,),
    "stop": (None, []),
    "stop_regex": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "ignore_eos": (True, False),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (True, False),
}
"""Options of SGLang that are accepted only where they change neither distribution nor ids."""

SAMPLING_KEYS = {"max_new_tokens", "temperature", "stop_token_ids", "sampling_seed", *NEUTRAL}
GENERATE_KEYS = {
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "return_routed_experts",
    "routed_experts_start_len",
    "rid",
    "cache_salt",
    "stream",
}


class BadRequest(InputError):
    """Answered with 400."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the loaded model can take."""

    vocab_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """One checked request. `salt` separates prefix caches; `stop_ids` end the output and stay in it."""

    rid: str
    input_ids: list[int]
    max_new_tokens: int
    temperature: float
    stop_ids: frozenset[int]
    seed: int
    return_logprob: bool = False
    routes_start: int | None = None
    salt: str = ""


def as_map(value: Any, what: str, known: set[str]) -> dict[str, Any]:
    """`value` as a map without unknown keys. Raises BadRequest."""
    if not isinstance(value, dict):
        raise BadRequest(f"{what} is no JSON object")
    if unknown := sorted(value.keys() - known):
        raise BadRequest(
            f"{what}: unknown key {unknown[0][:NAME_CHARS_MAX]!r}", hint=f"known: {', '.join(sorted(known))}"
        )
    return value


def number(fields: dict[str, Any], key: str, default: Any, low: float, high: float, kind: type = int) -> Any:
    """fields[key] when it is an int (or, for kind float, any finite number) in [low, high]."""
    value = fields.get(key)
    value = default if value is None else value
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        raise BadRequest(f"{key} = {str(value)[:40]}: {kind.__name__} from {low} to {high} is due")
    return value


def text(fields: dict[str, Any], key: str, default: str, chars_max: int = NAME_CHARS_MAX) -> str:
    value = fields.get(key)
    value = default if value is None else value
    if not isinstance(value, str) or len(value) > chars_max:
        raise BadRequest(f"{key}: text of at most {chars_max} characters is due")
    return value


def flag(fields: dict[str, Any], key: str, default: bool = False) -> bool:
    value = fields.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise BadRequest(f"{key} = {str(value)[:40]}: true or false is due")
    return value


def _ids(value: Any, what: str, most: int, vocab_size: int) -> list[int]:
    if not isinstance(value, list) or len(value) > most:
        raise BadRequest(f"{what} is no list of at most {most} token ids")
    if not all(type(t) is int and 0 <= t < vocab_size for t in value):
        raise BadRequest(f"{what} holds something that is no token id below {vocab_size}")
    return value


def parse_generate(body: Any, limits: Limits) -> Generate:
    """Check the body of `/generate`. Raises BadRequest."""
    fields = as_map(body, "the request", GENERATE_KEYS)
    sampling = as_map(fields.get("sampling_params") or {}, "sampling_params", SAMPLING_KEYS)
    for key, allowed in NEUTRAL.items():
        if key in sampling and sampling[key] not in allowed:
            raise BadRequest(
                f"{key} = {str(sampling[key])[:40]} is not allowed",
                why="log-probabilities must be those of the whole distribution at the given temperature",
                hint=f"leave it out or use {allowed[0]}",
            )
    if flag(fields, "stream"):
        raise BadRequest("stream = true is not supported", hint="leave it out")
    input_ids = _ids(fields.get("input_ids"), "input_ids", limits.context_tokens, limits.vocab_size)
    room = limits.context_tokens - len(input_ids)
    if not input_ids or room < 1:
        raise BadRequest(f"{len(input_ids)} input_ids, from 1 to {limits.context_tokens - 1} fit")
    max_new = number(sampling, "max_new_tokens", min(128, room), 1, limits.context_tokens)
    if max_new > room:
        raise BadRequest(
            f"{len(input_ids)} input_ids + max_new_tokens {max_new} exceed the context of {limits.context_tokens}"
        )
    number(fields, "logprob_start_len", -1, -1, limits.context_tokens)
    routes_start = number(fields, "routed_experts_start_len", 0, 0, len(input_ids))
    return Generate(
        rid=text(fields, "rid", "") or secrets.token_hex(16),
        input_ids=input_ids,
        max_new_tokens=max_new,
        temperature=float(number(sampling, "temperature", 1.0, 0.0, TEMPERATURE_MAX, float)),
        stop_ids=frozenset(
            _ids(sampling.get("stop_token_ids") or [], "stop_token_ids", STOP_IDS_MAX, limits.vocab_size)
        ),
        seed=number(sampling, "sampling_seed", secrets.randbits(63), 0, SEED_LIMIT - 1),
        return_logprob=flag(fields, "return_logprob"),
        routes_start=routes_start if flag(fields, "return_routed_experts") else None,
        salt=text(fields, "cache_salt", ""),
    )
