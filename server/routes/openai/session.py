"""Requests that name a session: they read and write its semantic variables.

The request's calls are appended to the session's program, so a variable that another request
writes later can be read now, and the server passes the value on itself.

Out of scope: HTTP, and the translation of a request to calls.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from ...program.decoding.bodies import revalidate
from ...program.errors import ProgramError
from ...program.ir import (
    AnyNode,
    Append,
    ExprNode,
    GenerateNode,
    Message,
    Output,
    Segment,
    Variable,
)
from ..parrot.sessions import Sessions, split_id
from .execution import RequestCall
from .request_fields import SessionBinding

_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_]\w*)\s*\}\}")


async def append_calls(
    sessions: Sessions, binding: SessionBinding, nodes: Sequence[AnyNode]
) -> tuple[str, list[RequestCall]]:
    """Append the calls of a request to a session.

    Args:
        sessions: of the tenant. A session that the client named is created if it does not exist.
        binding: the session and its variables.
        nodes: the calls.

    Returns:
        The session's program, and the calls under their names there.

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
    program = await sessions.open(name=binding.session)
    reads = {name: _variable(given, program) for name, given in binding.read.items()}
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
    if binding.write is not None:
        content = {"get": [{"var": calls[0].variable}, "content"]}
        output = _variable(binding.write, program)
        appended.append(ExprNode(id=f"w_{suffix}", expr=content, output=output))
    append, body = revalidate(
        Append(variables={name: Variable() for name in reads.values()}, nodes=appended)
    )
    await sessions.service.append(program, append, body=body, tenant=sessions.tenant)
    return program, calls


def _variable(given: str, program: str) -> str:
    named, variable = split_id(given)
    if named not in (None, program):
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
