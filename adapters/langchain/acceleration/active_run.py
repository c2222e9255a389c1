"""The active run of an accelerated chain.

Read by the chat model, whose calls it answers, and by the probes inside the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...speculation.active_run import ActiveRunVar
from .chain_run import ChainRun
from .plan import ChainPlan


@dataclass(frozen=True, slots=True)
class ActiveRun:
    """A run of a chain, and the plan of the part of the chain that runs in this context."""

    run: ChainRun
    plan: ChainPlan


ACTIVE_RUN = ActiveRunVar[ActiveRun]("conure_accelerated")


def current_run() -> ActiveRun | None:
    """Return the active run of the caller's context; None after its end."""
    active = ACTIVE_RUN.get()
    return None if active is None or active.run.is_over else active
