"""run.toml as users handle it: `--set` overrides, the resolved file, where a value came from, what differs."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from typing import Any

from headway.schemas.config import Config
from headway.schemas.errors import ConfigError

BARE_WORD = re.compile(r"[A-Za-z_./~][^\s\"'\[\]{}=,#]*")
DIFF_LINES_MAX = 12


def parse_set(items: Iterable[str]) -> dict[str, Any]:
    """`a.b=value` items as dotted keys to typed values. A value is TOML; a bare word may leave its quotes out.

    Raises ConfigError.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not (equals and re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)+", key.strip())):
            raise ConfigError(f"--set {item!r} is not section.key=value", hint="for example --set run.seed=2")
        found[key.strip()] = _value(item, text.strip())
    return found


def _value(item: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if BARE_WORD.fullmatch(text):
            return text
        raise ConfigError(f"--set {item!r}: the value is not TOML", why=str(error)) from None
    if set(parsed) != {"value"}:
        raise ConfigError(f"--set {item!r}: one value is due")
    return parsed["value"]


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested maps as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_toml(config: Config, origins: dict[str, str] | None = None) -> str:
    """The resolved config as TOML that reads back equal; with `origins`, each key's origin as a comment."""
    lines: list[str] = []
    section = None
    for dotted, value in flatten(config.model_dump()).items():
        head, _, leaf = dotted.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"[{section}]"]
        origin = f"  # {origins.get(dotted, 'default')}" if origins is not None else ""
        lines.append(f"{leaf} = {_literal(value)}{origin}")
    return "\n".join(lines[1:]) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def origins_of(text: str, file: str, overrides: dict[str, Any]) -> dict[str, str]:
    """For each dotted key that is not a default: the file or `--set`."""
    return {**dict.fromkeys(flatten(tomllib.loads(text)), file), **dict.fromkeys(overrides, "--set")}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """`key: old -> new` for each dotted key that differs, at most DIFF_LINES_MAX lines."""
    old, new = flatten(before), flatten(after)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    lines = [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in changed[:DIFF_LINES_MAX]]
    return lines + [f"and {len(changed) - DIFF_LINES_MAX} more"] * (len(changed) > DIFF_LINES_MAX)
