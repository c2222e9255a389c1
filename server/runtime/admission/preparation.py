"""Completes submissions before they are checked: procedure calls, and defaults of inputs.

The journal stores the completed submission, so that a restart need not complete it again.

Invariant: a prepared submission has the same meaning as the original one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from ...program.errors import ProgramError
from ...program.graph.graph import Graph
from ...program.ir import Append, Json, Program, Submission, Variable
from ...program.nodes import Node
from ...program.nodes.bodies import walk
from .procedure_library import ProcedureLibrary


class Prepared(NamedTuple):
    """A completed submission and its JSON."""

    submission: Submission
    body: bytes


class PreparedAppend(NamedTuple):
    """A completed append and its JSON."""

    append: Append
    body: bytes


async def expand_program(program: Program, tenant: str, library: ProcedureLibrary) -> Program:
    """Return a program with its procedure calls expanded.

    Raises:
        NotFoundError, ProgramError: as `ProcedureLibrary.expand`.
    """
    expanded = await library.expand(tenant, program.nodes, "program.nodes")
    if expanded.nodes == program.nodes:
        return program
    _check_names(expanded.variables, program.variables, "program.variables")
    return msgspec.structs.replace(
        program,
        nodes=expanded.nodes,
        variables=program.variables | expanded.variables,
        jobs=program.jobs | expanded.jobs,
    )


async def prepare(
    submission: Submission, body: bytes, tenant: str, library: ProcedureLibrary | None
) -> Prepared:
    """Return a submission with all defaults and procedures; `body` is its JSON.

    Without a library the procedure calls are expanded already.

    Raises:
        NotFoundError, ProgramError: as `ProcedureLibrary.expand`.
    """
    program = submission.program
    if library is not None:
        program = await expand_program(program, tenant, library)
    inputs = _with_defaults(program.variables, program.nodes, submission.inputs)
    if inputs == submission.inputs and program is submission.program:
        return Prepared(submission, body)
    completed = msgspec.structs.replace(submission, inputs=inputs, program=program)
    return Prepared(completed, msgspec.json.encode(completed))


async def prepare_append(
    append: Append, body: bytes, tenant: str, library: ProcedureLibrary, graph: Graph
) -> PreparedAppend:
    """Add defaults and expanded procedures to an append.

    Args:
        append: The append.
        body: Its JSON.
        tenant: The owner of the program.
        library: The procedures.
        graph: The graph of the program. If a variable already has a value there or is written by a
            node, its default does not count.

    Raises:
        NotFoundError, ProgramError: as `ProcedureLibrary.expand`; `program.unsupported` for a
            procedure with jobs, which an append cannot declare.
    """
    expanded = await library.expand(tenant, append.nodes, "nodes")
    if expanded.jobs:
        raise ProgramError(
            "program.unsupported",
            "a procedure with jobs cannot be called in an append: submit it with the program",
            path="nodes",
        )
    _check_names(expanded.variables, append.variables, "variables")
    variables = append.variables | expanded.variables
    new = variables
    if repeated := variables.keys() & graph.variables.keys():
        new = variables.copy()
        for name in repeated - (graph.inputs - graph.provided_inputs):
            del new[name]
    inputs = _with_defaults(new, expanded.nodes, append.inputs)
    if inputs == append.inputs and expanded.nodes == append.nodes:
        return PreparedAppend(append, body)
    completed = msgspec.structs.replace(
        append, inputs=inputs, nodes=expanded.nodes, variables=variables
    )
    return PreparedAppend(completed, msgspec.json.encode(completed))


def _check_names(new: Mapping[str, Variable], own: Mapping[str, Variable], path: str) -> None:
    """Check that the variables of expanded calls are not declared by the program itself."""
    for name in new.keys() & own.keys():
        raise ProgramError(
            "program.variable",
            f"variable `{name}` has the name of a variable in a procedure call: rename it",
            path=f"{path}.{name}",
        )


def _with_defaults(
    variables: Mapping[str, Variable], nodes: Sequence[Node], inputs: Mapping[str, Json]
) -> dict[str, Json]:
    """Return the inputs, with the defaults of other variables that no node writes."""
    defaults = {
        name: variable.default
        for name, variable in variables.items()
        if variable.default is not UNSET and name not in inputs
    }
    if not defaults:
        return dict(inputs)
    written = {name for _, node in walk(nodes, "") for name in node.defined_variables()}
    return {
        **inputs,
        **{name: default for name, default in defaults.items() if name not in written},
    }
