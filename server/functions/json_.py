"""`json.parse`: JSON in a text that a model wrote."""

from __future__ import annotations

from typing import Any

from ..program.expressions.evaluate import evaluate
from .registry import function


@function(timeout_s=5)
def parse(text: str) -> Any:
    """Parse JSON, also inside a code fence."""
    return evaluate({"parse_json": {"var": "text"}}, {"text": text})
