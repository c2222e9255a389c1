"""The essay's programs, as text: their events, their values and what they cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from conure.server.program.status import OutputTokens, ProgramStatus, PromptTokens, Receipt

from ..inprocess import Program, ServerHarness, server_harness
from . import essay

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPT = [
    {"match": "HIT.*Feature 1", "text": "it is xxxx"},
    {"match": "MISS.*Feature 1", "text": "it is not"},
    {"match": "Use this: found", "text": "the better answer"},
    {"match": "(HIT|MISS)", "text": "word " * 79},
]


async def yields_of(program: Program) -> list[tuple[str, str]]:
    """Return the job and the first key of each durable yield."""
    return [
        (event.data["job"], next(iter(event.data["value"])))
        for event in await program.events()
        if event.type == "yield"
    ]


async def phases(program: Program) -> dict[str, str]:
    return {name: node.status for name, node in (await program.status()).nodes.items()}


def receipt_of(status: ProgramStatus) -> Receipt:
    assert isinstance(status.receipt, Receipt)
    return status.receipt


def prompt_of(status: ProgramStatus, node: str) -> PromptTokens:
    tokens = status.nodes[node].prompt_tokens
    assert isinstance(tokens, PromptTokens)
    return tokens


def output_of(status: ProgramStatus, node: str) -> OutputTokens:
    tokens = status.nodes[node].output_tokens
    assert isinstance(tokens, OutputTokens)
    return tokens


def value_of(status: ProgramStatus, variable: str) -> Any:
    assert status.variables[variable].status == "done"
    return status.variables[variable].value


class Retriever:
    """A function of the server whose answer a test may withhold."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def __call__(self, model: str, messages: list[Any]) -> dict[str, str]:
        assert model == "default"
        assert messages[-1]["content"]
        await self.may_answer.wait()
        return {"context": "found"}


def named(retriever: Retriever) -> Callable[..., Any]:
    async def rag(model: str, messages: list[Any]) -> dict[str, str]:
        return await retriever(model, messages)

    return rag


