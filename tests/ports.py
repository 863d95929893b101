"""Ports for those who must say one before they listen."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
    return port
