"""The LlamaIndex adapter, for llama-index-core 0.12 to 0.14.

`Conure` is an LLM on a Conure server. `accelerate` returns an app with the same results: the calls
of its response synthesizers and extractors are submitted ahead as one program. `explain` reports
which calls were served from the plan.

    from conure.adapters.llamaindex import Conure, accelerate, explain

    engine = accelerate(index.as_query_engine(llm=Conure(), response_mode="tree_summarize"))
    print(engine.query("What happened?"))
    print(explain(engine))

`conure_run` does the same for the code of a `with` block. On core 0.12, `accelerate` also takes a
QueryPipeline, and `to_program` compiles one to a program that runs as a whole on the server.
"""

try:
    from .acceleration.accelerate import accelerate, conure_run, explain
    from .acceleration.report import CallReport, Report
    from .embedding import ConureEmbedding
    from .llm.llm import Conure
    from .pipeline import to_program
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "llama_index":
        raise
    raise ModuleNotFoundError(
        "conure.adapters.llamaindex needs llama-index-core: pip install 'conure[llamaindex]'",
        name=error.name,
    ) from error

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
