"""A chain and its program have the same result on a real server with the scripted engine."""

from __future__ import annotations

import asyncio
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough

from conure.adapters.client import AsyncClient, Client
from conure.adapters.langchain import ChatConure, accelerate, to_program
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import PromptError, RunError

TEXT: Runnable[Any, Any] = StrOutputParser()


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0, max_tokens=24)


def prompt(template: str) -> ChatPromptTemplate:
    return ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", template)])


def shout(text: str) -> str:
    return text.upper()


async def whisper(text: str) -> str:
    await asyncio.sleep(0)
    return text.lower()


def find(question: str) -> list[Document]:
    return [Document(page_content=f"{question}-{n}") for n in range(3)]


def join(documents: list[Document]) -> str:
    return "\n".join(document.page_content for document in documents)


def history(_: Any) -> list[Any]:
    return [HumanMessage("before"), AIMessage("yes")]


def chains(llm: ChatConure) -> dict[str, tuple[Runnable[Any, Any], Any]]:
    call: Any = prompt("Say {x}") | llm
    say = call | TEXT
    return {
        "message": (call, {"x": "tea"}),
        "text": (say, "tea"),
        "bare model": (llm, "hello"),
        "model with messages": (llm, [("system", "s"), ("human", "h")]),
        "completion prompt": (PromptTemplate.from_template("Say {x}:") | llm | TEXT, {"x": 3}),
        "text to model": (say | llm | TEXT, "tea"),
        "two steps": (say | prompt("Again: {y}") | llm | TEXT, "tea"),
        "parallel": (RunnableParallel(a=say, b=say, same=itemgetter("x")), {"x": "tea"}),
        "map and reduce": (
            RunnableParallel(a=say, b=prompt("Sing {x}") | llm | TEXT)
            | prompt("{a} or {b}?")
            | llm
            | TEXT,
            {"x": "tea"},
        ),
        "assign": (
            RunnablePassthrough.assign(first=say)
            | RunnablePassthrough.assign(second=prompt("{first} and {x}") | llm),
            {"x": "tea", "other": [1, {"a": None}]},
        ),
        "pick": (RunnablePassthrough.assign(first=say).pick(["first", "x"]), {"x": "tea"}),
        "pick one": (RunnablePassthrough.assign(first=say).pick("first"), {"x": "tea"}),
        "printed dict": (
            {"notes": RunnableParallel(a=say, b=say)} | prompt("Notes: {notes}") | llm | TEXT,
            {"x": 'it\'s "tea"\n'},
        ),
        "retrieval": (
            {"context": RunnableLambda(find) | join, "question": RunnablePassthrough()}
            | prompt("{context}\n\n{question}")
            | llm
            | TEXT,
            "why",
        ),
        "retrieval after rewriting": (
            say
            | {"context": RunnableLambda(find) | join, "question": RunnablePassthrough()}
            | prompt("{context}\n\n{question}")
            | llm,
            "why",
        ),
        "function in the middle": (say | shout | prompt("Repeat {y}") | llm | TEXT, "tea"),
        "function at the end": (say | shout | (lambda text: {"n": len(text)}), "tea"),
        "function of a message": (call | (lambda message: message.content[::-1]), "tea"),
        "function that makes messages": (RunnableLambda(history) | llm | TEXT, "x"),
        "message passed on": (call | (lambda message: [message, "more"]) | llm | TEXT, "x"),
        "partial and stop": (
            prompt("{x} {y}").partial(y=lambda: "now") | llm.bind(stop=["a"]) | TEXT,
            {"x": "tea"},
        ),
    }


NAMES = list(chains(ChatConure()))


def comparable(value: Any) -> Any:
    """Return a result without the parts that differ between runs."""
    if isinstance(value, AIMessage):
        metadata = {k: v for k, v in value.response_metadata.items() if k != "program"}
        # The second of two runs finds the prompt of the first in the cache.
        counts = {k: v for k, v in (value.usage_metadata or {}).items() if "details" not in k}
        return (value.content, metadata, counts)
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("name", NAMES)
def test_program_has_result_of_its_chain(client: Client, llm: ChatConure, name: str) -> None:
    chain, given = chains(llm)[name]
    compiled = to_program(chain)
    assert comparable(compiled.run(client, given)) == comparable(chain.invoke(given))


async def test_awaited_program_has_result_of_its_chain(client: Client, llm: ChatConure) -> None:
    chain: Any
    async with client.asynchronous() as other:
        for name in ("assign", "retrieval after rewriting", "function of a message"):
            chain, given = chains(llm)[name]
            made = await to_program(chain).arun(other, given)
            assert comparable(made) == comparable(await chain.ainvoke(given)), name
        chain = prompt("{x}") | llm | TEXT | RunnableLambda(whisper)
        made = await to_program(chain).arun(other, "tea")
        assert made == await chain.ainvoke("tea")


async def test_concurrent_programs_do_not_mix(client: Client, llm: ChatConure) -> None:
    chain, _ = chains(llm)["map and reduce"]
    compiled = to_program(chain)
    async with client.asynchronous() as other:
        made = await asyncio.gather(*(compiled.arun(other, {"x": n}) for n in range(12)))
    assert made == [chain.invoke({"x": n}) for n in range(12)]


