"""The options of a call: the fields of the LLM, overridden by the arguments of the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conure.server.program.ir import Json, Sampling

_SAMPLING: Final = frozenset(Sampling.__struct_fields__)
_TOOL_FIELDS: Final = ("parallel_tool_calls", "tool_choice", "tools")
_NOT_FOR_THE_MODEL: Final = ("model", "extra_headers")
"""Arguments that are not part of an output. LlamaIndex's `DocumentContextExtractor` passes
`extra_headers` for another provider to every LLM; calls of Conure share their requests."""


def output_fields(
    settings: Mapping[str, Json], additional: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> dict[str, Json]:
    """Return the fields of an output.

    Args:
        settings: fields of the LLM.
        additional: its `additional_kwargs`, which override them.
        kwargs: arguments of the call, which override both.

    Raises:
        ValueError: if an argument is unknown.
    """
    fields = dict(settings)
    for name, value in {**additional, **kwargs}.items():
        if name == "logprobs" and isinstance(value, bool):
            fields[name] = 0 if value else None
        elif name in _SAMPLING or name == "constraint":
            fields[name] = value
        elif name not in (*_TOOL_FIELDS, *_NOT_FOR_THE_MODEL) and value is not None:
            raise ValueError(f"unknown argument {name}={value!r} of Conure")
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    return {name: value for name, value in fields.items() if value not in (None, [])}


def tool_fields(kwargs: Mapping[str, Any]) -> dict[str, Json]:
    """Return the fields of a node whose model may call tools; none without tools."""
    if not kwargs.get("tools"):
        return {}
    return {name: kwargs[name] for name in _TOOL_FIELDS if kwargs.get(name) is not None}
