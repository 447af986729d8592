"""Telling systemd how a service is (sd_notify): READY, STOPPING, WATCHDOG. Outside systemd nothing happens.

The watchdog is fed by the heartbeat task, so an event loop that hangs is killed and started again.
"""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Send `state`, such as "READY=1", as a datagram to NOTIFY_SOCKET. Never raises: systemd sees silence."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(state.encode(), address)
