"""QueryPipeline of llama-index-core 0.12, which later cores lack.

`reader` reads a pipeline symbolically; `program` compiles a pipeline to a program; `run` plans the
calls of an accelerated pipeline; `core012` imports the classes of core 0.12. Only `to_program` is
importable on later cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core012 import QueryPipeline
    from .program import CompiledPipeline


def to_program(pipeline: QueryPipeline, *, name: str = "pipeline") -> CompiledPipeline:
    """Compile a QueryPipeline to a program that runs as a whole on a server.

    Args:
        pipeline: its LLMs must be `Conure`.
        name: of the program.

    Raises:
        ImportError: if llama-index-core is not 0.12.
        ProgramError: `to_program.unsupported`, with the module that cannot be compiled.
    """
    from .program import CompiledPipeline

    return CompiledPipeline(pipeline, name)
