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
        url: address of a Conure server whose model's tokens are bytes.
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


def count_ties(
    url: str, program: Mapping[str, Any], first: Mapping[str, str], second: Mapping[str, str]
) -> int | None:
    """Return how many calls of a program have a tie, None if a call differs for another reason.

    A call that reads a different text has another prompt, and is not compared.

    Args:
        url: address of a server with the program's model.
        program: its nodes are calls, each after those that it reads.
        first: the texts of the calls in one run.
        second: the texts in another run.
    """
    different: set[str] = set()
    num_ties = 0
    for node in program["nodes"]:
        *parts, output = node["prompt"]
        name = output["output"]
        if different.intersection(part.get("input", "") for part in parts):
            different.add(name)
        elif first[name] != second[name]:
            prompt = "".join(
                part["text"] if "text" in part else first[part["input"]] for part in parts
            )
            if not is_tie(url, prompt, first[name], second[name]):
                return None
            different.add(name)
            num_ties += 1
    return num_ties


def texts_of(url: str, program_id: str) -> dict[str, str]:
    """Return the texts of all calls of a program that a server has run."""
    status = httpx.get(f"{url}/v1/programs/{program_id}", timeout=60).raise_for_status().json()
    return {name: each["value"] for name, each in status["variables"].items() if "value" in each}
