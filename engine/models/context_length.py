"""The longest context that a model computes correctly.

A rotary embedding that changes with the length of a sequence is correct up to that length only,
because keys are stored rotated and cannot be rotated again.
"""

from __future__ import annotations

from typing import Any

from .llama_config import DecoderConfig


def max_length(config: DecoderConfig) -> tuple[int | None, str]:
    """Return the maximum tokens of a context, None without a limit, and the reason."""
    length: int | None = getattr(config, "max_position_embeddings", None)
    reason = f"the model supports {length} tokens"
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in ("dynamic", "longrope"):
            continue
        switch = length
        if kind == "longrope":
            switch = rope.get("original_max_position_embeddings", length)
        if switch is not None and (length is None or switch <= length):
            length = int(switch)
            reason = f"its {kind} rotary embedding changes beyond {switch} tokens"
    return length, reason


def _ropes(config: DecoderConfig) -> list[dict[str, Any]]:
    """Return the parameters of all rotary embeddings. There may be one per layer type."""
    found: list[dict[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None) or {}
        found += [one for one in (parameters, *parameters.values()) if isinstance(one, dict)]
    return found
