"""The tools of an LLM call, and which of them its answer may or must use.

`tools` and `tool_choice` of a `generate` node are OpenAI's JSON.

Out of scope: how a model writes a tool call; its chat template defines that.

Invariants: the tools of a set have different names, which any template can print between quotes,
and the choice names one of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from msgspec import UNSET, UnsetType

from .content import Json
from .errors import ProgramError

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")

Choice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    parameters: dict[str, Json]
    """The JSON schema of the arguments."""
    is_strict: bool
    """Whether arguments must match the schema; else only what a grammar can enforce of it."""


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of one LLM call."""

    tools: tuple[Tool, ...]
    choice: Choice
    """`required`: the answer is a call of one of the tools; `none`: it is text."""
    is_parallel: bool
    """Whether the answer may have several tool calls."""


class _CallWithTools(Protocol):
    @property
    def tools(self) -> list[Json] | UnsetType: ...

    @property
    def tool_choice(self) -> Json | UnsetType: ...

    @property
    def parallel_tool_calls(self) -> bool: ...


def read_tools(node: _CallWithTools) -> ToolSet | None:
    """Return the tools of a generate node; None if it has none.

    Raises:
        ProgramError: `program.tools`, for tools or a choice that OpenAI would refuse as well;
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
            raise _refusal(f"two tools have the name {tool.name!r}", f"tools[{i}].function.name")
        known.add(tool.name)
    chosen, choice = _read_choice(node.tool_choice, tools)
    return ToolSet(chosen, choice, node.parallel_tool_calls and chosen == tools)


def _read_tool(tool: Json, path: str) -> Tool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or kind != "function":
        raise _refusal(f"a tool must be an object with type 'function', got {kind!r}", path)
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refusal(
            f"invalid function name {name!r}: use letters, digits and _.:/- (at most 128)",
            f"{path}.function.name",
        )
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise _refusal("`parameters` must be a JSON schema", f"{path}.function.parameters")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise _refusal(
            f"`parameters` of {name} must have type 'object', got {parameters['type']!r}",
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
            f"invalid `tool_choice` {choice!r}: must be 'auto', 'none', 'required' or an object "
            f"that names one of the tools ({known})",
            "tool_choice",
        )
    return chosen, "required"


def _refusal(message: str, path: str) -> ProgramError:
    return ProgramError("program.tools", message, path=path)
