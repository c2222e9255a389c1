"""A LlamaIndex QueryPipeline, run by LlamaIndex, accelerated, and as one program.

Two questions about a report are answered in parallel, combined by a function, and joined by a last
call. llama-index-core 0.13 removed QueryPipeline; this example needs the last core that has it:
`pip install . 'llama-index-core==0.12.52.post1'`. Start a server first: `conure serve`.
"""

# That core is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from typing import Any

from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_pipeline import (
    FnComponent,
    InputComponent,
    QueryPipeline,
)

from conure import Client
from conure.adapters.llamaindex import Conure, accelerate, explain, to_program
from show import cost, run_example

REPORT = "The driver was Pavel Orlin. The road was closed. The guard was Tessa Brook."
ROLES = ("guard", "driver")


def findings(guard: Any, driver: Any) -> str:
    """Return both answers as a list. Any Python function works here."""
    return "\n".join(f"- {answer.message.content}" for answer in (guard, driver))


def build(llm: Conure) -> QueryPipeline:
    """Return the pipeline from a report to its people."""
    pipeline = QueryPipeline()
    pipeline.add_modules(
        {
            "report": InputComponent(),
            "findings": FnComponent(fn=findings),
            "join": PromptTemplate("Join the findings:\n{findings}"),
            "joined": llm,
        }
    )
    for role in ROLES:
        ask = PromptTemplate(f"{{report}}\n\nWho was the {role}?")
        pipeline.add_modules({f"ask_{role}": ask, role: llm})
        pipeline.add_link("report", f"ask_{role}", src_key="report", dest_key="report")
        pipeline.add_link(f"ask_{role}", role)
        pipeline.add_link(role, "findings", dest_key=role)
    pipeline.add_chain(["findings", "join", "joined"])
    return pipeline


def compare(client: Client) -> None:
    """Run the pipeline in all three ways and print the answers."""
    pipeline = build(Conure(client=client, temperature=0, max_tokens=48))
    fast = accelerate(pipeline)
    print(f"report    {REPORT}\nasked     who was the {' and who the '.join(ROLES)}")
    plain = pipeline.run(report=REPORT)
    print(f"plain     {plain.message.content}")
    ahead = fast.run(report=REPORT)
    print(f"ahead     {ahead.message.content}")
    whole, result = to_program(pipeline, name="people").execute(client, report=REPORT)
    print(f"whole     {whole.message.content}\n")
    print(explain(fast))
    print(f"server    as one program: {cost(result.receipt)}, 1 client step")


if __name__ == "__main__":
    sys.exit(run_example("llamaindex_query_pipeline", compare))
