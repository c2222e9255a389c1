"""Chains of many shapes, each with an input and the number of its planned calls.

Planned calls are counted over one run.
"""

from __future__ import annotations

from conure.adapters.langchain import ChatConure

from .apps import apps
from .compositions import compositions
from .decisions import decisions
from .functions import functions
from .models import models
from .prompts import prompts
from .shape import TEXT, Shape, ask

__all__ = ["TEXT", "Shape", "ask", "shapes"]


def shapes(llm: ChatConure) -> dict[str, Shape]:
    """Return all shapes, with calls to a model."""
    families = (compositions, prompts, functions, decisions, models, apps)
    return {name: shape for family in families for name, shape in family(llm).items()}
