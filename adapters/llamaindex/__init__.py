"""LlamaIndex and Conure: an LLM for core 0.12 and 0.14, and apps whose calls are planned.

`Conure` is an LLM like any other, for an app that runs as LlamaIndex runs it.

    from conure.adapters.llamaindex import Conure

    engine = index.as_query_engine(llm=Conure(temperature=0))
"""

from .llm import Conure

__all__ = ["Conure"]
