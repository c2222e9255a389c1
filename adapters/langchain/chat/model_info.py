"""The profile of a model: what it can do, and the context length that its server reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

_CAPABILITIES: Final[dict[str, Any]] = {
    "text_inputs": True,
    "text_outputs": True,
    "image_inputs": False,
    "audio_inputs": False,
    "video_inputs": False,
    "pdf_inputs": False,
    "tool_calling": True,
    "tool_choice": True,
    "structured_output": True,
}
"""Capabilities of every model of a Conure server."""

_CONTEXT: Final = "max_input_tokens"


class ServerProfile(dict[str, Any]):
    """A `ModelProfile` that requests the context length from the server when it is read."""

    def __init__(self, max_input_tokens: Callable[[], int | None]) -> None:
        super().__init__(_CAPABILITIES)
        self._max_input_tokens = max_input_tokens

    def __contains__(self, key: object) -> bool:
        return key == _CONTEXT or super().__contains__(key)

    def __missing__(self, key: str) -> Any:
        if key != _CONTEXT:
            raise KeyError(key)
        self[key] = self._max_input_tokens()
        return self[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field of the profile.

        Raises:
            UnavailableError: if the context length is read and the server does not answer.
        """
        value = self[key] if key in self else None  # noqa: SIM401 - dict's `get` skips `__missing__`
        return default if value is None else value
