"""Whether a program can run here at all, found out before anything of it is accepted.

Checks what the graph cannot know: models, functions, and prompts that are too long for the
model although every input is there already. Prompts that are surely short are not encoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from ..engines.grammars import Grammars
from ..program.control import walk
from ..program.errors import ExpressionError, ProgramError, PromptError
from ..program.graph import Graph
from ..program.ir import AnyNode, Append, Call, Generate, Json, Limits, Round, Submission, Variable
from ..prompts.model import Model, outputs_of
from ..prompts.prompt import render_chat, render_slot
from .output import targets

TURN_BYTES = 64
"""More than any chat template writes around one message, in tokens."""


def num_calls(graph: Graph) -> int:
    """LLM calls of a program."""
    return sum(isinstance(node, Generate) for node in graph.nodes.values())


def check_options(submission: Submission, policy: str) -> None:
    """Refuse what a submission asks for and this server would silently not do.

    Args:
        submission: what came.
        policy: the scheduler's. All programs wait in one queue, so a program cannot bring its
            own; it can insist on one.

    Raises:
        ProgramError: `program.unsupported` or `policy.not_served`, with the path of the field.
    """
    options, program = submission.options, submission.program
    if options.policy not in (None, policy):
        raise ProgramError(
            "policy.not_served",
            f"this server schedules by `{policy}`, not by `{options.policy}`; leave it out, or "
            "start a server with that --policy",
            path="options.policy",
        )
    for path, is_left_out in (
        ("options.tokens", options.tokens == "canonical"),
        ("program.limits", program.limits == Limits()),
    ):
        if not is_left_out:
            raise _unsupported(path)
    check_variables(program.variables, "program.variables")


def check_variables(variables: Mapping[str, Variable], root: str) -> None:
    """Refuse declarations that nothing here would hold values to.

    Raises:
        ProgramError: `program.unsupported`, with the path of the field.
    """
    for name, variable in variables.items():
        if variable.schema is not None:
            raise _unsupported(f"{root}.{name}.schema")


def _unsupported(path: str) -> ProgramError:
    return ProgramError(
        "program.unsupported", f"`{path}` is not supported yet; leave it out", path=path
    )


async def check_program(
    graph: Graph,
    inputs: Mapping[str, Json],
    model: Model,
    functions: Mapping[str, Callable[..., Any]],
    grammars: Grammars,
    *,
    append: Append | None = None,
) -> None:
    """Refuse what cannot run.

    Raises:
        ProgramError: `model.unknown`, `engine.unsupported_*`, `call.unknown_function`, and
            `constraint.*` for a constraint that cannot be kept.
        PromptError: `prompt.too_long`, for a call whose inputs are all there.
    """
    nodes: list[AnyNode]
    if append is None:
        root = "program.nodes"
        sent = (node for node in graph.nodes.values() if graph.place(node.id) is None)
        nodes = [node for node in sent if not isinstance(node, Round)]
    else:
        root, nodes = "nodes", append.nodes
    values = inputs if append is None else append.inputs
    suspects: list[tuple[str, Generate]] = []
    constraints: list[tuple[str, str]] = []
    for path, node in walk(nodes, root):
        if isinstance(node, Generate):
            model.check(node, path)
            constraints += _grammars(node, path, model)
            slots = graph.slots.get(node.id)
            reads = slots[0].reads if slots else frozenset()
            if (
                append is None
                and slots is not None
                and node.when is UNSET  # decided when it runs
                and graph.place(node.id) is None
                and reads <= values.keys()
                and _may_be_long(node, reads, values, model)
            ):
                suspects.append((path, node))
        elif isinstance(node, Call) and node.function not in functions:
            known = ", ".join(sorted(functions)) or "none"
            raise ProgramError(
                "call.unknown_function",
                f"no function {node.function} is registered on this server (there are: {known})",
                path=f"{path}.function",
            )
    await grammars.vet(constraints)
    if suspects:
        await asyncio.to_thread(_check_lengths, suspects, values, model)


def _grammars(node: Generate, path: str, model: Model) -> list[tuple[str, str]]:
    """What the outputs of a node are held to, each with the path of the field that says so."""
    found = []
    for (where, _), target in zip(
        outputs_of(node, path), targets(node, model.tool_format), strict=True
    ):
        if (grammar := target.grammar) is not None:
            is_of_tools = target.tools is not None and target.constraint is None
            found.append((f"{path}.tools" if is_of_tools else f"{where}.constraint", grammar))
    return found


def _may_be_long(
    node: Generate, reads: frozenset[str], values: Mapping[str, Json], model: Model
) -> bool:
    """A token stands for at least one byte, so few bytes are few tokens."""
    size = len(msgspec.json.encode(node)) + TURN_BYTES * (1 + len(node.messages or []))
    for name in reads:
        value = values[name]
        size += 4 * len(value) if isinstance(value, str) else len(msgspec.json.encode(value))
        if isinstance(value, list):
            size += TURN_BYTES * len(value)
    return size + (targets(node)[0].sampling.max_tokens or 1) > model.max_len


def _check_lengths(
    suspects: list[tuple[str, Generate]], values: Mapping[str, Json], model: Model
) -> None:
    for path, node in suspects:
        is_prompt = isinstance(node.prompt, list)
        try:
            rendered = (
                render_slot(node, 0, values)
                if is_prompt
                else render_chat(node, values, model.template)
            )
            encoded = model.tokenizer.encode(rendered.pieces, bos=is_prompt)
        except (PromptError, ExpressionError):
            continue  # its run says so, whether or not the prompt is long
        try:
            sampling = targets(node)[0].sampling
            model.output_budget(len(encoded.ids), sampling.max_tokens, f"node {node.id}")
        except PromptError as error:
            raise PromptError(error.code, error.message, path=path) from error
