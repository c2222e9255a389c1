"""Fixtures of the command line: a server in this process that the commands reach over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from conure.server.app import create_app
from conure.server.config import Config


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a server with the fake engine."""
    with served(tmp_path_factory.mktemp("data")) as address:
        yield address


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the commands of a test remember nothing of other tests, and return their cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@contextlib.contextmanager
def served(data: Path) -> Iterator[str]:
    """Run a server in a thread."""
    app = create_app(Config(data=data, engine="fake", port=0), functions={})
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None))
    thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
