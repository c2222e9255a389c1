"""The options of an LLM call: of `llm_chat` and `gen`, and of the slots of a template."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from ..program.content import Constraint, Json, Sampling
from ..program.decoding.typed_json import convert_record
from ..program.suggestion import suggestion
from .errors import Place, SourceArgumentError

Kind: TypeAlias = Literal[
    "any", "null", "bool", "number", "text", "list", "object", "message", "stream"
]
"""`message` is the answer of a chat call, an object with `role` and `content`; `stream` a text that
can be read while it is generated. `any` is unknown."""

MAX_LIST_ITEMS = 8
MAX_LIST_TEXT = 120
LIST_SCHEMA: Final[dict[str, Json]] = {
    "type": "array",
    "items": {"type": "string", "maxLength": MAX_LIST_TEXT},
    "minItems": 1,
    "maxItems": MAX_LIST_ITEMS,
}
"""The schema of `type=list`. It is bounded, so that an answer ends within its tokens."""

SAMPLING: Final = frozenset(Sampling.__struct_fields__) - {"logit_bias", "logprobs"}
"""Sampling parameters that an output in a program text may have. `logprobs` are returned in
messages only, and the keys of `logit_bias` depend on the model."""
_NODE_FIELDS: Final = {"timeout": "timeout_s", "retries": "retries", "priority": "priority"}
_CONSTRAINTS: Final = {
    "result_value": "choices",
    "choices": "choices",
    "value": "choices",
    "result_type": "type",
    "type": "type",
    "regex": "regex",
    "schema": "json_schema",
    "grammar": "lark",
}
_TYPES: Final[dict[str, tuple[str, Kind]]] = {
    "str": ("string", "text"),
    "string": ("string", "text"),
    "int": ("int", "number"),
    "float": ("float", "number"),
    "bool": ("bool", "bool"),
}
TYPE_OPTIONS: Final = frozenset(name for name, field in _CONSTRAINTS.items() if field == "type")
TOOL_FIELDS: Final = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
CALL_OPTIONS: Final = _NODE_FIELDS.keys() | {"model"}
"""Options of a whole call, however many outputs it has."""
OPTIONS: Final = SAMPLING | _NODE_FIELDS.keys() | _CONSTRAINTS.keys() | TOOL_FIELDS | {"stream"}


class CallOptions(NamedTuple):
    """The options of one LLM call, by where they belong."""

    output: dict[str, Any]
    """Fields of the output: sampling and constraint."""
    node: dict[str, Any]
    kind: Kind
    """Kind of the value; `any` for a call without a constraint."""
    is_stream: bool

    @property
    def output_kind(self) -> Kind:
        """The kind of an output of a prompt, which is a text unless a constraint says otherwise."""
        return self.kind if "constraint" in self.output else "text"


def read_options(options: dict[str, Json], place: Place) -> CallOptions:
    """Return the options of a call.

    Raises:
        SourceArgumentError: `language.argument`.
    """
    output: dict[str, Any] = {}
    node: dict[str, Any] = {}
    kind: Kind = "any"
    is_stream = False
    constraints: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if name in SAMPLING:
            output |= _sampling_field(name, value)
        elif name in _NODE_FIELDS:
            node[_NODE_FIELDS[name]] = value
        elif name in TOOL_FIELDS:
            node[name] = value
        elif name == "stream":
            is_stream = bool(value)
        else:
            constraints.append(name)
            kind = _add_constraint(output, name, value, place)
    if len(constraints) > 1:
        message = f"a call takes `{constraints[0]}` or `{constraints[1]}`, not both"
        raise SourceArgumentError("language.argument", message, place)
    if is_stream and kind not in ("any", "text"):
        message = "`stream=True` gives a text: leave out the type"
        raise SourceArgumentError("language.argument", message, place)
    return CallOptions(output, node, kind, is_stream)


def _sampling_field(name: str, value: Json) -> dict[str, Json]:
    return {name: [value] if name == "stop" and isinstance(value, str) else value}


def _add_constraint(output: dict[str, Any], name: str, value: Json, place: Place) -> Kind:
    field = _CONSTRAINTS[name]
    if field != "type":
        output["constraint"] = Constraint(**{field: value})
        return "any" if field == "json_schema" else "text"
    if value == "list":
        output["constraint"] = Constraint(json_schema=LIST_SCHEMA)
        return "list"
    if not isinstance(value, str) or value not in _TYPES:
        known = ", ".join(sorted({*_TYPES, "list"} - {"string"}))
        shown = repr(value)[:80]
        message = f"unknown type {shown}: the types are {known}; write other shapes as `schema`"
        raise SourceArgumentError("language.argument", message, place)
    constraint, kind = _TYPES[value]
    output["constraint"] = Constraint(type=constraint)  # type: ignore[arg-type]  # one of _TYPES
    return kind


def check_option(name: str, place: Place) -> None:
    """Check the name of an option.

    Raises:
        SourceArgumentError: `language.argument`.
    """
    if name in OPTIONS:
        return
    if name == "n":
        message = (
            "`n` is not supported: write `[gen(...) for _ in range(3)]`, whose calls run in "
            "parallel, share the prompt, and have different seeds"
        )
        raise SourceArgumentError("language.argument", message, place)
    hint = suggestion(name, OPTIONS, f"the options are {_listed_options()}")
    message = f"unknown option `{name}`: {hint}"
    raise SourceArgumentError("language.argument", message, place)


def check_option_value(name: str, value: Json, place: Place) -> None:
    """Check the value of a sampling option. The graph checks those of other options.

    Raises:
        SourceArgumentError: `language.argument`.
    """
    if value is None or name not in SAMPLING:
        return
    try:
        convert_record(_sampling_field(name, value), Sampling)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at ")[0]
        message = f"`{name}` cannot be {repr(value)[:80]}: {reason[0].lower()}{reason[1:]}"
        raise SourceArgumentError("language.argument", message, place) from None


def check_slot_option(name: str, place: Place) -> None:
    """Check the name of an option of an output in a text: of a slot or a semantic function.

    Raises:
        SourceArgumentError: `language.argument`.
    """
    check_option(name, place)
    if name in TOOL_FIELDS:
        message = "tools need a chat template: use `llm_chat`"
        raise SourceArgumentError("language.argument", message, place)
    if name == "stream":
        message = "an output of a slot cannot be a stream: write `gen(prompt, stream=True)`"
        raise SourceArgumentError("language.argument", message, place)


def _listed_options() -> str:
    return ", ".join(sorted(OPTIONS))
