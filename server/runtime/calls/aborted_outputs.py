"""Outputs that the server aborted.

Counts the tokens that engines decoded for them, and limits how long a receipt waits for the counts.
An engine stops an output between two steps, so it decodes tokens after the decision of the server.
Its answer contains the whole count. The receipt of a program is made after the last answer, or
after `MAX_ANSWER_S` if an engine is in a very long step.

Invariant: every abort is settled once, by the answer of its engine or by the loss of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from conure.engine import protocol

from ...engines.protocol import Engine
from ..node_state import NodeUsage

MAX_ANSWER_S = 1.0
"""How long a receipt waits for the answers: a few long steps."""


class AbortedOutputs:
    """The aborted outputs of one program."""

    def __init__(self) -> None:
        self._num_open = 0
        self._then: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def abort(self, engine: Engine, context: int, usage: NodeUsage, num_received: int) -> None:
        """Abort what runs on a context and free it.

        Args:
            engine: the engine of the context.
            context: its id.
            usage: usage of the node, which gets the tokens that the server has not received.
            num_received: tokens of the output that the usage already contains as discarded.
        """
        self._num_open += 1

        def on_aborted(answer: protocol.Aborted | None) -> None:
            if answer is not None:
                num_late = max(0, answer.num_decoded + answer.num_forced - num_received)
                usage.decoded += num_late
                usage.discarded += num_late
            self._num_open -= 1
            self._settle()

        engine.abort(context, on_aborted)

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call `then` once no abort is open: now, with the last answer, or after the limit."""
        self._then = then
        self._settle()
        if self._then is not None:
            self._timer = asyncio.get_running_loop().call_later(MAX_ANSWER_S, self._call)

    def drop_callback(self) -> None:
        """Drop the callback of `when_settled`."""
        self._then = None
        if self._timer is not None:
            self._timer.cancel()

    def _settle(self) -> None:
        if not self._num_open and self._then is not None:
            self._call()

    def _call(self) -> None:
        then = self._then
        self.drop_callback()
        if then is not None:
            then()
