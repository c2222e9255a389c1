"""Requests that name a session: they read and write its semantic variables.

The request's calls are appended to the session's program, so a variable that another request
writes later can be read now, and the server passes the value on itself.

Out of scope: HTTP, and the translation of a request to calls.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from ...program.decoding.bodies import revalidate
from ...program.errors import ProgramError
from ...program.ir import (
    AnyNode,
    Append,
    ExprNode,
    GenerateNode,
    KillNode,
    Message,
    Objective,
    Output,
    Segment,
    Variable,
)
from ..parrot.sessions import Sessions, split_id
from .execution import RequestCall
from .request_fields import SessionBinding

_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")


class AppendedCalls(NamedTuple):
    """The calls of a request in a session."""

    program: str
    """The session's program."""
    calls: list[RequestCall]
    """The calls under their names there."""
    after: int
    """A sequence number before their first events."""
    kill: Append | None
    """Cancels the calls; None if a variable of the session needs them."""


async def append_calls(
    sessions: Sessions, binding: SessionBinding, nodes: Sequence[AnyNode], objective: Objective
) -> AppendedCalls:
    """Append the calls of a request to a session.

    Args:
        sessions: of the tenant. A session that the client named is created if it does not exist.
        binding: the session and its variables.
        nodes: the calls.
        objective: of the calls.

    Raises:
        ProgramError: if placeholders and variables do not fit, or several answers have one name.
    """
    if binding.write is not None and len(nodes) > 1:
        raise ProgramError(
            "request.invalid",
            f"{len(nodes)} answers cannot all be written to {binding.write!r}: remove 'write', or "
            "request one answer",
            path="conure.write",
        )
    # The request is checked before a session is created for it.
    known = await sessions.find(binding.session)
    append, calls = _lower(binding, nodes, objective, session=known)
    append, body = revalidate(append)
    program = known or await sessions.open(name=binding.session)
    after = sessions.service.last_seq
    await sessions.service.append(program, append, body=body, tenant=sessions.tenant)
    # A killed call would leave the variable without a value, and no other request could write it.
    kill = None if binding.write is not None else _kill(calls)
    return AppendedCalls(program, calls, after, kill)


def _kill(calls: Sequence[RequestCall]) -> Append:
    """Return what cancels the calls of a request and no others."""
    suffix = calls[0].node.partition("_")[2]
    targets = [call.variable for call in calls]
    return Append(nodes=[KillNode(id=f"k_{suffix}", targets=targets, when=True)])


def _lower(
    binding: SessionBinding,
    nodes: Sequence[AnyNode],
    objective: Objective,
    *,
    session: str | None,
) -> tuple[Append, list[RequestCall]]:
    """Return what a request appends to its session, and its calls.

    Args:
        binding: the session and its variables.
        nodes: the calls.
        objective: of the calls.
        session: the session's program; None for a new session.
    """
    reads = {name: _variable(given, session) for name, given in binding.read.items()}
    suffix = secrets.token_hex(6)
    appended: list[AnyNode] = []
    calls: list[RequestCall] = []
    seen: set[str] = set()
    for i, node in enumerate(nodes):
        assert isinstance(node, GenerateNode), "requests consist of LLM calls"
        call = RequestCall(f"r{i}_{suffix}", f"m{i}_{suffix}")
        appended.append(_bind(node, call, reads, seen))
        calls.append(call)
    for name in reads.keys() - seen:
        raise ProgramError(
            "request.invalid",
            f"no text of the request has the placeholder {{{{{name}}}}}",
            path=f"conure.read.{name}",
        )
    outputs: list[str] = []
    if binding.write is not None:
        content = {"get": [{"var": calls[0].variable}, "content"]}
        output = _variable(binding.write, session)
        appended.append(ExprNode(id=f"w_{suffix}", expr=content, output=output))
        # An output, so that it stays needed when a request that reads it is cancelled.
        outputs.append(output)
    variables = {name: Variable() for name in reads.values()}
    # The answers are not outputs: no other client needs them.
    objectives = dict.fromkeys([call.variable for call in calls], objective)
    if objective == "throughput":  # an output would get the stricter default
        objectives |= dict.fromkeys(outputs, objective)
    append = Append(variables=variables, nodes=appended, outputs=outputs, objectives=objectives)
    return append, calls


def _variable(given: str, session: str | None) -> str:
    named, variable = split_id(given)
    if named not in (None, session):
        raise ProgramError(
            "variable.other_session",
            f"{given!r} is not a variable of this session",
            path="conure",
        )
    return variable


def _bind(
    node: GenerateNode, call: RequestCall, reads: Mapping[str, str], seen: set[str]
) -> GenerateNode:
    """Rename a call and its output, and replace its placeholders."""
    if node.prompt is not UNSET:
        prompt = [
            replace(segment, output=call.variable) if segment.output is not UNSET else segment
            for segment in _expand(node.prompt, reads, seen)
        ]
        return replace(node, id=call.node, prompt=prompt)
    assert isinstance(node.output, Output)
    assert node.messages is not UNSET
    messages = [_expand_message(message, reads, seen) for message in node.messages]
    output = replace(node.output, variable=call.variable)
    return replace(node, id=call.node, messages=messages, output=output)


def _expand_message(message: Message, reads: Mapping[str, str], seen: set[str]) -> Message:
    content = message.content
    if not isinstance(content, list):
        content = [Segment(text=content or "")]
    return replace(message, content=_expand(content, reads, seen))


def _expand(segments: Sequence[Segment], reads: Mapping[str, str], seen: set[str]) -> list[Segment]:
    """Replace the placeholders of known names by inputs; other text stays as it is."""
    expanded: list[Segment] = []
    for segment in segments:
        if segment.text is UNSET:
            expanded.append(segment)
            continue
        end = 0
        for match in _PLACEHOLDER.finditer(segment.text):
            variable = reads.get(match[1])
            if variable is None:
                continue
            seen.add(match[1])
            if match.start() > end:
                expanded.append(Segment(text=segment.text[end : match.start()]))
            expanded.append(Segment(input=variable))
            end = match.end()
        if end < len(segment.text) or not segment.text:
            expanded.append(Segment(text=segment.text[end:]))
    return expanded
