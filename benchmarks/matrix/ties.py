"""Different texts of one prompt that float32 explains: after their common beginning, the two best
tokens of the model are equally probable but for rounding, which depends on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx

MAX_DIFFERENCE: Final = 1e-4
"""Largest difference of the log probabilities of two equally good tokens. Two that are 9e-6 apart
alone were seen in the other order in a batch."""


def is_tie(url: str, prompt: str, first: str, second: str) -> bool:
    """Return whether a server's model prefers neither of two greedy texts.

    Args:
        url: of a Conure server whose model's tokens are bytes.
        prompt: of both texts.
        first: one text.
        second: another text.
    """
    pairs = enumerate(zip(first, second, strict=False))
    length = next((place for place, (one, other) in pairs if one != other), 0)
    common = first[:length]
    body = {
        "model": "default",
        "prompt": prompt + common,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    (best,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    expected = {text[length : length + 1] for text in (first, second)}
    return set(best) == expected and max(best.values()) - min(best.values()) <= MAX_DIFFERENCE


def prompt_of_single_call(program: Mapping[str, Any]) -> str | None:
    """Return the prompt of a program with one call, None if it has several calls."""
    if len(program["nodes"]) != 1:
        return None
    (node,) = program["nodes"]
    return "".join(part["text"] for part in node["prompt"] if "text" in part)
