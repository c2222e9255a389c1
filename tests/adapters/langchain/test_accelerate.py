"""An accelerated chain of any shape has the output, events and text of the chain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Generator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.prompts.few_shot_with_templates import FewShotPromptWithTemplates
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import (
    Runnable,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)

from conure.adapters.client import AsyncClient, Client, NotReadyError, Retry, ServerUnreachableError
from conure.adapters.langchain import Accelerated, ChatConure, accelerate
from conure.adapters.langchain.acceleration.chain_run import ChainRun
from conure.adapters.langchain.acceleration.planner import identity_of, plan_of
from conure.adapters.speculation import outbox
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ConureError, ProgramError, PromptError

from ..left import all_ended, all_submitted
from .shapes import TEXT, ask, shapes

NAMES = list(shapes(ChatConure()))


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0, max_tokens=200)


def comparable(value: Any) -> Any:
    """Return a value without ids of runs and programs."""
    if isinstance(value, BaseMessage):
        metadata = {k: v for k, v in value.response_metadata.items() if k != "program"}
        calls = [(c["name"], c["args"]) for c in getattr(value, "tool_calls", [])]
        return (value.type.lower(), value.content, metadata, calls)
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


class Recorder(BaseCallbackHandler):
    """Records the tree of runs from LangChain's callbacks."""

    def __init__(self) -> None:
        self._runs: dict[UUID, tuple[Any, Any, Any]] = {}
        self._ends: dict[UUID, Any] = {}
        self._lock = threading.Lock()

    def _start(self, serialized: Any, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        name = kwargs.get("name") or (serialized or {}).get("name")
        tags = tuple(sorted(kwargs.get("tags") or []))
        with self._lock:
            self._runs[run_id] = (kwargs.get("parent_run_id"), name, tags)

    on_chain_start = on_chat_model_start = on_llm_start = on_tool_start = _start
    on_retriever_start = _start

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._ends[run_id] = comparable(outputs)

    def on_llm_end(self, response: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._ends[run_id] = comparable(response.generations[0][0].message)

    def _error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._ends[run_id] = type(error).__name__

    on_chain_error = on_llm_error = _error

    def tree(self) -> list[Any]:
        """Return names, tags and results as a tree, with siblings sorted."""

        def children(parent: UUID | None) -> list[Any]:
            found = [
                (name, tags, self._ends.get(run), children(run))
                for run, (above, name, tags) in self._runs.items()
                if above == parent
            ]
            return sorted(found, key=repr)

        return children(None)


def outcome_of(chain: Runnable[Any, Any], given: Any) -> tuple[Any, list[Any]]:
    recorder = Recorder()
    made = chain.invoke(given, config={"callbacks": [recorder]})
    return comparable(made), recorder.tree()


@pytest.mark.parametrize("name", NAMES)
def test_chain_has_same_result_and_runs(llm: ChatConure, name: str) -> None:
    shape = shapes(llm)[name]
    fast = accelerate(shape.chain)
    assert outcome_of(fast, shape.given) == outcome_of(shape.chain, shape.given)
    (run,) = fast.explain().runs
    assert (run.num_served, len(run.misses)) == (shape.served, shape.missed), str(fast.explain())
    assert run.wasted == []
    assert run.refusals == []


@pytest.mark.parametrize("name", NAMES)
async def test_awaited_chain_has_same_result_and_events(llm: ChatConure, name: str) -> None:
    shape = shapes(llm)[name]
    fast = accelerate(shape.chain, model=llm)
    assert await events(fast, shape.given) == await events(shape.chain, shape.given)
    made = comparable(await fast.ainvoke(shape.given))
    assert made == comparable(await shape.chain.ainvoke(shape.given))
    for run in fast.explain().runs:
        assert run.num_served >= shape.served - 1, str(fast.explain())
        assert run.wasted == []
    await llm.async_connection().close()


async def events(chain: Runnable[Any, Any], given: Any) -> list[Any]:
    """Return events of version 2: position, kind and output, with chunks of text joined."""
    paths: dict[str, tuple[str, ...]] = {}
    found: dict[tuple[Any, ...], list[Any]] = {}
    async for event in chain.astream_events(given, version="v2"):
        data: Any = event["data"]
        parents = tuple(paths[each] for each in event["parent_ids"])
        paths[event["run_id"]] = (event["name"], *sorted(event.get("tags", [])))
        key = (*parents, paths[event["run_id"]], event["run_id"])
        kind = event["event"].rsplit("_", 1)[1]
        if kind == "end":
            found.setdefault(key, []).append(("end", comparable(data.get("output"))))
        elif kind == "start":
            found.setdefault(key, []).append(("start", event["event"]))
        elif event["event"] == "on_chat_model_stream":
            text = "".join(said for what, said in found[key] if what == "text")
            rest = [each for each in found[key] if each[0] != "text"]
            found[key] = [*rest, ("text", text + data["chunk"].text)]
    return sorted([(key[:-1], parts) for key, parts in found.items()], key=repr)


STREAMED = [name for name in NAMES if "dict" not in name]


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_chunks_have_the_same_sum(llm: ChatConure, name: str) -> None:
    shape = shapes(llm)[name]
    fast = accelerate(shape.chain)
    assert total(fast.stream(shape.given)) == total(shape.chain.stream(shape.given))
    assert fast.explain().runs[0].wasted == []


def total(pieces: Iterator[Any]) -> Any:
    whole: Any = None
    for piece in pieces:
        try:
            whole = piece if whole is None else whole + piece
        except TypeError:
            whole = piece
    return comparable(whole)


def test_planned_text_is_streamed_while_it_is_generated(
    tmp_path: Path, submitted: list[str]
) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_output_token=0.01)
    with Client(app=create_app(config)) as client:
        short = ChatConure(client=client, temperature=0, max_tokens=20, ignore_eos=True)
        long = short.model_copy(update={"max_tokens": 2_000})
        chunks = accelerate(ask("{x}") | short | TEXT | ask("{y}") | long).stream("tea")
        assert isinstance(chunks, Generator)
        start = next(chunks).text + next(chunks).text
        (program,) = submitted
        assert client.attach(program).status().status == "running"
        chunks.close()
        same = short.model_copy(update={"max_tokens": len(start)})
        assert (ask("{x}") | short | TEXT | ask("{y}") | same | TEXT).invoke("tea") == start


class Tokens(BaseCallbackHandler):
    """Records the tokens from LangChain's callbacks."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.texts.append(token)


@pytest.fixture
def requested_types(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Types of events that are requested from the server, one set per stream."""
    types: list[set[str]] = []
    for kind in (Client, AsyncClient):
        read = kind._events

        def events(self: Any, reader: Any, opened: Any, read: Any = read) -> Any:
            assert opened is None or opened.serves(reader), (
                "the reply to the submission contains these events"
            )
            types.append(set(reader.types or ()))
            return read(self, reader, opened)

        monkeypatch.setattr(kind, "_events", events)
    return types


async def test_texts_are_requested_only_for_streams(
    llm: ChatConure, requested_types: list[set[str]]
) -> None:
    say = ask("{x}") | llm | TEXT
    fast = accelerate(say | ask("{y}") | llm | TEXT)
    whole = await asyncio.to_thread(fast.invoke, "tea")
    assert await fast.ainvoke("tea") == whole
    assert ["node.delta" in types for types in requested_types] == [False, False]
    assert "".join(await asyncio.to_thread(lambda: list(fast.stream("tea")))) == whole
    assert "".join([piece async for piece in fast.astream("tea")]) == whole
    assert ["node.delta" in types for types in requested_types[2:]] == [True, True]
    await llm.async_connection().close()


async def test_streaming_call_in_invoked_chain_requests_texts(
    tmp_path: Path, requested_types: list[set[str]]
) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_output_token=0.005)
    with await asyncio.to_thread(lambda: Client(app=create_app(config))) as client:
        streaming = ChatConure(client=client, streaming=True)
        fast = accelerate(ask("{x}") | ChatConure(client=client) | TEXT | ask("{y}") | streaming)
        for run in (fast.invoke, fast.ainvoke):
            tokens, requested_types[:] = Tokens(), []
            made = run("tea", config={"callbacks": [tokens]})
            answer = await made if isinstance(made, Awaitable) else made
            assert "".join(tokens.texts) == answer.content
            assert ["node.delta" in types for types in requested_types] == [False, True]
        await streaming.async_connection().close()


