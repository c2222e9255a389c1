"""Who uses a port that a server cannot have."""

from __future__ import annotations

import socket
import threading

import pytest

from conure.server import listener


def _answer_once(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(65_536)
        connection.sendall(answer)


@pytest.mark.parametrize(
    ("body", "is_conure"),
    [
        (b'{"data": [{"id": "builtin", "owned_by": "conure"}]}', True),
        (b'{"data": [{"id": "llama", "owned_by": "vllm"}]}', False),
        (b"[]", False),
        (b"<!DOCTYPE html>", False),
    ],
)
def test_a_used_port_names_a_conure_server(body: bytes, is_conure: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        answer = threading.Thread(
            target=_answer_once, args=(other, b"HTTP/1.0 200 OK\r\n\r\n" + body)
        )
        answer.start()
        with pytest.raises(listener.PortError, match=rf"127\.0\.0\.1:{port}: .+ in use") as caught:
            listener.bind("127.0.0.1", port)
        answer.join()
    assert ("in use by a Conure server" in str(caught.value)) == is_conure
