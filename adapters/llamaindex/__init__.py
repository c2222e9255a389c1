"""LlamaIndex and Conure: an LLM for core 0.12 and 0.14, and apps whose calls are planned.

`Conure` is an LLM like any other, for an app that runs as LlamaIndex runs it. `accelerate`
gives back an app that does the same sooner: what its response synthesizers and extractors
are going to ask for is submitted as one program. `explain` says what came of it.

    from conure.adapters.llamaindex import Conure, accelerate, explain

    engine = accelerate(index.as_query_engine(llm=Conure(), response_mode="tree_summarize"))
    print(engine.query("What happened?"))
    print(explain(engine))

On core 0.12, `accelerate` takes a QueryPipeline, and `pipeline_program.to_program` reads one
into a program that runs whole.
"""

from .accelerate import accelerate, explain
from .llm import Conure
from .report import CallReport, Report

__all__ = ["CallReport", "Conure", "Report", "accelerate", "explain"]