@pytest.mark.parametrize("name", ["parallel and join", "map and reduce", "function in the middle"])
def test_batch_has_same_results(llm: ChatConure, name: str) -> None:
    shape = shapes(llm)[name]
    fast = accelerate(shape.chain)
    given = [shape.given] * 3
    expected = [comparable(each) for each in shape.chain.batch(given)]
    assert [comparable(each) for each in fast.batch(given)] == expected
    assert len(fast.explain().runs) == 3
    by_end = dict(fast.batch_as_completed(given))
    assert [comparable(by_end[i]) for i in range(3)] == expected


async def test_awaited_batch_has_same_results(llm: ChatConure) -> None:
    shape = shapes(llm)["map and reduce"]
    fast = accelerate(shape.chain)
    made = await fast.abatch([shape.given] * 5)
    assert made == await shape.chain.abatch([shape.given] * 5)
    assert {(run.num_served, len(run.misses)) for run in fast.explain().runs} == {(3, 0)}
    await llm.async_connection().close()


async def test_concurrent_runs_do_not_mix(llm: ChatConure) -> None:
    chain = ask("{x}") | llm | TEXT | (lambda text: text + "!") | ask("{y}") | llm | TEXT
    fast = accelerate(chain)
    made = await asyncio.gather(*(fast.ainvoke(str(n)) for n in range(20)))
    assert made == [await chain.ainvoke(str(n)) for n in range(20)]
    assert all(not run.misses and not run.wasted for run in fast.explain().runs)
    await llm.async_connection().close()


