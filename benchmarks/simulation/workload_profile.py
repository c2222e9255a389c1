"""A program reduced to what its calls cost: lengths, prefixes and priorities, without text.

A profile is built once from a program and shared by all its runs. Text is not tokenised: a table
defines the number of tokens of each segment, and `max_tokens` the length of each output.

Out of scope: time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET

from conure.server.program.graph.critical_path import get_latest_starts, get_remaining
from conure.server.program.graph.graph import Graph, Slot
from conure.server.program.graph.objectives import PerformanceObjective, get_perf_objective
from conure.server.program.ir import GenerateNode, Objective, Program, Segment
from conure.server.program.prompt_prefix import prefixes
from conure.server.runtime.calls.outputs import output_specs
from conure.server.runtime.calls.remaining_work import CallSize
from conure.server.scheduling.service_time import ServiceTimeEstimator


class Boundary(NamedTuple):
    """The end of a segment."""

    digest: bytes
    num_tokens: int
    """Tokens from the start of the prompt."""
    is_constant: bool


class CallShape(NamedTuple):
    """Lengths, boundaries and priority of one call."""

    num_prompt: int
    num_output: int
    boundaries: tuple[Boundary, ...]
    """Ends of the segments of the prompt, and of the output."""
    performance: PerformanceObjective
    priority: int
    latest_start_s: float | None
    """Latest start that meets every deadline that depends on the call, in seconds after the
    program starts; None without a deadline."""
    size: CallSize
    """Lengths for the engine time of the program's remaining calls; a character is a token."""
    num_remaining_steps: int
    """Decode steps from the start of the call to the end of the program."""


class WorkloadProfile(NamedTuple):
    """A program that can be run any number of times."""

    graph: Graph
    calls: dict[str, CallShape]
    total_s: float
    """Duration on idle engines, by the scheduler's initial averages."""

    @classmethod
    def of(
        cls,
        program: Program,
        lengths: Mapping[str, int],
        objectives: Mapping[str, Objective] | None = None,
    ) -> WorkloadProfile:
        """Analyse a program.

        Args:
            program: its calls have one output each, at the end of a `prompt`, of exactly
                `max_tokens`; inputs of prompts are variables.
            lengths: number of tokens of every text and input variable.
            objectives: objectives of its outputs.
        """
        graph = Graph.build(
            program, dict.fromkeys(program.variables, ""), objectives=dict(objectives or {})
        )
        known = dict(lengths)
        for node in graph.nodes.values():
            if isinstance(node, GenerateNode):
                known |= {t.variable: t.sampling.max_tokens or 0 for t in output_specs(node)}
        performances = get_perf_objective(graph)
        calls = {
            node.id: _shape(node, known, performances[node.id])
            for node in graph.nodes.values()
            if isinstance(node, GenerateNode)
        }
        pace = ServiceTimeEstimator()

        def seconds(slot: Slot) -> float:
            call = calls.get(slot.node)
            return 0.0 if call is None else pace.estimate_s(call.num_prompt, call.num_output)

        latest_starts = get_latest_starts(graph, seconds)
        calls = {
            name: call._replace(latest_start_s=latest_starts.get(name))
            for name, call in calls.items()
        }
        num_steps = get_remaining(
            graph, lambda slot: calls[slot.node].num_output if slot.node in calls else 0.0
        )
        if len(calls) > 1:
            calls = {
                name: call._replace(num_remaining_steps=round(num_steps[name]))
                for name, call in calls.items()
            }
        total_s = max(get_remaining(graph, seconds).values(), default=0.0)
        return cls(graph, calls, total_s)


def _shape(
    node: GenerateNode, lengths: Mapping[str, int], performance: PerformanceObjective
) -> CallShape:
    assert node.prompt is not UNSET, "calls of a simulation have a prompt"
    ends, total = [], 0
    for segment in node.prompt:
        for name in (segment.text, segment.input, segment.output):
            if isinstance(name, str):
                total += lengths[name]
        ends.append(total)
    (target,) = output_specs(node)
    known = prefixes(node)
    boundaries = tuple(map(Boundary, known.hashes, ends, known.constants))
    num_output = lengths[target.variable]
    size = _size(node.prompt, lengths, num_output)
    return CallShape(
        total - num_output, num_output, boundaries, performance, node.priority, None, size, 0
    )


def _size(prompt: Sequence[Segment], lengths: Mapping[str, int], num_output: int) -> CallSize:
    """Return the lengths of a call as `RemainingWork` counts them: a text is named by itself."""
    texts = [segment.text for segment in prompt if isinstance(segment.text, str)]
    num_chars = sum(lengths[text] for text in texts)
    num_tokens = sum(lengths[each.input] for each in prompt if isinstance(each.input, str))
    head = prompt[0].text if isinstance(prompt[0].text, str) else ""
    num_head_chars = lengths[head] if head else 0
    return CallSize(head, num_head_chars, num_chars - num_head_chars, num_tokens, num_output)
