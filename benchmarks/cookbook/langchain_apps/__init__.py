"""Thirty LangChain apps in the patterns of public cookbooks, in code of our own.

`cookbook(llm)` returns each by name, as a chain with an input. All code except the model is
deterministic, so a chain has the same result however it is run.
"""

from __future__ import annotations

from langchain_core.language_models import BaseChatModel
from langchain_core.runnables.base import coerce_to_runnable

from .deciding import DECIDING_APPS
from .kit import LangChainApp, LangChainKit
from .retrieval import RETRIEVAL_APPS
from .writing import WRITING_APPS

__all__ = ["LangChainApp", "cookbook"]


def cookbook(llm: BaseChatModel) -> dict[str, LangChainApp]:
    """Return all apps by name."""
    kit = LangChainKit(llm)
    made = {each.__name__: each(kit) for each in (*RETRIEVAL_APPS, *WRITING_APPS, *DECIDING_APPS)}
    return {
        name: LangChainApp(coerce_to_runnable(app.chain), app.given) for name, app in made.items()
    }