def test_functions_run_once_on_real_answers(llm: ChatConure) -> None:
    seen: list[str] = []

    def keep(text: str) -> str:
        seen.append(text)
        return text

    chain = RunnableLambda(keep) | ask("{x}") | llm | TEXT | keep | ask("{y}") | llm | TEXT
    made = accelerate(chain).invoke("tea")
    assert len(seen) == 2
    assert seen == ["tea", llm.invoke("tea").content]
    assert made == llm.invoke(seen[1]).content


def test_raising_function_leaves_nothing_running(llm: ChatConure, client: Client) -> None:
    def broken(text: str) -> str:
        raise KeyError("oh")

    slow = ask("slow {x}") | llm | TEXT
    fast = accelerate(
        RunnableParallel(a=ask("{x}") | llm | TEXT | broken, b=slow) | ask("{a}") | llm
    )
    with pytest.raises(KeyError, match="oh"):
        fast.invoke("tea")
    (run,) = fast.explain().runs
    assert client.attach(run.program).status().status in ("cancelled", "done")


class DelayedServer:
    """A server that delays submissions until the chain reaches a certain step."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.is_reached = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request, delayed if it is a submission."""
        if scope.get("method") == "POST":
            await asyncio.to_thread(self.is_reached.wait, 30)
        await self._app(scope, receive, send)


@pytest.fixture
def delayed(tmp_path: Path) -> Iterator[tuple[DelayedServer, ChatConure]]:
    app = DelayedServer(create_app(Config(engine="fake", data=tmp_path)))
    with Client(app=app) as client:
        yield app, ChatConure(client=client, temperature=0)


async def test_chain_starts_before_plan_is_accepted(
    delayed: tuple[DelayedServer, ChatConure],
) -> None:
    server, llm = delayed
    say = ask("{x}") | llm | TEXT

    def search(text: str) -> str:
        server.is_reached.set()
        return f"found {text}"

    fast = accelerate(RunnableParallel(docs=RunnableLambda(search), said=say) | ask("{docs}") | llm)
    for run in (fast.invoke, fast.ainvoke):
        server.is_reached.clear()
        made = await asyncio.to_thread(run, "tea")
        answer = await made if isinstance(made, Awaitable) else made
        assert answer.content == (await llm.ainvoke("found tea")).content
    assert {(run.num_served, len(run.misses)) for run in fast.explain().runs} == {(2, 0)}
    await llm.async_connection().close()


