"""When a loop is over."""

from __future__ import annotations

import asyncio


def ending() -> bool:
    """Whether this task was told to end: what loops ask, since Python 3.11's `asyncio.wait_for` can swallow it.

    That happens when what it waits for is done in the moment of the cancellation; whoever loops would go on for ever.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
