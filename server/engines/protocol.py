"""The interface of an engine, as the runtime, the scheduler and the routes use it.

`EngineConnection` implements it for engine processes of this server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from conure.engine import protocol

from .step_costs import StepCostMeter

Listener: TypeAlias = Callable[[protocol.Report], None]
"""Receives the reports on one context."""
EMBEDDINGS_OWNER: Final = ""
"""Owner of the contexts of embeddings, which belong to no program."""


class Engine(Protocol):
    """One engine in one epoch."""

    on_steps: Callable[[], None] | None
    """Called after the reports of one or several steps were delivered."""

    @property
    def name(self) -> str:
        """Unique within the server; the same in all epochs."""
        ...

    @property
    def epoch(self) -> int:
        """Higher than the epoch of any earlier engine."""
        ...

    @property
    def hello(self) -> protocol.Hello:
        """The engine's model, tokenizer, limits and capabilities."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether commands still reach the engine."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps that the engine has run, as last reported."""
        ...

    @property
    def cost_meter(self) -> StepCostMeter:
        """Measures what a step costs."""
        ...

    @property
    def num_available(self) -> int:
        """Blocks that no context refers to and no command in flight will use."""
        ...

    def take_lowest_available(self) -> int:
        """Return the least `num_available` since the last call of this method."""
        ...

    @property
    def is_memory_constrained(self) -> bool:
        """Whether the engine may have to evict soon."""
        ...

    @property
    def answered_at(self) -> float:
        """`time.monotonic()` of the last reply."""
        ...

    def new_context(self, listener: Listener, owner: str) -> int:
        """Allocate a context id; `listener` receives its reports, `owner` names its program."""
        ...

    @property
    def num_contexts_by_owner(self) -> Counter[str]:
        """Contexts that each owner has allocated and not freed."""
        ...

    def send(self, *commands: protocol.Command) -> None:
        """Send commands in order. On a lost engine this does nothing."""
        ...

    def free(self, context: int, num_cached: int = 0, num_expected: int = 0) -> None:
        """Free a context and remove its listener.

        Args:
            context: the context.
            num_cached: leading tokens that stay as cache, which is evicted when memory is needed.
            num_expected: leading tokens that later calls are expected to read; they are evicted
                after all others.
        """
        ...

    def abort(self, context: int, on_aborted: Callable[[protocol.Aborted | None], None]) -> None:
        """Stop what runs on a context and free it; its listener gets no more reports.

        Args:
            context: the context.
            on_aborted: called once, with the engine's answer, or with None if the engine is lost.
        """
        ...

    async def status(self) -> protocol.StatusReport:
        """Ask how much of the engine's memory is in use.

        Raises:
            ConnectionError: if the engine is lost before it answers.
        """
        ...

    async def embed(self, tokens: list[int], rank: float) -> protocol.Embedded | protocol.Failed:
        """Return the mean of the last hidden states over `tokens`, computed in a separate context.

        Raises:
            ConnectionError: if the engine is lost before it answers.
        """
        ...

    async def validate_constraint(
        self, constraint: str, text: str | None = None
    ) -> protocol.Checked:
        """Ask whether a constraint can be enforced, and whether a text satisfies it.

        Raises:
            ConnectionError: if the engine is lost before it answers.
        """
        ...