async def test_chain_failing_before_acceptance_cancels_plan(
    delayed: tuple[DelayedServer, ChatConure],
) -> None:
    server, llm = delayed

    def broken(text: str) -> str:
        server.is_reached.set()
        raise KeyError("oh")

    fast = accelerate(RunnableParallel(a=RunnableLambda(broken), b=ask("{x}") | llm))
    with pytest.raises(KeyError, match="oh"):
        await asyncio.to_thread(fast.invoke, "tea")
    server.is_reached.clear()
    with pytest.raises(KeyError, match="oh"):
        await fast.ainvoke("tea")
    assert llm.client is not None
    # A chain that fails before its plan is sent has no program.
    for program in [run.program for run in fast.explain().runs if run.program]:
        status = await asyncio.to_thread(llm.client.attach, program)
        assert (await asyncio.to_thread(status.status)).status in ("cancelled", "done")
    assert (await asyncio.to_thread(llm.client.programs, status="running")).programs == []
    await llm.async_connection().close()


def test_failing_call_raises_same_error(llm: ChatConure) -> None:
    long = ask("{x}" * 100) | llm | TEXT
    with pytest.raises(PromptError) as plain:
        long.invoke("x" * 1000)
    with pytest.raises(PromptError) as fast:
        accelerate(ask("{x}") | llm | TEXT | ask("{x}" * 1000) | llm).invoke("x")
    assert fast.value.code == plain.value.code == "prompt.too_long"
    saved = accelerate(long.with_fallbacks([ask("short {x}") | llm | TEXT])).invoke("x" * 1000)
    assert saved == llm.invoke("short " + "x" * 1000).content


class Ticking:
    """A value that is formatted differently each time."""

    def __init__(self) -> None:
        self.ticks = 0

    def __format__(self, spec: str) -> str:
        self.ticks += 1
        return str(self.ticks)


def test_different_prompt_is_a_reported_miss(llm: ChatConure) -> None:
    fast = accelerate(ask("{x}") | llm | TEXT)
    assert fast.invoke({"x": Ticking()}) == llm.invoke("2").content
    explained = str(fast.explain())
    # The planned call is wasted if it started before it was cancelled.
    assert "1 planned, 0 served, 1 missed" in explained
    assert "missed: chain.steps[1]: another prompt" in explained


def test_miss_names_the_step_at_fault(llm: ChatConure) -> None:
    def scattered(text: str) -> Any:
        return iter([text])

    def odd(text: str) -> Any:
        return {"x": text, "rest": iter("abc")}

    def gathered(pieces: Any) -> Any:
        return "".join(pieces)

    fast = accelerate(ask("{x}") | llm | TEXT | odd | ask("{x}") | llm)
    assert fast.invoke("t").content
    (run,) = fast.explain().runs
    assert (run.num_planned, run.num_served, run.wasted) == (2, 1, [])
    assert "chain.steps[3] (RunnableLambda): it can be read only once" in run.misses[0].why
    whole = accelerate(ask("{x}") | llm | TEXT | scattered | gathered | ask("{y}") | llm)
    assert whole.invoke("t").content
    assert whole.explain().runs[0].num_served == 2


def test_functions_in_templates_run_once(llm: ChatConure) -> None:
    ticks = iter(range(100))
    ticking = ask("{x} at {now}").partial(now=lambda: str(next(ticks)))
    fast = accelerate(ticking | llm | TEXT | ask("{y}") | llm)
    assert fast.invoke({"x": "tea"}).content == llm.invoke(llm.invoke("tea at 0").content).content
    assert next(ticks) == 1
    (run,) = fast.explain().runs
    assert (run.num_served, run.misses, run.wasted) == (2, [], [])


