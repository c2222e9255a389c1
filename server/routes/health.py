"""Health and readiness probes, the list of engines and their activity.

`/healthz` responds as long as the process can respond at all; `/readyz` checks the store and the
engines through the service.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, get
from msgspec import Struct

from ..program.errors import UnavailableError
from ..runtime.reporting.activity import ServerActivity
from ..service import EngineInfo
from .openapi import error_responses
from .request_context import draining_error, draining_of, service_of, tenant_of


class Health(Struct, frozen=True, kw_only=True):
    """The result of a probe."""

    status: str


class EngineState(Struct, frozen=True, kw_only=True):
    """The state of one engine."""

    id: str
    epoch: int
    """Generation of the engine process. It increases with every restart."""
    model: str
    counters: dict[str, int]
    """Blocks free, held and cached, and token counts by origin."""


class EngineList(Struct, frozen=True, kw_only=True):
    """All live engines."""

    engines: list[EngineState]


@get("/healthz", tags=["server"])
async def read_health() -> Health:
    """Return 200 as long as the process is alive."""
    return Health(status="ok")


@get("/readyz", responses=error_responses(503), tags=["server"])
async def read_readiness(request: Request[Any, Any, Any]) -> Health:
    """Return 200 if the store is writable and the engines respond; otherwise 503 with the
    reasons.
    """
    if draining_of(request).is_set():
        raise draining_error()
    readiness = await service_of(request).ready()
    if not readiness.is_ready:
        reasons = "; ".join(readiness.reasons) or "the server cannot run programs"
        raise UnavailableError("server.not_ready", reasons, retry_after_s=1)
    return Health(status="ready")


@get("/v1/engines", responses=error_responses(), tags=["server"])
async def list_engines(request: Request[Any, Any, Any]) -> EngineList:
    """List the live engines with their memory and token counters."""
    return EngineList(engines=[_state(info) for info in await service_of(request).engines()])


@get("/v1/activity", responses=error_responses(), tags=["server"])
async def read_activity(request: Request[Any, Any, Any]) -> ServerActivity:
    """Return what the engines hold, for which programs, and which calls wait.

    Lists are bounded; next to each list is the number of all its entries.
    """
    return service_of(request).activity(tenant=tenant_of(request))


def _state(info: EngineInfo) -> EngineState:
    # In the engine protocol a report is an array; in JSON its numbers have names.
    counters = msgspec.structs.asdict(info.report)
    del counters["nonce"]
    return EngineState(id=info.id, epoch=info.epoch, model=info.model, counters=counters)


ROUTES = (read_health, read_readiness, list_engines, read_activity)
