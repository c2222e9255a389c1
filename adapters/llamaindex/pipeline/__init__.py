"""QueryPipeline of llama-index-core 0.12, which later cores lack.

`reader` reads a pipeline symbolically; `program` compiles a pipeline to a program; `run` plans the
calls of an accelerated pipeline; `core012` imports the classes of core 0.12. Only `to_program` is
importable on later cores.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from conure.server.program.errors import ProgramError

if TYPE_CHECKING:
    from .core012 import QueryPipeline
    from .program import CompiledPipeline


def to_program(pipeline: QueryPipeline, *, name: str = "pipeline") -> CompiledPipeline:
    """Compile a QueryPipeline to a program that runs as a whole on a server.

    Args:
        pipeline: its LLMs must be `Conure`.
        name: name of the program.

    Raises:
        ProgramError: `to_program.unsupported`, with the module that cannot be compiled, or for an
            app that is not a QueryPipeline.
    """
    if not _is_query_pipeline(pipeline):
        raise ProgramError(
            "to_program.unsupported",
            f"a {type(pipeline).__name__} cannot be compiled: to_program takes a QueryPipeline, "
            "which llama-index-core has up to version 0.12; use accelerate",
        )
    from .program import CompiledPipeline

    return CompiledPipeline(pipeline, name)


def _is_query_pipeline(app: Any) -> bool:
    if find_spec("llama_index.core.query_pipeline") is None:
        return False
    from .core012 import QueryPipeline

    return isinstance(app, QueryPipeline)
