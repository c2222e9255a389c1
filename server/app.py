"""The HTTP application: routes, error handlers and the lifespan of the service.

Out of scope: the endpoints (`routes`) and the execution of programs (`service.Service`).

Invariants: importing this module loads neither an engine nor the executor; the service starts and
stops with the application, whichever ASGI server runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.types import ControllerRouterHandler

from conure import __version__

from .config import Config
from .dashboard.files import load_files
from .routes import dashboard, grammar, health, openai, openapi_document, parrot, tokenize, usage
from .routes.methods import MethodsApp
from .routes.middleware import (
    BodyMemoryMiddleware,
    LoopbackOnlyMiddleware,
    ResponseMemoryMiddleware,
    add_request_id,
)
from .routes.problem import problem_response
from .routes.programs import events, explain, procedures, programs, traces
from .routes.programs import functions as function_routes
from .service import Service


def create_app(
    config: Config,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    service: Service | None = None,
) -> Litestar:
    """Create the application.

    Args:
        config: settings of this process.
        functions: functions that `call` nodes may name.
        service: runs programs; None creates an executor with `functions`.
    """
    if service is None:
        service = _executor(config, functions or {})
    state = State()
    state.service = service
    state.draining = asyncio.Event()
    state.version = __version__
    state.dashboard = load_files()
    state.session_idle_s = config.session_idle_s
    state.decoding_threads = ThreadPoolExecutor(1, thread_name_prefix="decode")
    state.requests = requests = usage.RequestMetricsMiddleware(state.version)
    state.openapi = openapi_document.OpenApiDocument(state.version, _routes, _BODIES)
    return MethodsApp(
        route_handlers=[*_routes(), *openapi_document.ROUTES],
        lifespan=[_lifespan(service)],
        state=state,
        middleware=[
            requests,
            LoopbackOnlyMiddleware(),
            ResponseMemoryMiddleware(),
            BodyMemoryMiddleware(config.max_body),
        ],
        before_send=[add_request_id],
        exception_handlers={Exception: problem_response},
        request_max_body_size=config.max_body,
        openapi_config=None,  # `openapi_document` serves the document
        logging_config=None,
        debug=False,
    )


async def drain(app: Litestar, *, timeout_s: float) -> None:
    """End the application's work: no new programs, then no waits.

    Running calls get `timeout_s` seconds to end. Requests that still wait then fail with
    `server.draining`.
    """
    service: Service = app.state.service
    try:
        async with asyncio.timeout(timeout_s):
            await service.drain()
    except TimeoutError:
        pass
    finally:
        app.state.draining.set()


_BODIES = (
    *programs.BODIES,
    *procedures.BODIES,
    *parrot.BODIES,
    *openai.BODIES,
    *grammar.BODIES,
    *tokenize.BODIES,
)
"""The structs of all request bodies."""


def _routes() -> list[ControllerRouterHandler]:
    own = (
        *programs.ROUTES,
        *explain.ROUTES,
        *procedures.ROUTES,
        *events.ROUTES,
        *traces.ROUTES,
        *parrot.PAPER_ROUTES,
        *grammar.ROUTES,
        *function_routes.ROUTES,
        *tokenize.ROUTES,
        *usage.ROUTES,
        *health.ROUTES,
        *dashboard.ROUTES,
    )
    compatible = Router(
        "/",
        route_handlers=list(openai.ROUTES),
        exception_handlers={Exception: openai.error_response},
    )
    parrot_client = Router(
        "/",
        route_handlers=list(parrot.CLIENT_ROUTES),
        exception_handlers={Exception: parrot.error_response},
    )
    return [*own, compatible, parrot_client]


def _lifespan(service: Service) -> Callable[[Litestar], Any]:
    @asynccontextmanager
    async def life(app: Litestar) -> AsyncGenerator[None, None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()
            app.state.decoding_threads.shutdown(wait=False)

    return life


def _executor(config: Config, functions: Mapping[str, Callable[..., Any]]) -> Service:
    # Loaded on demand: an app with its own service needs no journal and no engine.
    from .executor import Executor

    executor: Service = Executor(config, functions=functions)
    return executor