def test_parts_of_few_shot_templates_run_no_code_for_a_plan(llm: ChatConure) -> None:
    code = {"now": lambda: pytest.fail("planning ran code of the app")}
    ticking = PromptTemplate.from_template("at {now}", partial_variables=code)
    plain = PromptTemplate.from_template("{x}")
    for prefix, suffix in ((ticking, plain), (plain, ticking)):
        few = FewShotPromptWithTemplates(
            examples=[], example_prompt=plain, prefix=prefix, suffix=suffix, input_variables=["x"]
        )
        plan = plan_of(few | llm, identity=identity_of(llm), prefix="", config=None)
        (awaited,) = plan.awaited.values()
        assert "code of the app" in awaited.why


def test_template_that_contains_a_message_with_extra_fields_is_planned(llm: ChatConure) -> None:
    template = ChatPromptTemplate.from_messages([("human", "{x}"), AIMessage("Tea", prefix=True)])
    plan = plan_of(template | llm, identity=identity_of(llm), prefix="", config=None)
    assert (len(plan.calls), plan.awaited) == (1, {})


def test_call_with_arguments_is_not_planned(llm: ChatConure) -> None:
    fast = accelerate(llm)
    assert fast.invoke("tea", stop=["a"]).content == llm.invoke("tea", stop=["a"]).content
    (run,) = fast.explain().runs
    assert (run.num_planned, len(run.misses)) == (0, 1)


def test_caches_and_rate_limiters_are_respected(client: Client) -> None:
    cached = ChatConure(client=client, cache=InMemoryCache(), temperature=0)
    fast = accelerate(ask("{x}") | cached | TEXT)
    assert fast.invoke("tea") == fast.invoke("tea")
    assert [(run.num_planned, len(run.misses)) for run in fast.explain().runs] == [(0, 1), (0, 0)]
    assert "cache" in str(fast.explain())
    limiter = InMemoryRateLimiter(requests_per_second=1000, check_every_n_seconds=0.001)
    limited = ChatConure(client=client, rate_limiter=limiter)
    assert "rate limiter" in str(accelerate(ask("{x}") | limited).explain())


def test_model_of_another_class_is_named_with_the_cure(client: Client) -> None:
    other = FakeListChatModel(responses=["fake"])
    fast = accelerate(ask("{x}") | other | TEXT | ask("{y}") | ChatConure(client=client) | TEXT)
    fast.invoke({"x": "tea"})
    assert "FakeListChatModel): its calls do not reach Conure: use ChatConure" in str(
        fast.explain()
    )


def test_plan_may_grow_after_model_with_overridden_methods() -> None:
    class Wrapper(FakeListChatModel):
        def invoke(self, *args: Any, **options: Any) -> Any:
            return super().invoke(*args, **options)

    def may_grow(model: FakeListChatModel) -> bool:
        return plan_of(ask("{x}") | model, identity=None, prefix="", config=None).may_grow

    assert may_grow(Wrapper(responses=["x"]))
    assert not may_grow(FakeListChatModel(responses=["x"]))


def test_call_timeout_cancels_its_program(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_call=60.0)
    with Client(app=create_app(config)) as client:
        llm = ChatConure(client=client, timeout=2.0)
        fast = accelerate(ask("{x}") | llm | TEXT | ask("{y}") | llm)
        with pytest.raises(NotReadyError, match=r"no answer after 2 s"):
            fast.invoke("tea")
        (run,) = fast.explain().runs
        assert client.attach(run.program).status().status == "cancelled"


async def test_cancelled_await_cancels_its_program(tmp_path: Path, submitted: list[str]) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_call=60.0)
    with await asyncio.to_thread(lambda: Client(app=create_app(config))) as client:
        llm = ChatConure(client=client)
        fast = accelerate(ask("{x}") | llm | TEXT)
        chain = asyncio.create_task(fast.ainvoke("tea"))
        await all_submitted(submitted, 1)
        chain.cancel()
        with pytest.raises(asyncio.CancelledError):
            await chain
        (run,) = fast.explain().runs
        status = await asyncio.to_thread(lambda: client.attach(run.program).status())
        assert status.status == "cancelled"
        await llm.async_connection().close()


