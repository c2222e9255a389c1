"""Mutations of valid bodies: what a buggy or hostile client sends.

A mutation copies, moves, drops or replaces parts of a JSON document, so that most of the result is
well-formed. Some results are accepted.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RECORDED = sorted(Path(__file__).parents[1].glob("program/programs/*.json"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
_JSON_BLOCK = re.compile(r"^```json\n(.*?)^```", re.MULTILINE | re.DOTALL)
ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, 1e300, "", "x", "\u0000", "a" * 300, [], {}, [[]], {"var": "x"},
    {"lit": {}}, {"first": []}, {"each": [[1], "i", {"var": "i"}]}, {"range": [0, 50]},
)  # fmt: skip


def seeds() -> list[Any]:
    """Return the submissions of the tests and of the documentation."""
    documents = [json.loads(path.read_text()) for path in RECORDED]
    for document in documents:
        document.pop("append", None)
    documented = [each for page in PAGES for each in _submissions_of(page.read_text())]
    assert documented, "the documentation has no programs"
    return documents + documented


def _submissions_of(page: str) -> Iterator[Any]:
    """Yield the submissions, and the nodes as programs, in the JSON blocks of a page."""
    for block in _JSON_BLOCK.findall(page):
        try:
            document = json.loads(block)
        except json.JSONDecodeError:
            continue  # an excerpt
        if not isinstance(document, dict):
            continue
        if "program" in document or "source" in document:
            yield document
        elif "nodes" in document:
            yield {"program": document}
        elif "op" in document:
            yield {"program": {"nodes": [document]}}


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
        holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif kind < 0.45:
        del holder[key]
    elif kind < 0.65 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif kind < 0.8:
        donors = _containers(rng.choice(others))
        holder[key] = copy.deepcopy(rng.choice(donors))
    elif isinstance(holder, dict):
        other = rng.choice((f"{key}x", "when", "after", "retries", "on_error", "id"))
        holder[other] = copy.deepcopy(holder[key])
    elif isinstance(holder[key], str):
        text = holder[key]
        at = rng.randrange(len(text) + 1)
        holder[key] = rng.choice(
            (text * 2, text[:-1], text.upper(), text[:at] + text[at + 4 :], text[:at] + text)
        )


def _containers(document: Any) -> list[Any]:
    found, stack = [], [document]
    while stack:
        each = stack.pop()
        if isinstance(each, dict | list):
            found.append(each)
            stack += each.values() if isinstance(each, dict) else each
    return found
