"""Prompts that begin to be filled before they are whole, while the calls before them decode.

What stands in front of a call's first missing input is known: text of the program, values that
are there, and as much as a running call has written of the next one. It is filled into a
prefix that is held for the call (`sharing`), so that the call has the rest to fill when its last
input arrives. This is a guess about tokens, never about text: the call compares its own ids
with those that are held and forks as far as they are equal.

Knows the graph, the values that stand and texts that grow. Refuses to know queues and what
becomes of a prompt that is whole.

Kept true: only a call all of whose missing inputs are being written is begun, at a rank behind
everybody's, where blocks are free in plenty and nobody waits for an engine; one prefix is
begun once for all calls that start with it; calls that begin or end in one turn of the loop are one
look at a reader of theirs, however wide a stage is.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import UNSET

from ..engines.engine import Engine
from ..program.graph import Slot
from ..program.ir import Generate
from ..program.rope import Prefixes, boundary_reads
from ..prompts.prompt import Rendered
from ..prompts.tokenizer import Encoded
from .call import NUM_TAIL, Call
from .encoder import Work
from .execution import Execution
from .sharing import Sharing
from .world import World

MIN_CHARS: Final = 256
"""A text that grows is looked at again when it has so much more, or a quarter more."""
FREE_BLOCKS: Final = 4
"""Blocks that have to be free, or cache, for every one that is filled early."""


class EarlyFills:
    """The prompts of one program that are filled before their time."""

    def __init__(
        self,
        execution: Execution,
        world: World,
        sharing: Sharing,
        prefixes: Mapping[str, Prefixes],
        call_of: Callable[[str], Call],
    ) -> None:
        self._execution = execution
        self._world = world
        self._sharing = sharing
        self._prefixes = prefixes
        self._call_of = call_of
        self._texts: dict[str, list[str]] = {}
        self._lens: dict[str, tuple[int, int]] = {}
        """Of a text that grows: characters, and how many there were when it was looked at."""
        self._begun: set[tuple[bytes, int]] = set()
        self._new_reads: dict[str, tuple[frozenset[str], ...]] = {}
        """Of a node whose prompt was looked at: `boundary_reads`."""
        self._soon: dict[str, Engine] = {}
        """Variables to be looked at before the loop's next turn, and where they are written."""

    def writes(self, variable: str, engine: Engine) -> None:
        """A call begins to write a variable on an engine: what can be known of its readers?"""
        if self._execution.graph.get_consumers(variable):
            self._texts[variable] = []
            self._lens[variable] = (0, 0)
            self._look_soon(variable, engine)

    def grew(self, variable: str, text: str, engine: Engine) -> None:
        """More of a text that is the variable's value to be."""
        known = self._lens.get(variable)
        if known is None:
            return
        num_chars, num_seen = known[0] + len(text), known[1]
        self._texts[variable].append(text)
        if num_chars - num_seen >= max(MIN_CHARS, num_seen // 4):
            num_seen = num_chars
            if not self._world.scheduler.num_waiting:
                text = "".join(self._texts[variable])
                for slot in self._readers(variable, self._may_begin):
                    self._begin(slot, engine, variable, text)
        self._lens[variable] = (num_chars, num_seen)

    def committed(self, variable: str, engine: Engine) -> None:
        """A variable has its value: its readers may wait for others still."""
        self.forget(variable)
        self._look_soon(variable, engine)

    def forget(self, variable: str) -> None:
        """Nothing more of this text will come, or all of it again."""
        self._texts.pop(variable, None)
        self._lens.pop(variable, None)

    def stop(self) -> None:
        """Begin nothing more, whatever was about to be looked at."""
        self._soon.clear()
        self._texts.clear()
        self._lens.clear()

    # --- one reader -----------------------------------------------------------------------

    def _look_soon(self, variable: str, engine: Engine) -> None:
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._look)
        self._soon[variable] = engine

    def _look(self) -> None:
        """Look at all that read what began to be written, or was written, in this turn."""
        changed, self._soon = self._soon, {}
        readers: dict[Slot, Engine] = {}
        may_begin = functools.cache(self._may_begin)  # many variables have the same readers
        for variable, engine in changed.items():
            found = self._readers(variable, may_begin)
            readers.update(dict.fromkeys(found, engine))
            if not found:
                self.forget(variable)  # its text is of no use to anybody
        if self._world.scheduler.num_waiting:
            return  # somebody needs the engines now
        for slot, engine in readers.items():
            self._begin(slot, engine)

    def _readers(self, variable: str, may_begin: Callable[[Slot], bool]) -> list[Slot]:
        """Slots that may begin and read a variable."""
        consumers = self._execution.graph.get_consumers(variable)
        return [slot for slot in consumers if may_begin(slot)]

    def _may_begin(self, slot: Slot) -> bool:
        execution = self._execution
        state = execution.nodes[slot.node]
        node = state.node
        if slot.index or not isinstance(node, Generate) or state.started_at is not None:
            return False
        if state.has_ended or node.when is not UNSET or slot.node not in self._prefixes:
            return False
        if not execution.is_entered(slot.node):
            return False
        is_waiting = False
        for name in slot.reads:
            if not execution.is_resolved(name):
                producer = execution.graph.get_producer(name)
                if producer is None or not self._is_running(producer.node):
                    return False
                is_waiting = True
        for other in node.after:
            if not execution.nodes[other].has_ended:
                if not self._is_running(other):
                    return False
                is_waiting = True
        return is_waiting  # else it is about to be encoded itself

    def _is_running(self, node_id: str) -> bool:
        state = self._execution.nodes[node_id]
        return isinstance(state.node, Generate) and state.phase == "running"

    def _begin(
        self, slot: Slot, engine: Engine, variable: str = "", text: str | None = None
    ) -> None:
        """Fill what is known of a prompt.

        Args:
            slot: whose prompt it is.
            engine: where.
            variable: one that grows.
            text: what there is of it; None if there is nothing to go by but values.
        """
        execution = self._execution
        call = self._call_of(slot.node)
        values = {name: execution.values.get(name, "") for name in slot.reads}
        known = {name for name in slot.reads if name in execution.values}
        if text is not None:
            values[variable] = text
            known.add(variable)
        boundary, reads_growing = self._boundary(call, known, None if text is None else variable)
        if text is not None and not reads_growing:
            return  # something else is missing before it
        key = (self._prefixes[slot.node].hashes[boundary], len(text or ""))
        if boundary < 0 or key in self._begun:
            return
        self._begun.add(key)
        # What is still growing may come to be spelled otherwise at its end.
        num_unsure = 0 if text is None else NUM_TAIL

        def done(rendered: Rendered, encoded: Encoded) -> None:
            if call.is_over or call.state.started_at is not None or not engine.is_alive:
                return
            end = rendered.ends[boundary]
            if text is not None and not _text_before(rendered, end).endswith(text):
                return  # an expression makes more of it, or something else
            cut = encoded.tokens_before(end) - num_unsure
            block_size = engine.hello.limits.block_size
            if engine.num_available >= FREE_BLOCKS * (cut // block_size):
                call.fill_early(engine, encoded.ids[: max(cut, 0)], boundary)

        def broken(error: Exception) -> None:
            """The prompt cannot be made without its other values."""

        num_chars = sum(len(value) for value in values.values() if isinstance(value, str))
        self._world.encoder.submit(Work(call, 0, values, num_chars, done, broken))

    def _boundary(self, call: Call, known: set[str], growing: str | None) -> tuple[int, bool]:
        """The last boundary before which all is known (-1: none), and whether it stands behind
        the variable that grows.
        """
        new_reads = self._new_reads.get(call.node.id)
        if new_reads is None:
            new_reads = self._new_reads[call.node.id] = boundary_reads(call.node, closed=True)
        for index, reads in enumerate(new_reads):
            if not reads <= known:
                return index - 1, False
            if growing is not None and growing in reads:
                return index, True  # where it ends nobody knows, so what is behind has no place yet
        return len(new_reads) - 1, False


def _text_before(rendered: Rendered, end: int) -> str:
    return "".join(piece.text for piece in rendered.pieces)[:end]
