"""Checks whether this server can run a program, before the program is accepted.

Checks what the graph alone cannot: options, models, functions, constraints, and the length of
the prompts of a new program whose inputs are all given. Only prompts that are long by an estimate
are encoded. A prompt that exceeds the estimate, because its expressions lengthen their operands or
the chat template adds much, fails when it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from ...engines.constraint_validator import ConstraintValidator
from ...functions.registry import FunctionRegistry
from ...program.errors import ExpressionError, ProgramError, PromptError, prefixed_path
from ...program.expressions.budget import WorkBudget
from ...program.expressions.evaluate import input_expression, references
from ...program.graph.graph import Graph
from ...program.ir import (
    AnyNode,
    Append,
    CallNode,
    GenerateNode,
    Json,
    Limits,
    RoundEndNode,
    Submission,
)
from ...program.nodes.bodies import walk
from ...prompts.prompt import render_chat, render_slot
from ...prompts.served_model import ServedModel, outputs_of
from ..calls.outputs import OutputSpec, output_specs
from ..turns import Turns

MAX_CHECK_STEPS = 200_000
"""Steps of the expressions of all prompts whose length is checked. Once they are used up, the other
prompts are accepted."""
MESSAGE_TOKENS = 64
"""Estimate of the tokens that a chat template adds around a message."""


def num_calls(graph: Graph) -> int:
    """Return the number of LLM calls in a graph."""
    return sum(isinstance(node, GenerateNode) for node in graph.nodes.values())


def check_options(submission: Submission, policy: str) -> None:
    """Reject options that this server would otherwise silently ignore.

    Args:
        submission: the submission.
        policy: the scheduler's policy. All programs share one queue, so a program cannot choose
            a policy, but it can require one.

    Raises:
        ProgramError: `program.unsupported` or `policy.not_served`, with the path of the field.
    """
    options, program = submission.options, submission.program
    if options.policy not in (None, policy):
        raise ProgramError(
            "policy.not_served",
            f"this server's policy is `{policy}`, not `{options.policy}`: leave the option out, or "
            "start a server with that --policy",
            path="options.policy",
        )
    for path, is_default in (
        ("options.tokens", options.tokens == "canonical"),
        ("program.limits", program.limits == Limits()),
    ):
        if not is_default:
            raise _unsupported(path)


def _unsupported(path: str) -> ProgramError:
    return ProgramError(
        "program.unsupported", f"`{path}` is not supported yet: leave it out", path=path
    )


async def check_program(
    graph: Graph,
    inputs: Mapping[str, Json],
    model: ServedModel,
    functions: FunctionRegistry,
    grammars: ConstraintValidator,
    turns: Turns,
    *,
    append: Append | None = None,
    clip_outputs: bool = False,
    is_large: bool = False,
) -> None:
    """Reject a program, or an append to one, that cannot run.

    `is_large`: the nodes are checked in a thread.

    Raises:
        ProgramError: `model.unknown`, `engine.unsupported_*`, `call.unknown_function`,
            `call.argument`, and `constraint.*` for a constraint that no engine can enforce.
        PromptError: `prompt.too_long`, for a call of a new program whose inputs are all given.
    """
    check = partial(_check_nodes, graph, inputs, model, functions, append)
    found = await turns.in_thread(check) if is_large else check()
    await grammars.validate(found.constraints)
    if found.suspects:
        await turns.in_thread(lambda: _check_lengths(found.suspects, inputs, model, clip_outputs))


class _Found(NamedTuple):
    """What remains to be checked after a walk over the nodes."""

    suspects: list[tuple[str, GenerateNode]]
    """Calls whose prompt may be too long, with their paths."""
    constraints: list[tuple[str, str]]
    """Grammars with the paths of the fields that set them."""


def _check_nodes(
    graph: Graph,
    values: Mapping[str, Json],
    model: ServedModel,
    functions: FunctionRegistry,
    append: Append | None,
) -> _Found:
    """Check each node of a program, or of an append to it, by itself."""
    nodes: list[AnyNode]
    if append is None:
        root = "program.nodes"
        sent = (node for node in graph.nodes.values() if graph.body_of(node.id) is None)
        nodes = [node for node in sent if not isinstance(node, RoundEndNode)]
    else:
        root, nodes = "nodes", append.nodes
    found = _Found([], [])
    for path, node in walk(nodes, root):
        if isinstance(node, GenerateNode):
            model.check(node, path)
            _check_tool_fields(node, path)
            specs = output_specs(node, model.tool_format)
            found.constraints.extend(_grammars(node, path, specs))
            slots = graph.slots.get(node.id)
            reads = slots[0].reads if slots else frozenset()
            if (
                append is None
                and slots is not None
                and node.when is UNSET  # evaluated at run time
                and graph.body_of(node.id) is None
                and reads <= values.keys()
                and _may_be_long(node, values, model, specs[0].sampling.max_tokens)
            ):
                found.suspects.append((path, node))
        elif isinstance(node, CallNode):
            with prefixed_path(path):
                functions.check_call(node.function, node.args)
    return found


def _check_tool_fields(node: GenerateNode, path: str) -> None:
    """Refuse fields of tools that a prompt without tools would ignore."""
    if not isinstance(node.prompt, list):
        return
    for name, is_used in (
        ("tool_choice", node.tool_choice not in (UNSET, None, "none", "auto")),
        ("parallel_tool_calls", not node.parallel_tool_calls),
    ):
        if is_used:
            raise ProgramError(
                "program.tools",
                f"`{name}` needs a chat template: use `messages` instead of `prompt`",
                path=f"{path}.{name}",
            )


def _grammars(node: GenerateNode, path: str, specs: Sequence[OutputSpec]) -> list[tuple[str, str]]:
    """Return the grammars of a node's outputs, each with the path of the field that sets it."""
    found = []
    for (where, _), target in zip(outputs_of(node, path), specs, strict=True):
        if (grammar := target.grammar) is not None:
            is_from_tools = target.tools is not None and target.constraint is None
            found.append((f"{path}.tools" if is_from_tools else f"{where}.constraint", grammar))
    return found


