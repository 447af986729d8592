"""A service's status numbers for Prometheus: text format 0.0.4, base units, no label but service and instance.

Off unless HEADWAY_METRICS_PORT is set; listens on HEADWAY_METRICS_HOST, by default on loopback alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from headway.schemas.errors import ConfigError, UnavailableError

METRICS_MAX = 256
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
VERSION = re.compile(r"(\d{1,12})\.(\d{1,12})")


def render(service: str, instance: str, status: Mapping[str, Any]) -> str:
    """One gauge for each number of `status`: `_ms` become seconds, a version `e.n` becomes its `_step` n."""
    values: dict[str, float] = {"up": 1.0}
    for key, value in list(status.items())[:METRICS_MAX]:
        name = re.sub(r"[^a-z0-9_]", "_", key.lower())
        if isinstance(value, int | float):
            values[f"{name[:-3]}_seconds" if name.endswith("_ms") else re.sub(r"_s$", "_seconds", name)] = (
                value / 1e3 if name.endswith("_ms") else float(value)
            )
        elif isinstance(value, str) and (match := VERSION.fullmatch(value)):
            values[f"{name}_step"] = float(match[2])
    labels = f'{{service="{service}",instance="{instance}"}}'  # ids: nothing in them needs escaping
    lines = (f"# TYPE headway_{name} gauge\nheadway_{name}{labels} {value:.10g}\n" for name, value in values.items())
    return "".join(lines)


@contextlib.asynccontextmanager
async def served(
    service: str, instance: str, status: Mapping[str, Any], env: Mapping[str, str]
) -> AsyncIterator[int | None]:
    """Serve `/metrics`; yields the port, None when nobody asked. Raises ConfigError, UnavailableError."""
    if not (wanted := env.get("HEADWAY_METRICS_PORT")):
        yield None
        return
    if not (wanted.isascii() and wanted.isdigit() and int(wanted) < 1 << 16):
        raise ConfigError(f"HEADWAY_METRICS_PORT = {wanted[:20]!r} is no port")

    from aiohttp import web  # costs a tenth of a second: only for who asked

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=render(service, instance, status), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host = env.get("HEADWAY_METRICS_HOST", "127.0.0.1")
    try:
        try:
            await web.TCPSite(runner, host, int(wanted)).start()
        except OSError as error:
            raise UnavailableError(f"cannot serve metrics on {host}:{wanted}", why=str(error)) from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
