"""Paths of parts of a value, which become text only in a message.

A key may be long and its value may have many parts, so the path of a part links to the path of the
value around it and copies no text.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MAX_KEY: Final = 80
"""Characters of a key in a message."""


class Path(NamedTuple):
    """The place of a part: the path of the value around it, and its key or index there."""

    parent: Path | str
    part: str | int

    def __str__(self) -> str:
        parts: list[str] = []
        path: Path | str = self
        while isinstance(path, Path):
            is_index = isinstance(path.part, int)
            parts.append(f"[{path.part}]" if is_index else f".{shown_key(str(path.part))}")
            path = path.parent
        text = "".join(reversed(parts))
        return path + text if path else text.removeprefix(".")


def shown_key(key: str) -> str:
    """Return the beginning of a key, for a message."""
    return key[:MAX_KEY]