async def test_unreachable_server_is_reported_despite_short_timeout() -> None:
    retry = Retry(
        max_retries=1, base_delay_s=0.01, unreachable_timeout_s=0.4, first_contact_timeout_s=0.4
    )
    with Client("http://127.0.0.1:1", retry=retry) as client:
        llm = ChatConure(client=client, timeout=0.1)
        fast = accelerate(ask("{x}") | llm | TEXT)
        with pytest.raises(ServerUnreachableError):
            await asyncio.to_thread(fast.invoke, "tea")
        with pytest.raises(ServerUnreachableError):
            await fast.ainvoke("tea")
        await llm.async_connection().close()


async def test_chain_cancelled_twice_cancels_its_program(
    tmp_path: Path, submitted: list[str]
) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_call=60.0, drain_s=0.0)
    with await asyncio.to_thread(lambda: Client(app=create_app(config))) as client:
        llm = ChatConure(client=client)
        fast = accelerate(ask("{x}") | llm | TEXT)
        before = asyncio.all_tasks()
        for num_turns in range(12):
            chain = asyncio.create_task(fast.ainvoke("tea"))
            await all_submitted(submitted, num_turns + 1)
            chain.cancel()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            chain.cancel()
            await asyncio.wait([chain])
        await all_ended(client, submitted)
        async with asyncio.timeout(60):
            while asyncio.all_tasks() - before:  # noqa: ASYNC110 - nothing else awaits them
                await asyncio.sleep(0.01)
        await llm.async_connection().close()


def test_rejected_plan_does_no_harm(llm: ChatConure) -> None:
    bad = llm.bind(constraint={"regex": "(?=a)b"})
    chain = (ask("{x}") | bad | TEXT).with_fallbacks([ask("{x}") | llm | TEXT])
    assert accelerate(chain).invoke("tea") == chain.invoke("tea")
    beside = RunnableParallel(good=ask("{x}") | llm | TEXT, bad=chain)
    fast = accelerate(beside)
    assert fast.invoke("tea") == beside.invoke("tea")
    (run,) = fast.explain().runs
    assert (run.num_served, len(run.misses)) == (2, 1)
    with pytest.raises(ProgramError, match="invalid regex"):
        accelerate(ask("{x}") | bad | TEXT).invoke("tea")


def test_call_sent_with_rejected_one_is_made(llm: ChatConure) -> None:
    nope = ask("{x}") | llm.bind(model="nope") | TEXT
    saved = nope.with_fallbacks([ask("or {x}") | llm | TEXT])
    beside = RunnableParallel(a=saved, b=ask("{x}") | llm | TEXT) | ask("{a}{b}") | llm | TEXT
    for chain in (beside, RunnableParallel(a=saved, b=saved)):
        fast = accelerate(chain)
        assert fast.invoke("tea") == chain.invoke("tea")
        assert total(fast.stream("tea")) == total(chain.stream("tea"))
        assert fast.batch(["tea"] * 3) == chain.batch(["tea"] * 3)
    with pytest.raises(ProgramError, match="no engine serves nope"):
        accelerate(RunnableParallel(a=nope, b=ask("{x}") | llm)).invoke("tea")


def _wide(llm: ChatConure, width: int = 6) -> Runnable[Any, Any]:
    """Return parallel calls, a function, and a call that reads all of their results."""
    parts = {f"k{n}": ask(f"part {n} of {{x}}") | llm | TEXT for n in range(width)}
    join = ask("".join(f"{{k{n}}} " for n in range(width)) + "{upper}")
    upper = {"upper": lambda made: made["k0"].upper()}
    chain: Any = RunnableParallel(parts) | RunnablePassthrough.assign(**upper)
    made: Runnable[Any, Any] = chain | join | llm | TEXT
    return made


