"""A LlamaIndex summary of reports as a tree, its calls planned ahead.

The Workflow is ordinary LlamaIndex: one question to every report (the leaves), and then what was
found, joined (the root); every call is a request. `accelerate` gives back the same Workflow:
all calls of a run are one program, and when a synthesizer begins, its calls are submitted
together and find their answers there.

Start a server first: `conure serve`. Needs `pip install conure[llamaindex]`.
"""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.prompts import PromptTemplate
from llama_index.core.response_synthesizers import Accumulate, TreeSummarize
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step

from conure.adapters.client import Client
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


class Found(Event):
    """What the leaves said, a line for each."""

    lines: str


class Summary(Workflow):
    """A question to every report, and the answers joined."""

    def __init__(self, llm: Conure) -> None:
        super().__init__()
        ask = PromptTemplate("{context_str}\n\n{query_str}")
        join = PromptTemplate("Join the findings:\n{context_str}")
        self._leaves = Accumulate(llm=llm, text_qa_template=ask)
        self._root = TreeSummarize(llm=llm, summary_template=join)

    @step
    async def ask(self, _: StartEvent) -> Found:
        """Asks each report."""
        said = await self._leaves.asynthesize(QUESTION, nodes=nodes(*REPORTS), separator="\n")
        # LlamaIndex numbers them as "Response 1: ..."; the model knows reports.
        return Found(lines=str(said).replace("Response", "Report"))

    @step
    async def join(self, found: Found) -> StopEvent:
        """Joins what they said."""
        whole = await self._root.asynthesize("", nodes=nodes(found.lines))
        return StopEvent(result=f"{found.lines}\n{whole}")


def nodes(*texts: str) -> list[NodeWithScore]:
    """Texts as a retriever would give them."""
    return [NodeWithScore(node=TextNode(text=text)) for text in texts]


async def summarise(app: Summary) -> str:
    """What the Workflow comes to."""
    return str(await app.run())


def compare(client: Client) -> None:
    """Summarises the reports twice, plain and accelerated, and prints what came of it."""
    plain = Summary(Conure(client=client, temperature=0, max_tokens=48))
    fast = accelerate(plain)
    print("\n".join(f"report    {report}" for report in REPORTS))
    asked, ahead = (asyncio.run(summarise(app)) for app in (plain, fast))
    print(f"\n{QUESTION}\n{ahead}\n\nsame      {'yes' if asked == ahead else 'no'}")
    report = explain(fast)
    receipt = client.attach(report.programs[0]).receipt()
    print(f"server    {report.num_planned} served from the plan; {cost(receipt)}")


if __name__ == "__main__":
    sys.exit(run_example("llamaindex_tree_summary", compare))
