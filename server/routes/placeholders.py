"""A prompt with placeholders, as the paper writes it, lowered to nodes of a program.

Knows the `{{name}}` syntax and the string transforms; refuses to know sessions beyond the
name of one, and HTTP altogether.

Kept true: every name it makes ends in the request's random suffix, so two requests of one
session never collide; text is taken as it stands, and only `{{name}}` is special in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from ..program.errors import ProgramError
from ..program.ir import (
    AnyNode,
    Expr,
    Expression,
    Generate,
    Sampling,
    Segment,
    Variable,
)

_PLACEHOLDER = re.compile(r"\{\{\s*(?:(input|output)\s*:\s*)?([A-Za-z_]\w*)\s*\}\}")
_SAMPLING = tuple(f.name for f in msgspec.structs.fields(Sampling))
_GREEDY = Sampling()

Transform: TypeAlias = Callable[[Expression], Expression]


class Placeholder(
    Sampling, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """A semantic variable's place in a prompt; the sampling fields are for outputs."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*$", max_length=96)]
    in_out: bool
    """True: an output, which the model writes. False: an input."""
    semantic_var_id: str | None = None
    """None makes a new variable."""
    transforms: Annotated[str, Meta(max_length=1_024)] | None = None
    """`strip`, `lower` or `json:<key>[.<key>]`: before an input, after an output."""


@dataclass(slots=True)
class Lowered:
    """What a request adds to its session."""

    request_id: str
    nodes: list[AnyNode] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    bindings: dict[str, str] = field(default_factory=dict)
    """A placeholder's name to its variable."""


def lower_request(
    prompt: str,
    placeholders: list[Placeholder],
    *,
    suffix: str,
    session: str | None,
    model: str,
) -> Lowered:
    """Turns a prompt and its placeholders into nodes.

    Args:
        prompt: text with `{{name}}`; an output's later mentions read what it made.
        placeholders: what the names stand for.
        suffix: ends every name that is made.
        session: the program that `semantic_var_id`s must belong to.
        model: name of the model.

    Raises:
        ProgramError: if prompt and placeholders do not fit, or a transform is unknown.
    """
    lowered = Lowered(request_id=f"r_{suffix}")
    known: dict[str, Placeholder] = {}
    for i, placeholder in enumerate(placeholders):
        path = f"placeholders[{i}]"
        if placeholder.name in known:
            raise _error("duplicate_placeholder", f"{placeholder.name!r} is listed twice", path)
        known[placeholder.name] = placeholder
        _check_sampling(placeholder, path)
        lowered.bindings[placeholder.name] = _bind(placeholder, suffix, session, path)
    if not any(placeholder.in_out for placeholder in placeholders):
        raise _error("no_output", "no placeholder is an output (in_out: true)", "placeholders")

    reads: dict[str, str] = {}
    for i, placeholder in enumerate(placeholders):
        reads[placeholder.name] = _lower_placeholder(placeholder, i, suffix, lowered)
    segments = _segments(prompt, known, reads)
    lowered.nodes.insert(0, Generate(id=lowered.request_id, model=model, prompt=segments))
    return lowered


def _bind(placeholder: Placeholder, suffix: str, session: str | None, path: str) -> str:
    given = placeholder.semantic_var_id
    if given is None:
        return f"{placeholder.name}_{suffix}"
    program, _, variable = given.partition(".")
    if not variable or program != session:
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
        if getattr(placeholder, name) != getattr(_GREEDY, name):
            raise _error(
                "sampling_of_input", f"{name} is for outputs (in_out: true)", f"{path}.{name}"
            )


def _lower_placeholder(placeholder: Placeholder, i: int, suffix: str, lowered: Lowered) -> str:
    """Adds declaration and transform of a placeholder; returns the name its segment uses."""
    variable = lowered.bindings[placeholder.name]
    if not placeholder.in_out and placeholder.semantic_var_id is None:
        lowered.variables[variable] = Variable()
    transform = _transform(placeholder.transforms, f"placeholders[{i}].transforms")
    if transform is None:
        return variable
    inside = f"{placeholder.name}_{'raw' if placeholder.in_out else 'in'}_{suffix}"
    source, target = (inside, variable) if placeholder.in_out else (variable, inside)
    expression = transform({"var": source})
    lowered.nodes.append(Expr(id=f"t{i}_{suffix}", expr=expression, output=target))
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
        f"there is no transform {spec!r}; choose strip, lower or json:<key>[.<key>]",
        path,
    )


def _segments(prompt: str, known: dict[str, Placeholder], reads: dict[str, str]) -> list[Segment]:
    segments: list[Segment] = []
    seen: set[str] = set()
    end = 0
    for match in _PLACEHOLDER.finditer(prompt):
        if match.start() > end:
            segments.append(Segment(text=prompt[end : match.start()]))
        end = match.end()
        direction, name = match.group(1), match.group(2)
        placeholder = known.get(name)
        if placeholder is None:
            raise _error("unknown_placeholder", f"{{{{{name}}}}} is not listed", "prompt")
        if direction is not None and (direction == "output") != placeholder.in_out:
            raise _error("direction", f"{{{{{name}}}}} is listed the other way", "prompt")
        segments.append(_segment(placeholder, reads[name], is_first=name not in seen))
        seen.add(name)
    if end < len(prompt):
        segments.append(Segment(text=prompt[end:]))
    for name in known:
        if name not in seen:
            raise _error("unused_placeholder", f"{name!r} is not in the prompt", "placeholders")
    return segments


def _segment(placeholder: Placeholder, variable: str, *, is_first: bool) -> Segment:
    if not placeholder.in_out or not is_first:
        return Segment(input=variable)
    sampling = {name: getattr(placeholder, name) for name in _SAMPLING}
    return Segment(output=variable, **sampling)


def _error(code: str, message: str, path: str) -> ProgramError:
    return ProgramError(f"submit.{code}", message, path=path)
