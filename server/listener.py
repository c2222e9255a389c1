"""The socket on which a server accepts connections. Importing this module loads no web server."""

from __future__ import annotations

import errno
import http.client
import json
import socket
from contextlib import closing
from typing import Final

ANSWER_S: Final = 1.0
MAX_ANSWER_BYTES: Final = 1 << 20
"""Limits for the answer of the process that uses the port."""


class PortError(Exception):
    """The address cannot be used. The message names the address and the reason."""

    def __init__(self, message: str, *, is_in_use: bool, has_conure: bool = False) -> None:
        super().__init__(message)
        self.is_in_use = is_in_use
        """Another process uses the port."""
        self.has_conure = has_conure
        """A Conure server uses the port."""


def bind(host: str, port: int) -> socket.socket:
    """Bind the port without listening yet, so that early clients are refused and do not hang.

    Raises:
        PortError: if the address cannot be used. It says if a Conure server uses the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is explicit because asyncio disables Nagle only on sockets that have one.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        is_in_use = error.errno == errno.EADDRINUSE
        has_conure = is_in_use and is_conure(host, port)
        if has_conure:
            reason += " by a Conure server"
        message = f"cannot listen on {address(host, port)}: {reason}"
        raise PortError(message, is_in_use=is_in_use, has_conure=has_conure) from error
    return listener


def address(host: str, port: int) -> str:
    """Return host and port as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_conure(host: str, port: int) -> bool:
    """Return whether a Conure server answers at an address."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    with closing(connection):
        try:
            connection.request("GET", "/v1/models")
            models = json.loads(connection.getresponse().read(MAX_ANSWER_BYTES))["data"]
            return any(model["owned_by"] == "conure" for model in models)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return False
