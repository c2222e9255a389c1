"""Is the server alive, can it run programs, and where are its pages.

`/healthz` answers as long as the process can answer at all; `/readyz` asks the store and
the engines. Refuses to know why something is not ready: the service says it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, get
from msgspec import Struct

from ..program.errors import UnavailableError
from ..service import EngineInfo
from .connection import draining_error, draining_of, service_of
from .document import problems


class Health(Struct, frozen=True, kw_only=True):
    """The answer of a probe."""

    status: str


class Welcome(Struct, frozen=True, kw_only=True):
    """What stands behind this address."""

    name: str
    version: str
    documentation: str
    health: str
    ready: str


class EngineState(Struct, frozen=True, kw_only=True):
    """One engine."""

    id: str
    epoch: int
    """Which of its lives this is."""
    model: str
    counters: dict[str, int]
    """Blocks free, held and cached, and tokens by what became of them; names as in the engine."""


class EngineList(Struct, frozen=True, kw_only=True):
    """All engines that are alive."""

    engines: list[EngineState]


@get("/healthz", tags=["server"])
async def read_health() -> Health:
    """The process is alive."""
    return Health(status="ok")


@get("/readyz", responses=problems(503), tags=["server"])
async def read_readiness(request: Request[Any, Any, Any]) -> Health:
    """The store can be written and the engines answer; else 503 with the reasons."""
    if draining_of(request).is_set():
        raise draining_error()
    readiness = await service_of(request).ready()
    if not readiness.is_ready:
        reasons = "; ".join(readiness.reasons) or "the server cannot run programs"
        raise UnavailableError("server.not_ready", reasons, retry_after_s=1)
    return Health(status="ready")


@get("/", tags=["server"])
async def read_root(request: Request[Any, Any, Any]) -> Welcome:
    """Name, version and pages of this server."""
    return Welcome(
        name="conure",
        version=request.app.state.version,
        documentation="/schema/openapi.json",
        health="/healthz",
        ready="/readyz",
    )


@get("/v1/engines", responses=problems(), tags=["server"])
async def list_engines(request: Request[Any, Any, Any]) -> EngineList:
    """What every engine holds and has computed, by its own counters."""
    return EngineList(engines=[_state(info) for info in await service_of(request).engines()])


def _state(info: EngineInfo) -> EngineState:
    # On the engine's wire a report is an array; here its numbers have names.
    counters = msgspec.structs.asdict(info.report)
    del counters["nonce"]
    return EngineState(id=info.id, epoch=info.epoch, model=info.model, counters=counters)


ROUTES = (read_health, read_readiness, read_root, list_engines)
