"""Waiting for the value of a variable without a time limit."""

from __future__ import annotations

import asyncio

from ...program.errors import RunError
from ...program.ir import Objective
from ...program.status import ENDED, VariableStatus
from ...service import Service
from ..problem import MissingValueError
from .programs import MAX_WAIT_S


async def wait_for(
    service: Service,
    program: str,
    variable: str,
    *,
    tenant: str,
    objective: Objective | None = None,
) -> VariableStatus:
    """Wait for a variable without a time limit.

    Raises:
        MissingValueError: if the variable ended without a value.
        RunError: if its program ended before the variable got a value.
    """
    loop = asyncio.get_running_loop()
    while True:
        asked_at = loop.time()
        status = await service.get(
            program, variable, tenant=tenant, wait_s=MAX_WAIT_S, objective=objective
        )
        if status.status == "done":
            return status
        if status.status in ENDED:
            raise MissingValueError(status)
        if loop.time() - asked_at < MAX_WAIT_S / 2:
            # The service returned early because there will be no value: a retry would spin.
            raise RunError(
                "variable.no_value", f"the program ended without a value for {variable!r}"
            )
