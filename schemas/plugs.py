"""Parts that a run names in its configuration as `module:attribute`, looked up once when a service starts.

What they name runs inside the service with its rights: it is code of whoever runs Headway, never of a task or a model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from headway.schemas.errors import ConfigError


def load(spec: str, key: str) -> Callable[..., Any]:
    """What `spec` names; `key` is the setting it stands in. Raises ConfigError."""
    module, _, attribute = spec.partition(":")
    hint = "write package.module:attribute, of a package that is installed where the service runs"
    if not module or not attribute.isidentifier():
        raise ConfigError(f"{key} = {spec!r} names nothing", why="a part is named as module:attribute", hint=hint)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing runs the module, which may raise anything
        raise ConfigError(f"{key} = {spec!r} cannot be loaded", why=repr(error)[:300], hint=hint) from None
    if not callable(found):
        raise ConfigError(f"{key} = {spec!r} is no function or class", why=f"it is a {type(found).__name__}", hint=hint)
    called: Callable[..., Any] = found
    return called
