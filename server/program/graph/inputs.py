"""The inputs that a graph needs before all of its nodes can run."""

from __future__ import annotations

from msgspec import UNSET

from ..checks import listed
from ..errors import ProgramError
from .graph import Graph

MAX_NAMED = 5
"""Inputs that an error names."""


def read_inputs(graph: Graph) -> set[str]:
    """Return the inputs that a node reads or may read, or that are outputs."""
    return {
        name
        for name in graph.inputs
        if graph.get_consumers(name) or graph.get_potential_readers(name) or name in graph.outputs
    }


def missing_inputs(graph: Graph) -> list[str]:
    """Return the inputs that are read and have neither a value nor a default, sorted."""
    return sorted(
        name
        for name in read_inputs(graph) - graph.provided_inputs
        if graph.variables[name].default is UNSET
    )


def check_inputs(graph: Graph) -> None:
    """Check that no input is missing.

    Raises:
        ProgramError: `program.missing_input`, with the names of the inputs.
    """
    if missing := missing_inputs(graph):
        more = f" and {len(missing) - MAX_NAMED:,} others" if len(missing) > MAX_NAMED else ""
        raise ProgramError(
            "program.missing_input",
            f"no value for input {listed(missing[:MAX_NAMED])}{more}: give it in `inputs`",
            path=f"inputs.{missing[0]}",
        )
