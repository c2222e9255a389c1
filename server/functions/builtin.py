"""The functions that every server has, within the limits of steps and sizes of expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .calc import calculate
from .json_ import parse
from .lists import LIST_FUNCTIONS
from .text import extract, fill_template
from .vote import vote

BUILTIN: Mapping[str, Callable[..., Any]] = {
    "json.parse": parse,
    "regex.extract": extract,
    "text.template": fill_template,
    "calc": calculate,
    "vote": vote,
    **LIST_FUNCTIONS,
}
