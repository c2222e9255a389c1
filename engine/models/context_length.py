"""The longest context that a model computes correctly.

A rotary embedding that changes with the length of a sequence is correct up to that length only,
because keys are stored rotated and cannot be rotated again.
"""

from __future__ import annotations

from typing import Any

from .llama_config import DecoderConfig


def max_length(config: DecoderConfig) -> tuple[int | None, str]:
    """Return the maximum tokens of a context, None without a limit, and the reason."""
    ropes = _ropes(config)
    length = _supported(config, ropes)
    reason = f"the model supports {length} tokens"
    for rope in ropes:
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


def _supported(config: DecoderConfig, ropes: list[dict[str, Any]]) -> int | None:
    """Return the maximum of the config, or more if YaRN lengthens a shorter original context.

    Configs may keep the original maximum, as the model cards of Qwen advise.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    for rope in ropes:
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if rope.get("rope_type", rope.get("type")) != "yarn" or length is None:
            continue
        if isinstance(factor, int | float) and isinstance(original, int):
            length = max(length, int(factor * original))
    return length


def _ropes(config: DecoderConfig) -> list[dict[str, Any]]:
    """Return the parameters of all rotary embeddings. There may be one per layer type."""
    found: list[dict[str, Any]] = []
    for name in ("rope_parameters", "rope_scaling"):
        parameters = getattr(config, name, None) or {}
        found += [one for one in (parameters, *parameters.values()) if isinstance(one, dict)]
    return found
