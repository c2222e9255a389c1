"""A LlamaIndex tree summary of reports, accelerated.

The Workflow is ordinary LlamaIndex: one question about each report (the leaves), and a call that
joins the findings (the root). Each call is a request. `accelerate` returns the same Workflow with
all calls of a run in one program: when a synthesizer starts, its calls are submitted together.

Start a server first: `conure serve`. Needs `pip install '.[llamaindex]'`.
"""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import Accumulate, TreeSummarize
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step

from conure import Client
from conure.adapters.llamaindex import Conure, accelerate, explain
from show import cost, run_example

REPORTS = (
    "It happened in Malbury. The guard was Tessa Brook. The accident hurt Jonas Wenk.",
    "The inspector was Mira Dolan. Nobody was hurt. The place was Kolvar. The road was closed.",
    "The date was 12 May. One person was hurt: Ruth Sandberg. The driver is called Pavel Orlin.",
    "The damage was 340 crowns. The accident hurt Emil Hartson. It happened in Tarnby.",
    "The train was late. Nobody was hurt. The captain was Lena Moritz. The police came.",
)
QUESTION = "Who was hurt?"


class Findings(Event):
    """Findings of the leaves, one per line."""

    lines: str


class Summary(Workflow):
    """Asks a question about each report and joins the answers."""

    def __init__(self, llm: Conure) -> None:
        super().__init__()
        ask = PromptTemplate("{context_str}\n\n{query_str}")
        join = PromptTemplate("Join the findings:\n{context_str}")
        self._leaves = Accumulate(llm=llm, text_qa_template=ask)
        self._root = TreeSummarize(llm=llm, summary_template=join)

    @step
    async def ask(self, _: StartEvent) -> Findings:
        """Ask the question about each report."""
        answers = await self._leaves.asynthesize(QUESTION, nodes=nodes(*REPORTS), separator="\n")
        # LlamaIndex writes "Response 1: ..."; the model was trained on "Report 1: ...".
        return Findings(lines=str(answers).replace("Response", "Report"))

    @step
    async def join(self, findings: Findings) -> StopEvent:
        """Join the findings."""
        summary = await self._root.asynthesize("", nodes=nodes(findings.lines))
        return StopEvent(result=f"{findings.lines}\n{summary}")


def nodes(*texts: str) -> list[NodeWithScore]:
    """Return texts in the form that a retriever returns."""
    return [NodeWithScore(node=TextNode(text=text)) for text in texts]


async def summarise(app: Summary) -> str:
    """Run the Workflow; return its summary."""
    return str(await app.run())


def compare(client: Client) -> None:
    """Summarise the reports with and without acceleration, and compare."""
    plain = Summary(Conure(client=client, temperature=0, max_tokens=48))
    accelerated = accelerate(plain)
    print("\n".join(f"report    {report}" for report in REPORTS))
    expected, summary = (asyncio.run(summarise(app)) for app in (plain, accelerated))
    print(f"\n{QUESTION}\n{summary}\n\nsame      {'yes' if expected == summary else 'no'}")
    report = explain(accelerated)
    receipt = client.attach(report.programs[0]).receipt()
    print(f"server    {report.num_planned} served from the plan; {cost(receipt)}")


if __name__ == "__main__":
    sys.exit(run_example("llamaindex_tree_summary", compare))
