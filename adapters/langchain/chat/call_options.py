"""Conversion of LangChain's call arguments to fields of a `generate` node.

Responsibility: the arguments that chains bind and pass (sampling, tools, response formats).

Invariants: every argument is applied, ignored on purpose, or rejected by name; equal calls give
equal nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from conure.server.program.ir import Constraint, Json, Sampling

from ...arguments import unknown_argument
from ...class_schemas import without_other_fields

MAX_ANSWERS: Final = 128
"""Maximum of `n`, as in OpenAI's API."""

_SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)
_TOOL_ARGUMENTS = ("tools", "tool_choice", "parallel_tool_calls")
_IGNORED_ARGUMENTS = frozenset(
    {
        "allow_cut_answers",
        "ls_structured_output_format",
        "model",
        "n",
        "stream",
        "stream_usage",
    }
)
"""Arguments without effect on a node: handled elsewhere, or meant for tracers only."""


def sampling_of(
    defaults: Mapping[str, Json], kwargs: Mapping[str, Any], *, stop: list[str] | None, strict: bool
) -> dict[str, Json]:
    """Return the sampling fields of one call; arguments of the call override the model's fields.

    Args:
        defaults: the model's sampling fields.
        kwargs: arguments of the call.
        stop: stop strings that LangChain passes separately from `kwargs`.
        strict: reject unknown arguments.

    Raises:
        ValueError: if `strict` and an argument of the call is unknown.
    """
    settings = dict(defaults)
    for name, value in kwargs.items():
        if name in _SAMPLING_FIELDS or name == "top_logprobs":
            settings[name] = value
        elif name == "max_completion_tokens":
            settings["max_tokens"] = value
        elif name == "stop_sequences":
            settings["stop"] = value
        elif (
            strict
            and name not in _IGNORED_ARGUMENTS
            and value is not None
            and not _is_format_argument(name)
        ):
            raise ValueError(unknown_argument(name, value, _SAMPLING_FIELDS, "ChatConure"))
    if stop is not None:
        settings["stop"] = stop
    if isinstance(settings.get("stop"), str):
        settings["stop"] = [settings["stop"]]
    top_logprobs = settings.pop("top_logprobs", None)
    settings["logprobs"] = _num_logprobs(settings.get("logprobs"), top_logprobs)
    return {name: value for name, value in settings.items() if value not in (None, [])}


def _num_logprobs(logprobs: Any, top_logprobs: int | None) -> int | None:
    """Return the number of alternatives to report per token; None: report nothing.

    Args:
        logprobs: their number, or as in OpenAI's API whether to report.
        top_logprobs: their number in OpenAI's API.
    """
    if logprobs is False or (logprobs is None and top_logprobs is None):
        return None
    if top_logprobs is not None:
        return top_logprobs
    return 0 if logprobs is True or logprobs is None else int(logprobs)


def _is_format_argument(name: str) -> bool:
    return name in _TOOL_ARGUMENTS or name in ("response_format", "constraint")


