"""Messages about arguments of the LLM classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from conure.server.program.suggestion import suggestion


def check_arguments(given: Mapping[str, Any], known: Collection[str], owner: str) -> None:
    """Check that a class knows all arguments that it was given.

    Raises:
        ValueError: see `unknown_argument`.
    """
    for name, value in given.items():
        if name not in known:
            raise ValueError(unknown_argument(name, value, known, owner))


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
