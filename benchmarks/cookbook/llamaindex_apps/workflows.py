"""Workflows: apps whose steps are functions, with their own engines and calls."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.schema import QueryBundle
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step

from .kit import QUESTION, LlamaIndexApp, LlamaIndexKit, aanswer_of

LIMIT_S = 120


class Retrieved(Event):
    """Chunks that a search found."""

    nodes: list[Any]


class Graded(Event):
    """Chunks, with the model's grade of each."""

    nodes: list[Any]
    grades: list[str]


class CorrectiveRag(Workflow):
    """Grade every chunk that was found; rewrite the question if too few are relevant; answer."""

    kit: LlamaIndexKit

    @step
    async def search(self, ev: StartEvent) -> Retrieved:
        engine = self.kit.engine("compact", top_k=5)
        return Retrieved(nodes=await engine.aretrieve(QueryBundle(ev.question)))

    @step
    async def grade(self, ev: Retrieved) -> Graded:
        asked = [
            self.kit.llm.acomplete(f"Is this on {QUESTION!r}? {each.node.get_content()}")
            for each in ev.nodes
        ]
        return Graded(nodes=ev.nodes, grades=[str(each) for each in await asyncio.gather(*asked)])

    @step
    async def answer(self, ev: Graded) -> StopEvent:
        question = QUESTION
        good = [n for n, grade in zip(ev.nodes, ev.grades, strict=True) if len(grade) % 2]
        if len(good) < 3:
            question = str(await self.kit.llm.acomplete(f"Rewrite the question: {question}"))
            good = ev.nodes
        response = await self.kit.synthesizer("refine").asynthesize(question, good)
        return StopEvent(result=await aanswer_of(response))


class SeveralStrategies(Workflow):
    """Answer in three ways at the same time, and let the model choose."""

    kit: LlamaIndexKit

    @step
    async def compare(self, ev: StartEvent) -> StopEvent:
        modes = ("refine", "tree_summarize", "accumulate")
        asked = (self.kit.engine(mode).aquery(ev.question) for mode in modes)
        found = [(await aanswer_of(each))[0] for each in await asyncio.gather(*asked)]
        listed = "\n".join(f"{n}: {text}" for n, text in enumerate(found))
        best = await self.kit.llm.acomplete(f"{ev.question} Which answer is best?\n{listed}")
        return StopEvent(result=[*found, str(best)])


class Outline(Event):
    """The sections of a report."""

    sections: list[str]


class ReportWriter(Workflow):
    """Outline a report, answer every section from its sources, and summarise the whole."""

    kit: LlamaIndexKit

    @step
    async def plan(self, ev: StartEvent) -> Outline:
        words = str(await self.kit.llm.acomplete(f"Outline a report on {ev.question}")).split()
        return Outline(sections=[" ".join(words[n::3]) or "the rest" for n in range(3)])

    @step
    async def write(self, ev: Outline) -> StopEvent:
        engine = self.kit.engine("refine", top_k=3)
        made = (engine.aquery(f"Write the section {each}.") for each in ev.sections)
        texts = [(await aanswer_of(each))[0] for each in await asyncio.gather(*made)]
        whole = (
            await LlamaIndexKit(self.kit.llm)
            .synthesizer("tree_summarize")
            .aget_response("Write the summary.", texts)
        )
        return StopEvent(result=[*texts, str(whole)])


class SelfDiscover(Workflow):
    """Choose ways of reasoning, adapt them to the task, make a plan, and follow it."""

    kit: LlamaIndexKit

    @step
    async def reason(self, ev: StartEvent) -> StopEvent:
        text = ev.question
        for order in ("Choose ways to solve", "Adapt them to", "Make a plan for", "Follow"):
            text = str(await self.kit.llm.acomplete(f"{order}: {text}"))
        return StopEvent(result=text)


def _app(workflow: Any, kit: LlamaIndexKit) -> LlamaIndexApp:
    workflow.kit = kit

    async def arun(app: Any) -> Any:
        return await app.run(question=QUESTION)

    return LlamaIndexApp(workflow, None, arun)


def workflow_apps(kit: LlamaIndexKit) -> dict[str, LlamaIndexApp]:
    """Return the apps of this module by name."""
    return {
        "corrective_rag": _app(CorrectiveRag(timeout=LIMIT_S), kit),
        "several_strategies": _app(SeveralStrategies(timeout=LIMIT_S), kit),
        "report_writer": _app(ReportWriter(timeout=LIMIT_S), kit),
        "self_discover": _app(SelfDiscover(timeout=LIMIT_S), kit),
    }