@pytest_asyncio.fixture(params=["fake", "real"], scope="module", loop_scope="module")
async def harness(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[ServerHarness]:
    settings: dict[str, Any] = {}
    if request.param == "real":
        settings = {"engine": "local", "model": "seeded", "dtype": "float32", "threads": 1}
    retriever = Retriever()
    retriever.may_answer.set()
    async with server_harness(
        tmp_path_factory.mktemp("essay"), {"rag": named(retriever)}, **settings
    ) as harness:
        yield harness


@pytest_asyncio.fixture(loop_scope="module")
async def retriever() -> Retriever:
    return Retriever()


@pytest_asyncio.fixture(loop_scope="module")
async def scripted(tmp_path: Path, retriever: Retriever) -> AsyncIterator[ServerHarness]:
    script = tmp_path / "script.json"
    script.write_text(json.dumps(SCRIPT), "utf-8")
    async with server_harness(
        tmp_path / "data",
        {"rag": named(retriever)},
        script=script,
        time_per_output_token=0.002,
        block_size=1,
    ) as harness:
        yield harness


async def test_a_template_writes_its_slots_in_order(harness: ServerHarness) -> None:
    program = await harness.submit_source(
        essay.TEMPLATE.replace("name=Answer", "name=Answer, max_tokens=24"),
        {"question": "什么是茶?"},
        language="template",
    )
    names = ["Answer", "CriticResult", "SuggestQuestionList"]
    assert [key for _, key in await yields_of(program)] == names
    status = await program.end()
    assert status.status == "done"
    assert value_of(status, "CriticResult") in ("Yes", "No")
    assert isinstance(value_of(status, "SuggestQuestionList"), list)


async def test_the_answer_precedes_critic_and_copilot(harness: ServerHarness) -> None:
    program = await harness.submit_source(essay.bounded(essay.CRITIC, 24))
    first, *others = await yields_of(program)
    assert first == ("main", "answer")
    assert sorted(key for _, key in others) == ["copilot", "critic"]
    assert len({job for job, _ in others}) == 2
    status = await program.end()
    assert status.status == "done"
    assert value_of(status, "critic_result") in ("Yes", "No")
    assert value_of(status, "answer_message")["role"] == "assistant"


async def test_a_stream_is_followed_to_its_end(harness: ServerHarness) -> None:
    program = await harness.submit_source(essay.bounded(essay.STREAM, 24))
    values = [event async for event in program.read() if event.type == "yield"]
    pieces = [event.data["value"]["field1"] for event in values]
    assert [piece["is_end"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    text = value_of(await program.end(), "result_stream")
    assert pieces[-1]["content"] == pieces[-2]["content"] == text
    assert all(text.startswith(piece["content"]) for piece in pieces)


async def test_features_join_before_the_result(harness: ServerHarness) -> None:
    program = await harness.submit_source(
        essay.bounded(essay.FEATURES.replace("RESULT", "result"), 24)
    )
    *features, result = await yields_of(program)
    assert sorted(key for _, key in features) == ["feature1", "feature2"]
    assert result == ("main", "result")
    assert (await program.end()).status == "done"


async def test_on_a_hit_the_default_is_killed_and_its_tokens_are_discarded(
    scripted: ServerHarness, retriever: Retriever
) -> None:
    program = await scripted.submit_source(essay.SPECULATION.replace("QUESTION", "HIT"))
    killed = await program.event("node.killed", node="default_result")
    retriever.may_answer.set()
    yields = await yields_of(program)
    keys = [key for _, key in yields]
    assert "default" not in keys
    assert keys[-1] == "final"
    speculative = next(job for job, key in yields if key == "feat1_found")
    assert [key for job, key in yields if job == speculative] == ["feat1_found", "result2"]
    status = await program.end()
    assert status.status == "done"
    assert value_of(status, "final_result")["content"] == "the better answer"
    tokens = output_of(status, "default_result")
    assert tokens.discarded == tokens.decoded < 400
    assert receipt_of(status).output_tokens.discarded == tokens.discarded
    assert receipt_of(status).blocks_held == 0
    # Nothing lies between the decision, the essay's `yield` and the kill.
    events = [each for each in await program.events() if each.seq is not None]
    decision = next(
        each.seq
        for each in events
        if each.type == "variable.committed" and each.data["variable"] == "branch.taken"
    )
    assert decision is not None
    assert killed.seq is not None
    between = [each for each in events if decision < (each.seq or 0) < killed.seq]
    assert not any(each.type == "node.finished" and each.data["node"] == "rag" for each in between)


async def test_a_killed_variable_has_a_substitute(scripted: ServerHarness) -> None:
    program = await scripted.submit_source(
        """default = client("never")
with job():
    found = gen("now: ", max_tokens=4)
    if len(found) > 0:
        default.kill()
yield {"value": first(default, "none")}"""
    )
    await program.end()
    values = [each.data["value"] for each in await program.events() if each.type == "yield"]
    assert values == [{"value": "none"}]


async def test_on_a_miss_retrieval_is_killed_and_the_default_is_used(
    scripted: ServerHarness,
) -> None:
    program = await scripted.submit_source(essay.SPECULATION.replace("QUESTION", "MISS"))
    keys = [key for _, key in await yields_of(program)]
    assert sorted(keys) == ["default", "feature1", "final"]
    status = await program.end()
    assert status.status == "done"
    states = await phases(program)
    assert states["rag"] == states["feature2_result"] == "killed"
    assert value_of(status, "final_result") == value_of(status, "default_result")


async def test_critic_and_copilot_compute_the_shared_context_once(
    scripted: ServerHarness,
) -> None:
    source = essay.CRITIC.replace("HISTORY", "Tea is a drink. " * 60)
    program = await scripted.submit_source(source)
    status = await program.end()
    answer, critic, copilot = (
        prompt_of(status, name) for name in ("answer_message", "critic_result", "copilot_result")
    )
    output = output_of(status, "answer_message")
    context = answer.logical
    # The suffixes: everything after the context and the answer.
    suffixes = [each.logical - context - output.decoded for each in (critic, copilot)]
    computed = receipt_of(status).prompt_tokens.computed
    common = context + sum(suffixes) - computed
    assert answer.computed == context
    # What the two suffixes begin with, the turn's frame, is computed once as well.
    assert 0 <= common <= min(suffixes)
    assert receipt_of(status).blocks_held == 0


async def test_every_yield_names_program_job_node_and_sequence(scripted: ServerHarness) -> None:
    program = await scripted.submit_source(essay.CRITIC)
    events = [event async for event in program.read() if event.type == "yield"]
    assert events
    for event in events:
        assert event.data["program"] == program.id
        assert event.data["job"]
        assert event.data["node"]
        assert event.data["meta"]["line"]
        assert (event.seq is not None) == event.data["final"]