async def test_large_plan_uses_several_programs(
    llm: ChatConure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_BATCH", 2)
    monkeypatch.setattr(outbox, "MAX_NODES", 3)
    chain = _wide(llm)
    fast = accelerate(chain)
    expected = await asyncio.to_thread(chain.invoke, {"x": "tea"})
    assert await asyncio.to_thread(fast.invoke, {"x": "tea"}) == expected
    assert await fast.ainvoke({"x": "tea"}) == expected
    assert "".join(await asyncio.to_thread(lambda: list(fast.stream({"x": "tea"})))) == expected
    runs = [(run.num_served, run.misses, run.refusals) for run in fast.explain().runs]
    assert runs == [(7, [], [])] * 3
    await llm.async_connection().close()


async def test_plan_larger_than_a_request_is_sent_in_parts(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, max_body=1_500)
    with await asyncio.to_thread(lambda: Client(app=create_app(config))) as client:
        llm = ChatConure(client=client, temperature=0, max_tokens=5)
        chain = _wide(llm, width=8)
        fast = accelerate(chain)
        expected = await asyncio.to_thread(chain.invoke, {"x": "tea"})
        assert await asyncio.to_thread(fast.invoke, {"x": "tea"}) == expected
        assert await fast.ainvoke({"x": "tea"}) == expected
        runs = [(run.num_served, run.misses, run.refusals) for run in fast.explain().runs]
        assert runs == [(9, [], [])] * 2
        await llm.async_connection().close()


def _inner(llm: ChatConure, name: str) -> Runnable[Any, Any]:
    say = ask("say {i}") | llm | TEXT
    seen: set[str] = set()

    def broken(text: str) -> str:
        raise KeyError("first")

    def unlike(text: str) -> str:
        raise ValueError("second")

    def frail(text: str) -> str:
        if text not in seen:
            seen.add(text)
            raise ValueError("once")
        return text

    inner: dict[str, Runnable[Any, Any]] = {
        "fallbacks": (say | broken).with_fallbacks([say]),
        "fallbacks that fail": (say | broken).with_fallbacks([say | unlike]),
        "a retry": (say | frail).with_retry(wait_exponential_jitter=False),
        "a bound model": ask("say {i}") | llm.bind(seed=3) | TEXT,
        "a function between": say | str.upper | ask("so {y}") | llm | TEXT,
    }
    return inner[name]


BATCHED = ["fallbacks", "fallbacks that fail", "a retry", "a bound model", "a function between"]


@pytest.mark.parametrize("name", BATCHED)
async def test_items_have_runs_and_errors_of_batches(llm: ChatConure, name: str) -> None:
    def outcome(made: Any) -> Any:
        return repr(made) if isinstance(made, Exception) else comparable(made)

    # LangChain does not wait for an item that fails in parallel with another one.
    items = ["p"] if name == "fallbacks that fail" else ["p", "q"]
    found = []
    for is_fast in (False, True):
        each: Runnable[Any, Any] = _inner(llm, name)
        split: Runnable[Any, Any] = RunnableLambda(lambda _: items)
        mapped: Runnable[Any, Any] = split | _inner(llm, name).map()
        if is_fast:
            each, mapped = accelerate(each), accelerate(mapped)
        recorders = [Recorder() for _ in range(4)]
        configs: list[Any] = [{"callbacks": [recorder]} for recorder in recorders]
        batch, abatch = each.batch, each.abatch
        made = [
            await asyncio.to_thread(batch, ["p"], configs[0], return_exceptions=True),
            await abatch(["q"], configs[1], return_exceptions=True),
            await asyncio.to_thread(mapped.batch, ["x"], configs[2], return_exceptions=True),
            await mapped.abatch(["x"], configs[3], return_exceptions=True),
        ]
        outcomes = [outcome(one) for some in made for one in some]
        found.append((outcomes, [recorder.tree() for recorder in recorders]))
    assert found[0] == found[1]
    await llm.async_connection().close()


async def test_the_body_of_a_retry_is_planned_in_a_stream(llm: ChatConure) -> None:
    again = ask("{x}") | llm | TEXT | str.upper | ask("{y}") | llm | TEXT
    chain = ask("{x}") | llm | TEXT | again.with_retry() | ask("{z}") | llm | TEXT
    expected = await asyncio.to_thread(chain.invoke, "tea")
    fast = accelerate(chain)
    assert "".join(await asyncio.to_thread(lambda: list(fast.stream("tea")))) == expected
    assert "".join([text async for text in fast.astream("tea")]) == expected
    assert [(run.num_served, run.misses) for run in fast.explain().runs] == [(4, [])] * 2
    await llm.async_connection().close()


async def test_chain_with_rejected_plan_continues(llm: ChatConure) -> None:
    bad = llm.bind(constraint={"regex": "(?=a)b"})
    said = (ask("{x}") | bad | TEXT).with_fallbacks([ask("{x}") | llm | TEXT])
    search: RunnableLambda[str, str] = RunnableLambda(lambda text: f"found {text}")
    chain = RunnableParallel(said=said, docs=search) | ask("{docs} {said}") | llm | TEXT
    fast = accelerate(chain)
    expected = await asyncio.to_thread(chain.invoke, "tea")
    assert await asyncio.to_thread(fast.invoke, "tea") == expected
    assert await fast.ainvoke("tea") == expected
    await llm.async_connection().close()


def test_accelerated_chain_is_an_ordinary_runnable(llm: ChatConure) -> None:
    say = ask("{x}") | llm | TEXT
    inner = accelerate(say)
    again = accelerate(accelerate(RunnableLambda(str), model=llm))
    assert isinstance(again, Accelerated)
    assert again._model is llm
    assert (inner | say).invoke("tea") == (say | say).invoke("tea")
    outer = accelerate(inner | say)
    assert outer.invoke("tea") == (say | say).invoke("tea")
    assert inner.get_name() == say.get_name()
    assert inner.with_config(run_name="X").invoke("tea") == say.invoke("tea")
    assert isinstance(llm.invoke("x"), AIMessage)


async def test_model_that_only_a_function_calls_needs_no_name(llm: ChatConure) -> None:
    async def acall(text: str) -> str:
        return (await llm.ainvoke(text)).text

    def call(text: str) -> str:
        return llm.invoke(text).text

    fast = accelerate(RunnableLambda(call, acall) | call)
    expected = call(call("tea"))
    assert await asyncio.to_thread(fast.invoke, "tea") == expected
    assert await fast.ainvoke("tea") == expected
    for run in fast.explain().runs:
        assert run.program
        assert len(run.misses) == 2
    assert accelerate(RunnableLambda(str)).invoke(1) == "1"


async def test_functions_of_an_awaited_chain_call_in_the_same_program(
    client: Client, llm: ChatConure, submitted: list[str]
) -> None:
    def call(text: str) -> str:
        return llm.invoke(text).text

    fast = accelerate(ask("{x}") | llm | TEXT | call | ask("{y}") | llm | TEXT)
    made = await fast.ainvoke("tea")
    (run,) = fast.explain().runs
    assert submitted == [run.program]
    assert made == await asyncio.to_thread(fast.bound.invoke, "tea")


async def test_call_that_blocks_its_loop_is_answered(llm: ChatConure) -> None:
    async def block(text: str) -> str:
        return llm.invoke(text).text

    fast = accelerate(RunnableLambda(lambda text: text, afunc=block), model=llm)
    assert await fast.ainvoke("tea") == (await llm.ainvoke("tea")).text
    assert fast.explain().runs[0].program


def test_unreachable_server_is_the_call_error() -> None:
    llm = ChatConure(base_url="http://127.0.0.1:9", max_retries=0)
    with pytest.raises(ConureError, match="is the server running"):
        accelerate(ask("{x}") | llm).invoke("tea")


def test_models_with_other_headers_are_not_planned() -> None:
    with (
        Client("http://there", headers={"authorization": "Bearer a"}) as one,
        Client("http://there", headers={"authorization": "Bearer b"}) as other,
    ):
        mine, same, its = (ChatConure(client=each) for each in (one, one, other))
        chain = ask("{x}") | mine | TEXT | same | TEXT | its
        plan = plan_of(chain, identity=identity_of(mine), prefix="", config=None)
        assert len(plan.calls) == 2
        assert not ChainRun(one, "chain", is_streamed=False).bind_to(other)
