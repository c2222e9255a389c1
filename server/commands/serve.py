"""One server process: a socket, an event loop, and an end that keeps its promises.

Knows uvicorn and signals. Refuses to know routes and programs: it gets an application.

    first SIGTERM or SIGINT   no new programs, calls run on for `drain_s`, then everything
                              that waits is told so, and the process ends with 0
    second one                the process ends at once; the journal makes that safe

uvicorn alone would wait for open event streams for ever, so its own signal handling is
replaced, and a last alarm ends the process should anything hang.

Kept true: the port is taken before an engine loads, and answers only once one has.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

import uvicorn
import uvloop
from litestar import Litestar

from ..app import create_app, drain, version
from ..config import Config
from ..engines.engine import EngineStartError
from ..program.errors import ConureError
from ..service import ModelInfo, Service

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSE_S = 2.0
"""How long connections may take to close once nothing waits any more."""
LAST_S = 5.0
"""How long after the drain the process ends, whatever hangs."""


class StartError(Exception):
    """The server cannot start; the message is one line for its user."""


def serve(config: Config, *, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Runs a server until it is told to stop.

    Raises:
        StartError: if the port is taken, or the service cannot start.
    """
    with _bind(config.host, config.port) as listener:
        app = create_app(config, functions=functions)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_Process(app, config, listener).run())


def _bind(host: str, port: int) -> socket.socket:
    """Takes the port without listening yet: early clients are refused, not left hanging."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle off only on sockets that have one.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        reason = exc.strerror or str(exc)
        raise StartError(f"cannot listen on {_address(host, port)}: {reason}") from exc
    return listener


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, saying when it listens."""

    def __init__(self, config: uvicorn.Config, *, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()


class _Process:
    """The life of one server process; all of it runs in one event loop."""

    def __init__(self, app: Litestar, config: Config, listener: socket.socket) -> None:
        self._app = app
        self._config = config
        self._listener = listener
        self._server = _Server(_uvicorn_config(app, config), announce=self._announce)
        self._main: asyncio.Task[Any] | None = None
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Starts, serves, and stops.

        Raises:
            StartError: if the service cannot start.
        """
        self._main = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        has_started = False
        try:
            async with self._app.lifespan():
                has_started = True
                # The server's own code and routes stay for good. Looking through them again and
                # again for what could go would stop every program, for a tenth of a second.
                gc.freeze()
                await self._server.serve([self._listener])
        except asyncio.CancelledError:
            if self._draining is None:
                raise
        except Exception as exc:
            cause = _only(exc)
            if has_started or not isinstance(cause, ConureError | EngineStartError | OSError):
                raise
            raise StartError(" ".join(str(cause).split())) from exc
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self._draining is not None:
            logger.warning("second signal, ending at once")
            os._exit(128 + number)
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._drain())
        loop.call_later(self._config.drain_s + LAST_S, _end_at_last)

    async def _drain(self) -> None:
        if not self._server.started:
            assert self._main is not None
            self._main.cancel()
            return
        try:
            await drain(self._app, timeout_s=self._config.drain_s)
        finally:
            self._server.should_exit = True

    def _announce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        service: Service = self._app.state.service
        models = service.models()
        line = f"conure {version()} listens on http://{_address(host, port)}"
        for model in models[:1]:
            line += f", model {describe(model)}"
        config = self._config
        if config.engine == "local" and config.model is None and config.dummy_weights is None:
            line += "; this is the built-in model, it knows short reports and nothing else"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _uvicorn_config(app: Litestar, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=2048,
        # Longer than what pooled clients keep idle connections for.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(CLOSE_S),
    )


def describe(model: ModelInfo) -> str:
    """A model in a few words."""
    described = f" ({model.description})" if model.description else ""
    return f"{model.id}{described}, {model.context_len} tokens of context"


def _only(error: BaseException) -> BaseException:
    """What is inside of groups of one: Litestar starts everything inside of a task group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _end_at_last() -> None:
    logger.error("something did not stop in time; what it did is on disk")
    os._exit(0)
