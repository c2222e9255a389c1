"""Conure for LlamaIndex: an LLM, and whole query engines on one server.

Re-exports `conure.adapters.llamaindex`.
"""

from conure.adapters.llamaindex import (
    CallReport,
    Conure,
    ConureEmbedding,
    Report,
    accelerate,
    conure_run,
    explain,
    to_program,
)

__all__ = [
    "CallReport",
    "Conure",
    "ConureEmbedding",
    "Report",
    "accelerate",
    "conure_run",
    "explain",
    "to_program",
]