def test_receipt_counts_shared_prefixes(client: Client, llm: ChatConure) -> None:
    rules = "These are rules that every call begins with. " * 8
    read = ChatPromptTemplate.from_messages([("system", rules), ("human", "{x}")])
    chain = RunnableParallel({f"n{n}": {"x": itemgetter(n)} | read | llm | TEXT for n in range(4)})
    outcome = to_program(chain).execute(client, ["a", "b", "c", "d"])
    receipt = outcome.receipt
    shared = receipt.prompt_tokens.shared
    assert receipt.calls == 4
    assert receipt.blocks_held == 0
    assert shared.static + shared.cache >= 3 * 300
    assert len(outcome.output) == 4


def test_raising_function_is_cause_of_failure(client: Client, llm: ChatConure) -> None:
    def broken(text: str) -> str:
        raise KeyError("oh")

    compiled = to_program(prompt("{x}") | llm | TEXT | broken)
    with pytest.raises(RunError, match="broken: KeyError: 'oh'") as caught:
        compiled.run(client, "tea")
    assert isinstance(caught.value.__cause__, KeyError)


def test_too_long_prompt_is_reported(client: Client, llm: ChatConure) -> None:
    with pytest.raises(PromptError) as caught:
        llm.invoke("x" * 2_000_000)
    assert caught.value.code == "prompt.too_long"


def test_stream_yields_the_answer_in_pieces(client: Client, llm: ChatConure) -> None:
    chunks = list(llm.stream("hello"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    answer = llm.invoke("hello")
    assert comparable(whole)[0] == answer.content
    assert whole.usage_metadata is not None
    assert answer.usage_metadata is not None
    assert whole.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]
    assert whole.response_metadata["model_name"] == answer.response_metadata["model_name"]
    assert [chunk.chunk_position for chunk in chunks if chunk.usage_metadata] == ["last"]


async def test_awaited_stream_yields_the_same(client: Client, llm: ChatConure) -> None:
    chunks = [chunk.content async for chunk in llm.astream("hello")]
    assert "".join(map(str, chunks)) == (await llm.ainvoke("hello")).content


def test_run_can_be_attached_later(client: Client, tmp_path: Path) -> None:
    program = {
        "nodes": [{"id": "s", "op": "client", "name": "ask", "args": {"n": 1}, "output": "x"}],
        "outputs": ["x"],
    }
    run = client.submit(program)
    with pytest.raises(TimeoutError):
        run.get("x", wait_s=0.01)
    result = client.attach(run.id).serve_client_steps({"ask": lambda n: n + 1})
    assert result.outputs == {"x": 2}
    assert run.get("x") == 2
    assert run.receipt().blocks_held == 0


async def test_application_serves_a_lone_async_client(tmp_path: Path) -> None:
    app = create_app(Config(engine="fake", data=tmp_path))
    program = {"nodes": [{"id": "e", "op": "expr", "expr": [1], "output": "x"}], "outputs": ["x"]}
    async with AsyncClient(app=app) as client:
        assert (await client.run(program)).outputs == {"x": [1]}


def test_several_answers_are_generations_of_one_result(llm: ChatConure) -> None:
    warm = llm.model_copy(update={"temperature": 1.0, "seed": 3, "n": 3})
    (made,) = warm.generate([[HumanMessage("Tea?")]]).generations
    alone = warm.bind(n=1).invoke("Tea?")
    messages = [generation.message for generation in made if isinstance(generation, ChatGeneration)]
    assert len(messages) == 3
    assert messages[0].text == alone.text == warm.invoke("Tea?").text
    assert [message.id for message in messages if message.id] == [
        f"{str(messages[0].id)[:-1]}{i}" for i in range(3)
    ]
    # The prompt is counted once, both in the sum and in the first answer.
    usage, *others = [each.usage_metadata for each in messages if isinstance(each, AIMessage)]
    single = alone.usage_metadata
    assert usage is not None
    assert single is not None
    assert others == [None, None]
    assert usage["input_tokens"] == single["input_tokens"]
    assert usage["output_tokens"] > single["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    again: Any = warm.generate([[HumanMessage("Tea?")]]).generations[0]
    assert [each.text for each in again] == [message.text for message in messages]
    with pytest.raises(ValueError, match="got n=3; use invoke"):
        list(warm.stream("Tea?"))
    for wrong in (0, 129, "two"):
        with pytest.raises(ValueError, match="n must be an integer from 1 to 128"):
            llm.invoke("Tea?", n=wrong)


async def test_several_answers_are_requested_at_once(client: Client, llm: ChatConure) -> None:
    (made,) = (await llm.agenerate([[HumanMessage("Tea?")]], n=2)).generations
    assert len(made) == 2
    program = made[0].message.response_metadata["program"]  # type: ignore[union-attr]  # a chat
    status = await asyncio.to_thread(lambda: client.attach(program).status())
    assert list(status.nodes) == ["chat", "chat_1"]
    fast = accelerate(prompt("Say {x}") | llm.bind(n=2) | TEXT | prompt("{y}") | llm)
    assert "n=2 requests several answers" in str(fast.explain())
    plain = await fast.bound.ainvoke({"x": "tea"})
    assert (await fast.ainvoke({"x": "tea"})).text == plain.text
    (run,) = fast.explain().runs
    assert (run.num_served, len(run.misses)) == (1, 2)
    await llm.async_connection().close()
