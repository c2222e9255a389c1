"""Thirty LangChain apps in the patterns of public cookbooks, in code of our own.

`cookbook(llm)` returns each by name, as a chain with an input. All code except the model is
deterministic, so a chain has the same result however it is run.
"""

from __future__ import annotations

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables.base import coerce_to_runnable

from .deciding import DECIDING_APPS
from .kit import App, Kit
from .retrieval import RETRIEVAL_APPS
from .writing import WRITING_APPS

__all__ = ["App", "cookbook"]


def cookbook(llm: BaseChatModel) -> dict[str, App]:
    """Return all apps by name."""
    kit = Kit(llm)
    made = {each.__name__: each(kit) for each in (*RETRIEVAL_APPS, *WRITING_APPS, *DECIDING_APPS)}
    return {name: App(coerce_to_runnable(app.chain), app.given) for name, app in made.items()}
