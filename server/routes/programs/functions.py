"""The endpoint that lists the functions of the server."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from msgspec import Struct

from ...program.functions import FunctionSignature
from ..openapi import error_responses
from ..request_context import service_of


class FunctionList(Struct, frozen=True):
    """The functions that `call` nodes may name."""

    functions: list[FunctionSignature]


@get("/v1/functions", responses=error_responses(), tags=["programs"])
async def list_functions(request: Request[Any, Any, Any]) -> FunctionList:
    """List the functions that `call` nodes may name, with parameters and limits."""
    return FunctionList(service_of(request).functions())


ROUTES = (list_functions,)
