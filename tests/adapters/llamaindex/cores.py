"""What the installed llama-index-core can do, for tests that run on every supported core."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.response_synthesizers import refine as refine_module

CORE: Final = tuple(int(part) for part in version("llama-index-core").split(".")[:3])
HAS_QUERY_PIPELINE: Final = CORE < (0, 13)
STREAMS_STRUCTURED: Final = "stream_call" in vars(LLMTextCompletionProgram)
"""A structured answer can be streamed."""
RESERVES_ANSWERS: Final = hasattr(refine_module, "DEFAULT_RESPONSE_PADDING_SIZE")
"""`Refine` leaves room for an answer in every chunk, so that no chunk is split later."""

__all__ = ["CORE", "HAS_QUERY_PIPELINE", "RESERVES_ANSWERS", "STREAMS_STRUCTURED"]