def tool_of(tool: Any, *, strict: bool | None) -> dict[str, Json]:
    """Convert a tool to OpenAI's chat format.

    Raises:
        ValueError: for a tool that another provider runs.
    """
    if isinstance(tool, Mapping) and tool.get("type") == "function" and "name" in tool:
        tool = {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
    wire = convert_to_openai_tool(tool, strict=strict)
    if not isinstance(wire.get("function"), Mapping):
        raise ValueError(
            f"the tool {wire!r} is run by another provider; a Conure server has function tools "
            "only: pass a function, a class, a BaseTool or {'type': 'function', 'function': ...}"
        )
    return wire


def num_answers_of(default: int | None, kwargs: Mapping[str, Any]) -> int:
    """Return the number of answers to a call: its argument `n`, or the model's.

    Raises:
        ValueError: if `n` is not an integer from 1 to `MAX_ANSWERS`.
    """
    num_answers = default if kwargs.get("n") is None else kwargs["n"]
    if num_answers is None:
        return 1
    if not isinstance(num_answers, int) or not 1 <= num_answers <= MAX_ANSWERS:
        raise ValueError(f"n must be an integer from 1 to {MAX_ANSWERS}, got {num_answers!r}")
    return num_answers


def tools_of(kwargs: Mapping[str, Any]) -> dict[str, Json]:
    """Return the node fields that declare tools."""
    if not kwargs.get("tools"):
        return {}
    return {name: kwargs[name] for name in _TOOL_ARGUMENTS if kwargs.get(name) is not None}


def constraint_of(kwargs: Mapping[str, Any]) -> dict[str, Json]:
    """Return the output field that constrains the answer.

    Raises:
        ValueError: if both are given, `constraint` and `response_format`, or one is invalid.
    """
    constraint, response_format = kwargs.get("constraint"), kwargs.get("response_format")
    if constraint is not None and response_format is not None:
        raise ValueError("give either `constraint` or `response_format`, not both")
    if constraint is not None:
        if (
            not isinstance(constraint, Mapping)
            or len(constraint) != 1
            or constraint.keys() - _CONSTRAINT_KINDS
        ):
            kinds = ", ".join(sorted(_CONSTRAINT_KINDS))
            raise ValueError(f"constraint must be a dict with one of {kinds}, got {constraint!r}")
        return {"constraint": dict(constraint)}
    if response_format is None:
        return {}
    schema = _schema_of(response_format)
    check_types(schema)
    return {} if schema is None else {"constraint": {"json_schema": schema}}


_CONSTRAINT_KINDS = frozenset(Constraint.__struct_fields__)


def _schema_of(response_format: Any) -> dict[str, Json] | None:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
        schema = response_format["json_schema"].get("schema")
        if isinstance(schema, Mapping):
            return dict(schema)
    elif kind is None:
        try:
            return json_schema_of(response_format)
        except (TypeError, ValueError):
            pass
    raise ValueError(
        "response_format must be {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
        f"{{'type': 'json_object'}} or a class with fields, got {response_format!r}"
    )


def json_schema_of(given: Any, *, strict: bool = False) -> dict[str, Json]:
    """Return the JSON schema of an output.

    Args:
        given: a class, a JSON schema, or OpenAI's `{"name": ..., "schema": ...}`, which may be the
            `json_schema` of a response format.
        strict: allow only fields that the schema mentions; for a class this is always so.

    Raises:
        ValueError: if it is none of these, or a dict that has the name of the output only.
    """
    schema = convert_to_json_schema(plain_schema(given))
    if strict or isinstance(given, type):
        schema = without_other_fields(schema)
    if not schema.keys() - {"title", "description"}:
        raise ValueError(
            f"the output {schema.get('title')!r} has no schema; pass a class with fields, a JSON "
            "schema or {'name': ..., 'schema': {...}}"
        )
    return schema


def plain_schema(given: Any) -> Any:
    """Return a schema in OpenAI's form as a JSON schema with a title, and all else as it is."""
    if isinstance(given, Mapping):
        named = given.get("json_schema") if given.get("type") == "json_schema" else given
        if isinstance(named, Mapping) and isinstance(named.get("schema"), Mapping):
            about = {"title": named.get("name", "answer"), "description": named.get("description")}
            return {key: text for key, text in about.items() if text} | dict(named["schema"])
    return given


_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


def check_types(schema: Any, path: str = "schema") -> None:
    """Check the type names of a JSON schema: an unknown one would allow anything.

    Raises:
        ValueError: with the position of the unknown type.
    """
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            check_types(item, f"{path}[{index}]")
    if not isinstance(schema, Mapping):
        return
    kinds = schema.get("type", [])
    for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []:
        if isinstance(kind, str) and kind not in _TYPES:
            raise ValueError(
                f"{path}: unknown type {kind!r}; a JSON schema has {', '.join(sorted(_TYPES))}"
            )
    for key, part in schema.items():
        if key in ("enum", "const", "default", "examples"):
            continue
        if key in ("properties", "$defs", "definitions", "patternProperties"):
            for name, each in part.items() if isinstance(part, Mapping) else ():
                check_types(each, f"{path}.{key}.{name}")
        else:
            check_types(part, f"{path}.{key}")


def choice_of(choice: Any, names: Sequence[str]) -> Json:
    """Convert LangChain's `tool_choice` to OpenAI's.

    Args:
        choice: `any`, `auto`, `none`, True, the name of a tool, or OpenAI's object.
        names: names of the tools.

    Raises:
        ValueError: for any other choice.
    """
    if choice is None or choice is False:
        return None
    if choice in ("any", "required") or choice is True:
        return "required"
    if choice in ("auto", "none") or isinstance(choice, Mapping):
        return choice
    if choice in names:
        return {"type": "function", "function": {"name": choice}}
    known = ", ".join(names)
    raise ValueError(f"tool_choice={choice!r} is not the name of a tool; the tools are: {known}")
