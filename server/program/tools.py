"""The tools of a call, and which of them its answer may or must use.

Reads `tools` and `tool_choice` of a `generate` node, which are OpenAI's JSON. Refuses to
know how a model writes a call: that is its chat template's business.

Kept true: a tool set that was read has names that differ and that any template can print
between quotes, and a choice that names one of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from msgspec import UNSET

from .errors import ProgramError
from .ir import Generate, Json

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")

Choice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may ask for."""

    name: str
    parameters: dict[str, Json]
    """JSON schema of its arguments."""
    is_strict: bool
    """Arguments must keep the schema; else they keep what a grammar can enforce of it."""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of one call."""

    tools: tuple[Tool, ...]
    choice: Choice
    """`required`: the answer is a call of one of these; `none`: it is text."""
    is_parallel: bool
    """The answer may hold several calls."""


def read_tools(node: Generate) -> ToolSet | None:
    """The tools of a node; None if it has none.

    Raises:
        ProgramError: `program.tools` for tools or a choice that OpenAI would refuse as well;
            the path is relative to the node.
    """
    if node.tools is UNSET or not node.tools:
        if node.tool_choice not in (UNSET, None, "none", "auto"):
            raise _refusal("`tool_choice` needs `tools`", "tool_choice")
        return None
    tools = tuple(_read_tool(each, f"tools[{i}]") for i, each in enumerate(node.tools))
    known: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in known:
            raise _refusal(f"two tools are called {tool.name!r}", f"tools[{i}].function.name")
        known.add(tool.name)
    chosen, choice = _read_choice(node.tool_choice, tools)
    return ToolSet(chosen, choice, node.parallel_tool_calls and chosen == tools)


def _read_tool(tool: Json, path: str) -> Tool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind != "function":
        raise _refusal(f"a tool is an object of type 'function', not {kind!r}", path)
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refusal(
            f"{name!r} is no name of a function: letters, digits and _.:/- , at most 128",
            f"{path}.function.name",
        )
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise _refusal("`parameters` is a JSON schema", f"{path}.function.parameters")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise _refusal(
            f"`parameters` of {name} describe an object, not {parameters['type']!r}",
            f"{path}.function.parameters.type",
        )
    return Tool(
        name,
        {"type": "object", "properties": {}} if parameters is None else parameters,
        function.get("strict") is True,
    )


def _read_choice(choice: Json, tools: Sequence[Tool]) -> tuple[tuple[Tool, ...], Choice]:
    if choice is UNSET or choice is None or choice == "auto":
        return tuple(tools), "auto"
    if choice in ("none", "required"):
        return tuple(tools), choice
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        known = ", ".join(tool.name for tool in tools)
        raise _refusal(
            f"{choice!r} is none of 'auto', 'none', 'required' and an object that names one of "
            f"the tools ({known})",
            "tool_choice",
        )
    return chosen, "required"


def _refusal(message: str, path: str) -> ProgramError:
    return ProgramError("program.tools", message, path=path)
