"""Mutations of valid bodies: what a buggy or hostile client sends.

A mutation copies, moves, drops or replaces parts of a JSON document, so that most of the result is
well-formed. Some results are accepted.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

DOCUMENTED = sorted(Path(__file__).parents[1].glob("program/programs/*.json"))
ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 1e300, "", "x", "\u0000", "a" * 300, [], {}, [[]], {"var": "x"},
    {"lit": {}}, {"first": []}, {"each": [[1], "i", {"var": "i"}]}, {"range": [0, 50]},
)  # fmt: skip


def seeds() -> list[Any]:
    """Return the submissions of the documentation."""
    documents = [json.loads(path.read_text()) for path in DOCUMENTED]
    for document in documents:
        document.pop("append", None)
    return documents


def mutated(document: Any, rng: random.Random, *, others: list[Any]) -> Any:
    """Return a document with one to four random changes."""
    result = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        holders = [each for each in _containers(result) if each]
        if not holders:
            break
        _change(rng.choice(holders), rng, others)
    return result


def _change(holder: Any, rng: random.Random, others: list[Any]) -> None:
    key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    kind = rng.random()
    if kind < 0.25:
        holder[key] = rng.choice(ODD_VALUES)
    elif kind < 0.45:
        del holder[key]
    elif kind < 0.65 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif kind < 0.8:
        donors = _containers(rng.choice(others))
        holder[key] = copy.deepcopy(rng.choice(donors))
    elif isinstance(holder, dict):
        holder[rng.choice((f"{key}x", "when", "after", "retries", "on_error", "id"))] = holder[key]
    elif isinstance(holder[key], str):
        holder[key] = rng.choice((holder[key] * 2, holder[key][:-1], holder[key].upper()))


def _containers(document: Any) -> list[Any]:
    found, stack = [], [document]
    while stack:
        each = stack.pop()
        if isinstance(each, dict | list):
            found.append(each)
            stack += each.values() if isinstance(each, dict) else each
    return found
