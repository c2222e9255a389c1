"""The six applications as LangChain chains: a stage of parallel calls after another.

Every call is a prompt template, a chat model and a text parser, as a developer would write it.
The result of a chain is the outputs of its application.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from apps.client import AppAnswer
from apps.scaled_workloads import ScheduledProgram

MakeModel = Callable[[int], BaseChatModel]
"""Returns a model whose answers have exactly that many tokens."""
Chain = Runnable[Any, Any]
Runner = Callable[[], Awaitable[dict[str, str]]]
"""Runs a chain and returns its outputs."""
Prepare = Callable[[Chain], Runner]
"""Does what an app does once for a chain, such as compiling it; not part of a program's time."""


def chain_of(program: dict[str, Any], model: MakeModel) -> Chain:
    """Return a chain that computes the variables of a program.

    Args:
        program: its nodes are in an order in which every node follows those that it reads.
        model: makes the model of a call.
    """
    depth: dict[str, int] = {}
    stages: list[dict[str, Chain]] = []
    for node in program["nodes"]:
        *parts, output = node["prompt"]
        reads = {part["input"] for part in parts if "input" in part}
        level = depth[node["id"]] = max(
            (depth[each] + 1 for each in reads | set(node.get("after", ()))), default=0
        )
        template = "".join(part.get("text") or f"{{{part['input']}}}" for part in parts)
        call = PromptTemplate.from_template(template) | model(output["max_tokens"])
        if level == len(stages):
            stages.append({})
        stages[level][node["id"]] = call | StrOutputParser()
    first, *others = (RunnablePassthrough.assign(**stage) for stage in stages)
    whole: Chain = first
    for other in others:
        whole = whole | other
    return whole


async def run_chains(
    sent: Sequence[ScheduledProgram], seed: str, model: MakeModel, prepare: Prepare
) -> list[AppAnswer]:
    """Run programs as chains at their times."""

    async def run(each: ScheduledProgram, runner: Runner) -> AppAnswer:
        await asyncio.sleep(each.at_s)
        began = time.perf_counter()
        texts = await runner()
        return AppAnswer(each.kind, time.perf_counter() - began, texts)

    prepared = []
    for each in sent:
        program = each.plan.written(seed)
        prepared.append(prepare(chain_of(program, model).pick(program["outputs"])))
    return await asyncio.gather(
        *(run(each, runner) for each, runner in zip(sent, prepared, strict=True))
    )
