"""Fifteen LlamaIndex apps in the patterns of public notebooks, in code of our own.

`cookbook(llm)` returns each by name. All code except the model is deterministic, so that an app has
the same result however it is run. `SCRIPT` has the answers that apps parse.
"""

from __future__ import annotations

from llama_index.core.llms import LLM

from .ingestion import ingestion_apps
from .kit import SCRIPT, LlamaIndexApp, LlamaIndexKit
from .retrieval import retrieval_apps
from .workflows import workflow_apps

__all__ = ["SCRIPT", "LlamaIndexApp", "cookbook"]


def cookbook(llm: LLM, *, streaming: bool = False) -> dict[str, LlamaIndexApp]:
    """Return all apps by name; with `streaming`, query engines answer in streams."""
    kit = LlamaIndexKit(llm, streaming=streaming)
    return {**retrieval_apps(kit), **ingestion_apps(kit), **workflow_apps(kit)}
