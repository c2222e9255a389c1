"""The socket on which a server accepts connections. Importing this module loads no web server."""

from __future__ import annotations

import socket


def bind(host: str, port: int) -> socket.socket:
    """Bind the port without listening yet, so that early clients are refused and do not hang.

    Raises:
        OSError: if the address cannot be used, with the reason.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is explicit because asyncio disables Nagle only on sockets that have one.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def address(host: str, port: int) -> str:
    """Return host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
