"""The HTTP application: all routes, their errors, and the life of the service behind them.

Knows how the pieces are joined. Refuses to know what they do: routes live in `routes`, the
executor behind `service.Service`.

Kept true: importing this file loads neither an engine nor the executor; the service starts
and stops with the application, however the application is run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

from litestar import Litestar, Router
from litestar.datastructures import State
from litestar.types import ControllerRouterHandler

from .config import Config
from .routes import accounts, events, grammar, health, openai, paper, programs
from .routes.document import openapi_config
from .routes.gate import LocalOnly, add_request_id
from .routes.problem import answer_problem
from .service import Service


def version() -> str:
    """The version of Conure that runs."""
    try:
        return installed_version("conure")
    except PackageNotFoundError:
        return "0+source"


def create_app(
    config: Config,
    *,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    service: Service | None = None,
) -> Litestar:
    """Makes the application.

    Args:
        config: settings of this process.
        functions: what `call` nodes may name.
        service: what runs programs; None makes the executor, which `functions` go to.
    """
    if service is None:
        service = _executor(config, functions or {})
    state = State()
    state.service = service
    state.draining = asyncio.Event()
    state.version = version()
    state.requests = requests = accounts.Requests(state.version)
    bodies = (*programs.BODIES, *paper.BODIES, *openai.BODIES, *grammar.BODIES)
    return Litestar(
        route_handlers=_routes(),
        lifespan=[_life(service)],
        state=state,
        middleware=[requests, LocalOnly()],
        before_send=[add_request_id],
        exception_handlers={Exception: answer_problem},
        request_max_body_size=config.max_body,
        openapi_config=openapi_config(state.version, bodies),
        logging_config=None,
        debug=False,
    )


async def drain(app: Litestar, *, timeout_s: float) -> None:
    """Ends the application's work: no new programs, then no waiters.

    The service gets `timeout_s` seconds to let calls run to their end; whatever still
    waits for one afterwards is told `server.draining`.
    """
    service: Service = app.state.service
    try:
        async with asyncio.timeout(timeout_s):
            await service.drain()
    except TimeoutError:
        pass
    finally:
        app.state.draining.set()


def _routes() -> list[ControllerRouterHandler]:
    own = (
        *programs.ROUTES,
        *events.ROUTES,
        *paper.ROUTES,
        *grammar.ROUTES,
        *accounts.ROUTES,
        *health.ROUTES,
    )
    compatible = Router(
        "/",
        route_handlers=list(openai.ROUTES),
        exception_handlers={Exception: openai.answer_error},
    )
    return [*own, compatible]


def _life(service: Service) -> Callable[[Litestar], Any]:
    @asynccontextmanager
    async def life(_: Litestar) -> AsyncGenerator[None, None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    return life


def _executor(config: Config, functions: Mapping[str, Callable[..., Any]]) -> Service:
    # Loaded on demand: whoever brings a service of his own needs no journal and no engine.
    from .executor import Executor

    executor: Service = Executor(config, functions=functions)
    return executor
