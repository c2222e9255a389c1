"""A program reduced to what its calls cost: lengths, prefixes and worth, but no text.

Made once from a program of the ordinary language and shared by all its runs. Text that it
contains is not tokenised: a table says how many tokens each segment stands for, as do the
longest outputs for what calls write.

Knows the graph and its analysis. Refuses to know time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import UNSET

from ..program.critical_path import get_remaining
from ..program.graph import Graph, Slot
from ..program.ir import Generate, Objective, Program
from ..program.objective import Performance, get_perf_objective
from ..program.rope import prefixes
from ..runs.output import targets
from ..scheduling.pace import Pace


class Boundary(NamedTuple):
    """The end of a segment."""

    digest: bytes
    num_tokens: int
    """From the start of the prompt."""
    is_constant: bool


class CallShape(NamedTuple):
    """What one call costs."""

    num_prompt: int
    num_output: int
    boundaries: tuple[Boundary, ...]
    """Of the segments of its prompt, and last of its output."""
    performance: Performance
    priority: int


class Blueprint(NamedTuple):
    """A program, ready to be run any number of times."""

    graph: Graph
    calls: dict[str, CallShape]
    total_s: float
    """How long it takes alone, at the pace that a scheduler begins with."""

    @classmethod
    def of(
        cls,
        program: Program,
        lengths: Mapping[str, int],
        objectives: Mapping[str, Objective] | None = None,
    ) -> Blueprint:
        """Analyse a program.

        Args:
            program: its calls have one output each, at the end of a `prompt`, of exactly
                `max_tokens`; inputs of prompts are variables.
            lengths: tokens of every text and of every input variable.
            objectives: what its outputs are worth.
        """
        graph = Graph.build(
            program, dict.fromkeys(program.variables, ""), objectives=dict(objectives or {})
        )
        known = dict(lengths)
        for node in graph.nodes.values():
            if isinstance(node, Generate):
                known |= {t.variable: t.sampling.max_tokens or 0 for t in targets(node)}
        worth = get_perf_objective(graph)
        calls = {
            node.id: _shape(node, known, worth[node.id])
            for node in graph.nodes.values()
            if isinstance(node, Generate)
        }
        pace = Pace()

        def seconds(slot: Slot) -> float:
            call = calls.get(slot.node)
            return 0.0 if call is None else pace.estimate_s(call.num_prompt, call.num_output)

        total_s = max(get_remaining(graph, seconds).values(), default=0.0)
        return cls(graph, calls, total_s)


def _shape(node: Generate, lengths: Mapping[str, int], performance: Performance) -> CallShape:
    assert node.prompt is not UNSET, "calls of a simulation have a prompt"
    ends, total = [], 0
    for segment in node.prompt:
        for name in (segment.text, segment.input, segment.output):
            if isinstance(name, str):
                total += lengths[name]
        ends.append(total)
    (target,) = targets(node)
    known = prefixes(node)
    boundaries = tuple(map(Boundary, known.hashes, ends, known.constants))
    num_output = lengths[target.variable]
    return CallShape(total - num_output, num_output, boundaries, performance, node.priority)
