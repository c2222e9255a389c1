"""`conure serve`: one server process, from the bound port to a graceful end.

    first SIGTERM or SIGINT   reject new programs, let calls run for `drain_s`, end waiting
                              requests and event streams, exit with 0
    second signal             exit immediately; the journal makes this safe

uvicorn alone would wait for open event streams forever, so this module replaces its signal
handling, and a final timer ends the process if something hangs.

Out of scope: routes and programs.
Invariants: the port is bound before an engine loads, and accepts connections only when an engine is
ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import uvicorn
import uvloop
from litestar import Litestar

from conure import __version__

from .app import create_app, drain
from .config import DEFAULT_HOST, DEFAULT_PORT, Config
from .engines.connection import EngineStartError
from .garbage_collection import GarbageCollection
from .listener import PortError, address, bind
from .program.errors import ConureError
from .routes.connection import BoundedHttpProtocol, ConnectionLimits, max_connections
from .routes.request_context import TENANT
from .service import EngineInfo, ModelInfo, Service

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSE_S = 2.0
"""Seconds for connections to close after the drain."""
LARGE_BLOCK_BYTES, MAX_HEAPS = 256 * 1024, 2
"""A larger block is given back to the system when it is freed; and the heaps of all threads."""
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Parameters of glibc's `mallopt`."""
EXIT_S = 5.0
"""Seconds after the drain until the process is ended by force."""


class ServeError(Exception):
    """The server cannot start. The message is one line for the user."""


def serve(config: Config, *, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Run a server until a signal stops it.

    Raises:
        ServeError: if the port is taken, or the service cannot start.
    """
    _return_freed_memory()
    with _listener(config) as listener:
        try:
            app = create_app(config, functions=functions)
        except ConureError as exc:
            raise ServeError(str(exc)) from exc
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_ServerProcess(app, config, listener).run())


def _return_freed_memory() -> None:
    """Let glibc give freed memory back to the system.

    By default it keeps blocks of up to 32 MB once such a block was freed, and has a heap per
    thread. Other C libraries lack the function, and need no setting.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(M_ARENA_MAX, MAX_HEAPS)


PORT_ADVICE: Final = "--port N chooses another port, --port 0 a free one"


def _listener(config: Config) -> socket.socket:
    try:
        return bind(config.host, config.port)
    except PortError as exc:
        raise ServeError(f"{exc}; {PORT_ADVICE}") from exc


class _UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers, with a callback when it listens."""

    def __init__(self, config: uvicorn.Config, *, announce: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._announce = announce

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        await self._announce()


class _ServerProcess:
    """Start, signal handling and end of the server, in one event loop."""

    def __init__(self, app: Litestar, config: Config, listener: socket.socket) -> None:
        self._app = app
        self._config = config
        self._listener = listener
        self._server = _UvicornServer(_uvicorn_config(app, config), announce=self._announce)
        self._main: asyncio.Task[Any] | None = None
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Start, serve and stop.

        Raises:
            ServeError: if the service cannot start.
        """
        self._main = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        has_started = False
        service: Service = self._app.state.service
        collecting = loop.create_task(GarbageCollection(lambda: service.num_nodes).run())
        try:
            async with self._app.lifespan():
                has_started = True
                await self._server.serve([self._listener])
        except asyncio.CancelledError:
            if self._draining is None:
                raise
        except Exception as exc:
            cause = _unwrap(exc)
            if has_started or not isinstance(cause, ConureError | EngineStartError | OSError):
                raise
            raise ServeError(" ".join(str(cause).split())) from exc
        finally:
            collecting.cancel()
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self._draining is not None:
            logger.warning("second signal: exiting immediately")
            os._exit(128 + number)
        loop = asyncio.get_running_loop()
        self._draining = loop.create_task(self._drain())
        loop.call_later(self._config.drain_s + EXIT_S, _exit_by_force)

    async def _drain(self) -> None:
        if not self._server.started:
            assert self._main is not None
            self._main.cancel()
            return
        try:
            await drain(self._app, timeout_s=self._config.drain_s)
        finally:
            self._server.should_exit = True

    async def _announce(self) -> None:
        host, port = self._listener.getsockname()[:2]
        url = f"http://{address(host, port)}"
        service: Service = self._app.state.service
        num_programs = service.activity(tenant=TENANT).num_programs
        engines = await service.engines()
        sys.stdout.write(banner(url, service.models(), engines, self._config, num_programs))
        sys.stdout.flush()


def _uvicorn_config(app: Litestar, config: Config) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=partial(  # type: ignore[arg-type]  # uvicorn calls it as a class
            BoundedHttpProtocol, limits=ConnectionLimits(max_connections())
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=2048,
        # Longer than pooled clients keep idle connections.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(CLOSE_S),
    )


def banner(
    url: str,
    models: Sequence[ModelInfo],
    engines: Sequence[EngineInfo],
    config: Config,
    num_programs: int,
) -> str:
    """Return what `conure serve` prints when it is ready. The first line contains the URL.

    Args:
        url: address of the server.
        models: that programs can name.
        engines: that answer.
        config: configuration of the server.
        num_programs: programs in the journal that have not ended.
    """
    rows = []
    for model in models:
        rows.append(("model", describe(model)))
        if model.notice:
            rows.append(("", model.notice))
    for engine in engines:
        num_blocks = engine.report.num_blocks
        rows.append((engine.id, f"{num_blocks:,} blocks of KV cache"))
    rows.append(("data", str(config.data)))
    if num_programs:
        ending = " continues" if num_programs == 1 else "s continue"
        rows.append(("", f"{num_programs:,} unfinished program{ending}"))
    is_default = url == f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
    command = "conure run --example" + ("" if is_default else f" --url {url}")
    rows.append(("next", f"{command}, or open {url} in a browser"))
    rows.append(("", f"OpenAI clients: base_url={url}/v1"))
    lines = [
        f"conure {__version__} listens on {url}",
        *(f"  {name:<9} {text}" for name, text in rows),
    ]
    return "\n".join(lines) + "\n"


def describe(model: ModelInfo) -> str:
    """Return a one-line description of a model."""
    described = f" ({model.description})" if model.description else ""
    return f"{model.id}{described}, {model.context_len:,} tokens of context"


def _unwrap(error: BaseException) -> BaseException:
    """Unwrap exception groups of one: Litestar starts everything in a task group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _exit_by_force() -> None:
    logger.error(
        "the server did not stop in time; exiting. All accepted programs are in the journal"
    )
    os._exit(0)