def _may_be_long(
    node: GenerateNode,
    values: Mapping[str, Json],
    model: ServedModel,
    max_tokens: int | None,
) -> bool:
    """Whether a prompt may be too long, by the bytes of its text and of each value it contains."""
    # The JSON of a token id is at least one byte, too.
    size = len(msgspec.json.encode(node)) + MESSAGE_TOKENS * (1 + len(node.messages or []))
    left = model.max_len - size - (max_tokens or 1)
    sizes: dict[str, int] = {}
    for name in _references(node):
        if left < 0:
            break
        if name not in sizes:
            sizes[name] = _estimated_tokens(values[name])
        left -= sizes[name]
    return left < 0


def _estimated_tokens(value: Json) -> int:
    size = 4 * len(value) if isinstance(value, str) else len(msgspec.json.encode(value))
    return size + MESSAGE_TOKENS * (len(value) if isinstance(value, list) else 0)


def _references(node: GenerateNode) -> Iterator[str]:
    """Yield the variables of a prompt, each as often as the prompt contains it."""
    segments = list(node.prompt or ())
    for message in node.messages or ():
        if isinstance(message.content, list):
            segments += message.content
        if message.splice is not UNSET:
            yield from references(input_expression(message.splice))
    for segment in segments:
        if segment.output is not UNSET:
            return  # only the prompt of the first output is checked
        if segment.input is not UNSET:
            yield from references(input_expression(segment.input))


def _check_lengths(
    suspects: list[tuple[str, GenerateNode]],
    values: Mapping[str, Json],
    model: ServedModel,
    clip_outputs: bool,
) -> None:
    budget = WorkBudget(MAX_CHECK_STEPS)
    for path, node in suspects:
        try:
            rendered = (
                render_slot(node, 0, values, budget)
                if isinstance(node.prompt, list)
                else render_chat(node, values, model.template, budget)
            )
        except (PromptError, ExpressionError):
            continue  # the steps are used up, or the node fails with this error when it runs
        try:
            encoded = model.encode(node, 0, rendered.pieces)
            sampling = output_specs(node)[0].sampling
            model.output_budget(
                len(encoded.ids),
                sampling.max_tokens,
                f"node {node.id}",
                is_clipped=clip_outputs,
            )
        except PromptError as error:
            if error.code == "prompt.too_long":
                raise PromptError(error.code, error.message, path=path) from error
