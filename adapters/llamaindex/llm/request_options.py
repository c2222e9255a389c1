"""The options of a call: the fields of the LLM, overridden by the arguments of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from llama_index.core.bridge.pydantic import BaseModel

from conure.server.program.ir import Json, Sampling

from ...arguments import check_arguments, unknown_argument
from ...class_schemas import without_other_fields

_SAMPLING: Final = frozenset(Sampling.__struct_fields__)
_TOOL_FIELDS: Final = ("parallel_tool_calls", "tool_choice", "tools")
_TOOL_MODES: Final = ("auto", "none", "required")
_NOT_FOR_THE_MODEL: Final = ("model", "extra_headers")
"""Arguments that are not part of an output. LlamaIndex's `DocumentContextExtractor` passes
`extra_headers` for another provider to every LLM. Conure sends several calls in one request, so a
call cannot have its own headers."""


def refuse_unknown(owner: type[BaseModel], given: Any) -> Any:
    """Return the arguments of a class, unless one is not a field of it.

    Raises:
        ValueError: with the name of the argument.
    """
    if isinstance(given, Mapping):
        known = owner.model_fields
        if "additional_kwargs" in known:
            for name in given.keys() & _SAMPLING - known.keys():
                raise ValueError(
                    f"unknown argument {name}={given[name]!r} of {owner.__name__}; {name} is an "
                    f"option of calls: pass additional_kwargs={{{name!r}: {given[name]!r}}}"
                )
        check_arguments(given, known, owner.__name__)
    return given


def output_fields(
    settings: Mapping[str, Json], additional: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> dict[str, Json]:
    """Return the fields of an output.

    Args:
        settings: fields of the LLM.
        additional: its `additional_kwargs`, which override them.
        kwargs: arguments of the call, which override both.

    Raises:
        ValueError: if an argument is unknown, or has a value that cannot be honoured.
    """
    if "model" in additional:
        raise ValueError(
            f"additional_kwargs cannot set the model, got model={additional['model']!r}; set the "
            "field `model` of Conure"
        )
    if kwargs.get("constraint") is not None and kwargs.get("response_format") is not None:
        raise ValueError("give either constraint or response_format, not both")
    fields = dict(settings)
    for name, value in {**additional, **kwargs}.items():
        if name == "logprobs" and isinstance(value, bool):
            fields[name] = 0 if value else None
        elif name in _SAMPLING or name == "constraint":
            fields[name] = value
        elif name == "response_format":
            fields |= format_fields(value)
        elif name == "n":
            _check_one_answer(value)
        elif name not in (*_TOOL_FIELDS, *_NOT_FOR_THE_MODEL) and value is not None:
            raise ValueError(unknown_argument(name, value, _SAMPLING, "Conure"))
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    return {name: value for name, value in fields.items() if value not in (None, [])}


def tool_fields(options: Mapping[str, Any]) -> dict[str, Json]:
    """Return the fields of a node whose model may call tools; none without tools.

    LlamaIndex's agents pass the name of a tool as `tool_choice`.
    """
    if not options.get("tools"):
        return {}
    fields = {name: options[name] for name in _TOOL_FIELDS if options.get(name) is not None}
    choice = fields.get("tool_choice")
    if isinstance(choice, str) and choice not in _TOOL_MODES:
        fields["tool_choice"] = {"type": "function", "function": {"name": choice}}
    return fields


def format_fields(response_format: Any) -> dict[str, Json]:
    """Return the constraint of an OpenAI response format, or of a pydantic class.

    Raises:
        ValueError: if it is neither.
    """
    if response_format is None or response_format == {"type": "text"}:
        return {}
    if isinstance(response_format, type) and issubclass(response_format, BaseModel):
        schema = without_other_fields(response_format.model_json_schema())
        return {"constraint": {"json_schema": schema}}
    if isinstance(response_format, Mapping):
        if response_format.get("type") == "json_object":
            return {"constraint": {"json_schema": {"type": "object"}}}
        described = response_format.get("json_schema")
        if isinstance(described, Mapping) and isinstance(described.get("schema"), Mapping):
            return {"constraint": {"json_schema": dict(described["schema"])}}
    raise ValueError(
        "response_format must be {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
        f"{{'type': 'json_object'}} or a pydantic class, got {response_format!r}"
    )


def _check_one_answer(num_answers: Any) -> None:
    if num_answers not in (None, 1):
        raise ValueError(
            f"an answer of LlamaIndex is one text, got n={num_answers!r}; call the LLM several "
            "times, with other seeds"
        )
