"""Messages about arguments of the LLM classes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from conure.server.program.suggestion import suggestion


def unknown_argument(name: str, value: Any, known: Collection[str], owner: str) -> str:
    """Return the message about an argument that does not exist.

    Args:
        name: name of the argument.
        value: value of the argument.
        known: the arguments that exist.
        owner: name of the class.
    """
    hint = suggestion(name, known, f"it has {', '.join(sorted(known))}")
    return f"unknown argument {name}={value!r} of {owner}; {hint}"
