"""Translation of a prompt with `{{name}}` placeholders to the nodes of a program.

Out of scope: HTTP, and sessions beyond their name.

Invariants: every generated name ends in the request's random suffix, so requests of one session do
not collide; only `{{name}}` is special in the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta

from ...program.errors import ProgramError
from ...program.ir import (
    AnyNode,
    Expression,
    ExprNode,
    GenerateNode,
    Sampling,
    Segment,
    Variable,
)
from .sessions import split_id

_PLACEHOLDER = re.compile(r"\{\{\s*(?:(input|output)\s*:\s*)?([A-Za-z_]\w*)\s*\}\}")
_SAMPLING = tuple(f.name for f in msgspec.structs.fields(Sampling))
_DEFAULTS = Sampling()

Transform: TypeAlias = Callable[[Expression], Expression]


class Placeholder(
    Sampling, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """A semantic variable in a prompt. The sampling fields apply to outputs only."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*$", max_length=96)]
    in_out: bool
    """true for an output, which the model writes; false for an input."""
    semantic_var_id: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """An id that the server returned, or any id of the client's choice within the session; null
    creates a new variable."""
    transforms: Annotated[str, Meta(max_length=1_024)] | None = None
    """`strip`, `lower` or `json:<key>[.<key>]`, applied before an input or after an output."""


@dataclass(slots=True)
class LoweredRequest:
    """The nodes and variables that a request adds to its session."""

    request_id: str
    nodes: list[AnyNode] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    bindings: dict[str, str] = field(default_factory=dict)
    """Variable of each placeholder, by the placeholder's name."""


def lower_request(
    prompt: str,
    placeholders: list[Placeholder],
    *,
    suffix: str,
    session: str | None,
    model: str,
) -> LoweredRequest:
    """Turns a prompt and its placeholders into nodes.

    Args:
        prompt: text with `{{name}}`; an output's later mentions read what it made.
        placeholders: what the names stand for.
        suffix: ends every name that is made.
        session: id of the session's program, or None for a new session.
        model: name of the model.

    Raises:
        ProgramError: if prompt and placeholders do not fit, or a transform is unknown.
    """
    lowered = LoweredRequest(request_id=f"r_{suffix}")
    by_name: dict[str, Placeholder] = {}
    for i, placeholder in enumerate(placeholders):
        path = f"placeholders[{i}]"
        if placeholder.name in by_name:
            raise _error("duplicate_placeholder", f"{placeholder.name!r} is listed twice", path)
        by_name[placeholder.name] = placeholder
        _check_sampling(placeholder, path)
        lowered.bindings[placeholder.name] = _bind(placeholder, suffix, session, path)
        given = placeholder.semantic_var_id
        if not placeholder.in_out and (given is None or split_id(given)[0] is None):
            # Declaring a variable of the session again changes nothing.
            lowered.variables[lowered.bindings[placeholder.name]] = Variable()
    if not any(placeholder.in_out for placeholder in placeholders):
        raise _error(
            "no_output", "at least one placeholder must be an output (in_out: true)", "placeholders"
        )

    reads: dict[str, str] = {}
    for i, placeholder in enumerate(placeholders):
        reads[placeholder.name] = _lower_placeholder(placeholder, i, suffix, lowered)
    segments = _segments(prompt, by_name, reads)
    lowered.nodes.insert(0, GenerateNode(id=lowered.request_id, model=model, prompt=segments))
    return lowered


def _bind(placeholder: Placeholder, suffix: str, session: str | None, path: str) -> str:
    given = placeholder.semantic_var_id
    if given is None:
        return f"{placeholder.name}_{suffix}"
    program, variable = split_id(given)
    if program not in (None, session):
        raise _error(
            "other_session",
            f"{given!r} is not a variable of this session ({session or 'a new one'})",
            f"{path}.semantic_var_id",
        )
    return variable


def _check_sampling(placeholder: Placeholder, path: str) -> None:
    if placeholder.in_out:
        return
    for name in _SAMPLING:
        if getattr(placeholder, name) != getattr(_DEFAULTS, name):
            raise _error(
                "sampling_of_input",
                f"{name} applies to outputs only (in_out: true)",
                f"{path}.{name}",
            )


def _lower_placeholder(
    placeholder: Placeholder, i: int, suffix: str, lowered: LoweredRequest
) -> str:
    """Add the declaration and transform of a placeholder; return the name that its segment uses."""
    variable = lowered.bindings[placeholder.name]
    transform = _transform(placeholder.transforms, f"placeholders[{i}].transforms")
    if transform is None:
        return variable
    inside = f"{placeholder.name}_{'raw' if placeholder.in_out else 'in'}_{suffix}"
    source, target = (inside, variable) if placeholder.in_out else (variable, inside)
    expression = transform({"var": source})
    lowered.nodes.append(ExprNode(id=f"t{i}_{suffix}", expr=expression, output=target))
    return inside


def _transform(spec: str | None, path: str) -> Transform | None:
    match (spec or "").strip().partition(":"):
        case ("", "", _):
            return None
        case (("strip" | "lower") as operator, "", _):
            return lambda source: {operator: source}
        case ("json", ":", keys) if all(keys.split(".")):
            return lambda source: {"get": [{"parse_json": source}, *keys.split(".")]}
    raise _error(
        "unknown_transform",
        f"unknown transform {spec!r}; use strip, lower or json:<key>[.<key>]",
        path,
    )


def _segments(prompt: str, by_name: dict[str, Placeholder], reads: dict[str, str]) -> list[Segment]:
    segments: list[Segment] = []
    seen: set[str] = set()
    end = 0
    for match in _PLACEHOLDER.finditer(prompt):
        if match.start() > end:
            segments.append(Segment(text=prompt[end : match.start()]))
        end = match.end()
        direction, name = match.group(1), match.group(2)
        placeholder = by_name.get(name)
        if placeholder is None:
            raise _error(
                "unknown_placeholder", f"{{{{{name}}}}} is not listed in placeholders", "prompt"
            )
        if direction is not None and (direction == "output") != placeholder.in_out:
            raise _error(
                "direction",
                f"{{{{{name}}}}} is used in the other direction than listed in placeholders",
                "prompt",
            )
        segments.append(_segment(placeholder, reads[name], is_first=name not in seen))
        seen.add(name)
    if end < len(prompt):
        segments.append(Segment(text=prompt[end:]))
    for name in by_name:
        if name not in seen:
            raise _error(
                "unused_placeholder", f"{name!r} does not appear in the prompt", "placeholders"
            )
    if segments[0].output is not UNSET:
        raise _error(
            "starts_with_output",
            "the prompt starts with an output: put text or an input before it",
            "prompt",
        )
    return segments


def _segment(placeholder: Placeholder, variable: str, *, is_first: bool) -> Segment:
    if not placeholder.in_out or not is_first:
        return Segment(input=variable)
    sampling = {name: getattr(placeholder, name) for name in _SAMPLING}
    return Segment(output=variable, **sampling)


def _error(code: str, message: str, path: str) -> ProgramError:
    return ProgramError(f"submit.{code}", message, path=path)
