"""A LlamaIndex QueryPipeline, run as it is, planned ahead, and as one program.

Two points of view on a topic are written side by side, joined by a function, and weighed.
QueryPipeline went with llama-index-core 0.13; this needs the last core that has it:
`pip install conure 'llama-index-core==0.12.52.post1'`. Start a server first: `conure serve`.
"""

# The core that has it is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import sys
from typing import Any

from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_pipeline import (
    FnComponent,
    InputComponent,
    QueryPipeline,
)

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, accelerate, explain
from conure.adapters.llamaindex.pipeline_program import to_program
from conure.server.program.errors import ConureError


def both_sides(one: Any, other: Any) -> str:
    """The two texts, under each other; any function of yours could stand here."""
    return "\n\n".join(f"- {side.message.content}" for side in (one, other))


def build(llm: Conure) -> QueryPipeline:
    """The pipeline: a topic in, the verdict out."""
    pipeline = QueryPipeline()
    pipeline.add_modules(
        {
            "topic": InputComponent(),
            "for_prompt": PromptTemplate("In two sentences, argue for this: {topic}"),
            "for": llm,
            "against_prompt": PromptTemplate("In two sentences, argue against this: {topic}"),
            "against": llm,
            "sides": FnComponent(fn=both_sides),
            "verdict_prompt": PromptTemplate(
                "Two sides:\n\n{sides}\n\nWhich is stronger, and why?"
            ),
            "verdict": llm,
        }
    )
    for side, key in (("for", "one"), ("against", "other")):
        pipeline.add_link("topic", f"{side}_prompt", src_key="topic", dest_key="topic")
        pipeline.add_link(f"{side}_prompt", side)
        pipeline.add_link(side, "sides", dest_key=key)
    pipeline.add_chain(["sides", "verdict_prompt", "verdict"])
    return pipeline


def main() -> int:
    """Runs the pipeline in all three ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of the server; default: CONURE_URL or 127.0.0.1:8400")
    parser.add_argument("--topic", default="Cities should have no cars.")
    options = parser.parse_args()
    try:
        with Client(options.url) as client:
            pipeline = build(Conure(client=client, temperature=0, max_tokens=64))
            fast = accelerate(pipeline)
            plain = pipeline.run(topic=options.topic)
            planned = fast.run(topic=options.topic)
            whole, result = to_program(pipeline, name="verdict").execute(
                client, topic=options.topic
            )
    except ConureError as problem:
        print(f"llamaindex_query_pipeline: {problem}", file=sys.stderr)
        return 1
    print(whole.message.content)
    print(f"same answer  {'yes' if str(plain) == str(planned) == str(whole) else 'no'}")
    print(explain(fast))
    print(f"as a program {result.receipt.calls} calls, 1 client step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
