"""An accelerated chain is the chain: same output, same events, same text, whatever its shape."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel

from conure.adapters.client import (
    AsyncClient,
    Client,
    NotReadyError,
    Retry,
    ServerUnreachableError,
)
from conure.adapters.langchain import Accelerated, ChatConure, accelerate
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.program.errors import ConureError, ProgramError, PromptError

from .left import all_ended
from .shapes import TEXT, ask, shapes

NAMES = list(shapes(ChatConure()))


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0, max_tokens=200)


def comparable(value: Any) -> Any:
    """A value without ids of runs and programs."""
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
    """The tree of runs that LangChain tells a handler."""

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
        """Names, tags and results, as a tree; siblings in any order."""

        def children(parent: UUID | None) -> list[Any]:
            found = [
                (name, tags, self._ends.get(run), children(run))
                for run, (above, name, tags) in self._runs.items()
                if above == parent
            ]
            return sorted(found, key=repr)

        return children(None)


def told(chain: Runnable[Any, Any], given: Any) -> tuple[Any, list[Any]]:
    recorder = Recorder()
    made = chain.invoke(given, config={"callbacks": [recorder]})
    return comparable(made), recorder.tree()


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_gives_the_same_with_the_same_runs(llm: ChatConure, name: str) -> None:
    shape = shapes(llm)[name]
    fast = accelerate(shape.chain)
    assert told(fast, shape.given) == told(shape.chain, shape.given)
    (run,) = fast.explain().runs
    assert (run.num_served, len(run.misses)) == (shape.served, shape.missed), str(fast.explain())
    assert run.wasted == []
    assert run.refusals == []


@pytest.mark.parametrize("name", NAMES)
async def test_so_it_does_with_await_with_the_same_events(llm: ChatConure, name: str) -> None:
    shape = shapes(llm)[name]
    fast = accelerate(shape.chain, model=llm)
    assert await events(fast, shape.given) == await events(shape.chain, shape.given)
    made = comparable(await fast.ainvoke(shape.given))
    assert made == comparable(await shape.chain.ainvoke(shape.given))
    for run in fast.explain().runs:
        assert run.num_served >= shape.served - 1, str(fast.explain())
        assert run.wasted == []
    await llm._aclient().close()


async def events(chain: Runnable[Any, Any], given: Any) -> list[Any]:
    """Events of version 2: where, what and what came out, text in pieces joined."""
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
    return sorted([(key[:-1], told) for key, told in found.items()], key=repr)


STREAMED = [name for name in NAMES if "dict" not in name]


@pytest.mark.parametrize("name", STREAMED)
def test_what_is_streamed_adds_up_to_the_same(llm: ChatConure, name: str) -> None:
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


def test_text_is_streamed_in_pieces_through_the_plan(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_output_token=0.005)
    with Client(app=create_app(config)) as client:
        say = ask("{x}") | ChatConure(client=client) | TEXT
        fast = accelerate(say | ask("{y}") | ChatConure(client=client) | TEXT)
        pieces = list(fast.stream("tea"))
        plain = "".join(fast.bound.stream("tea"))
    assert len(pieces) > 5
    assert "".join(pieces) == plain


class Tokens(BaseCallbackHandler):
    """The pieces that a handler hears of."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.texts.append(token)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Types of events that the server is asked for, one set for each reader."""
    types: list[set[str]] = []
    for kind in (Client, AsyncClient):
        read = kind._events

        def events(
            self: Any, program: str, after: int, wanted: Any, opened: Any, read: Any = read
        ) -> Any:
            assert opened is None or opened.serves(after, wanted), "what came with the answer"
            types.append(set(wanted or ()))
            return read(self, program, after, wanted, opened)

        monkeypatch.setattr(kind, "_events", events)
    return types


async def test_texts_are_read_only_where_they_are_streamed(
    llm: ChatConure, asked: list[set[str]]
) -> None:
    say = ask("{x}") | llm | TEXT
    fast = accelerate(say | ask("{y}") | llm | TEXT)
    whole = await asyncio.to_thread(fast.invoke, "tea")
    assert await fast.ainvoke("tea") == whole
    assert ["node.delta" in types for types in asked] == [False, False]
    assert "".join(await asyncio.to_thread(lambda: list(fast.stream("tea")))) == whole
    assert "".join([piece async for piece in fast.astream("tea")]) == whole
    assert ["node.delta" in types for types in asked[2:]] == [True, True]
    await llm._aclient().close()


async def test_a_call_that_streams_in_a_chain_that_does_not_is_followed_from_then_on(
    tmp_path: Path, asked: list[set[str]]
) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_output_token=0.005)
    with await asyncio.to_thread(lambda: Client(app=create_app(config))) as client:
        streaming = ChatConure(client=client, streaming=True)
        fast = accelerate(ask("{x}") | ChatConure(client=client) | TEXT | ask("{y}") | streaming)
        for run in (fast.invoke, fast.ainvoke):
            tokens, asked[:] = Tokens(), []
            made = run("tea", config={"callbacks": [tokens]})
            answer = await made if isinstance(made, Awaitable) else made
            assert "".join(tokens.texts) == answer.content
            assert len(tokens.texts) > 3
            assert ["node.delta" in types for types in asked] == [False, True]
        await streaming._aclient().close()


@pytest.mark.parametrize("name", ["parallel and join", "map and reduce", "function in the middle"])
def test_batches_give_the_same(llm: ChatConure, name: str) -> None:
    shape = shapes(llm)[name]
    fast = accelerate(shape.chain)
    given = [shape.given] * 3
    expected = [comparable(each) for each in shape.chain.batch(given)]
    assert [comparable(each) for each in fast.batch(given)] == expected
    assert len(fast.explain().runs) == 3
    by_end = dict(fast.batch_as_completed(given))
    assert [comparable(by_end[i]) for i in range(3)] == expected


async def test_awaited_batches_give_the_same(llm: ChatConure) -> None:
    shape = shapes(llm)["map and reduce"]
    fast = accelerate(shape.chain)
    made = await fast.abatch([shape.given] * 5)
    assert made == await shape.chain.abatch([shape.given] * 5)
    assert {(run.num_served, len(run.misses)) for run in fast.explain().runs} == {(3, 0)}
    await llm._aclient().close()


async def test_many_runs_at_once_do_not_mix(llm: ChatConure) -> None:
    chain = ask("{x}") | llm | TEXT | (lambda text: text + "!") | ask("{y}") | llm | TEXT
    fast = accelerate(chain)
    made = await asyncio.gather(*(fast.ainvoke(str(n)) for n in range(20)))
    assert made == [await chain.ainvoke(str(n)) for n in range(20)]
    assert all(not run.misses and not run.wasted for run in fast.explain().runs)
    await llm._aclient().close()


def test_functions_run_once_and_only_on_what_the_model_said(llm: ChatConure) -> None:
    seen: list[str] = []

    def keep(text: str) -> str:
        seen.append(text)
        return text

    chain = RunnableLambda(keep) | ask("{x}") | llm | TEXT | keep | ask("{y}") | llm | TEXT
    made = accelerate(chain).invoke("tea")
    assert len(seen) == 2
    assert seen == ["tea", llm.invoke("tea").content]
    assert made == llm.invoke(seen[1]).content


def test_a_function_that_raises_leaves_nothing_running(llm: ChatConure, client: Client) -> None:
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


class Held:
    """A server that takes nothing in until a chain has got somewhere."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.is_reached = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request; one that submits waits."""
        if scope.get("method") == "POST":
            await asyncio.to_thread(self.is_reached.wait, 30)
        await self._app(scope, receive, send)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Held, ChatConure]]:
    app = Held(create_app(Config(engine="fake", data=tmp_path)))
    with Client(app=app) as client:
        yield app, ChatConure(client=client, temperature=0)


async def test_a_chain_begins_while_its_plan_travels(held: tuple[Held, ChatConure]) -> None:
    server, llm = held
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
    await llm._aclient().close()


async def test_a_chain_that_fails_before_its_plan_has_come_ends_it(
    held: tuple[Held, ChatConure],
) -> None:
    server, llm = held

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
    for run in fast.explain().runs:
        status = await asyncio.to_thread(llm.client.attach, run.program)
        assert (await asyncio.to_thread(status.status)).status in ("cancelled", "done")
    await llm._aclient().close()


def test_a_call_that_fails_raises_as_it_does_without(llm: ChatConure) -> None:
    long = ask("{x}" * 100) | llm | TEXT
    with pytest.raises(PromptError) as plain:
        long.invoke("x" * 1000)
    with pytest.raises(PromptError) as fast:
        accelerate(ask("{x}") | llm | TEXT | ask("{x}" * 1000) | llm).invoke("x")
    assert fast.value.code == plain.value.code == "prompt.too_long"
    saved = accelerate(long.with_fallbacks([ask("short {x}") | llm | TEXT])).invoke("x" * 1000)
    assert saved == llm.invoke("short " + "x" * 1000).content


class Ticking:
    """A value that is printed otherwise each time."""

    def __init__(self) -> None:
        self.ticks = 0

    def __format__(self, spec: str) -> str:
        self.ticks += 1
        return str(self.ticks)


def test_another_prompt_is_a_miss_and_said(llm: ChatConure) -> None:
    fast = accelerate(ask("{x}") | llm | TEXT)
    assert fast.invoke({"x": Ticking()}) == llm.invoke("2").content
    explained = str(fast.explain())
    assert "1 planned, 0 served, 1 missed, 1 wasted" in explained
    assert "missed: chain.steps[1]: another prompt" in explained


def test_the_step_that_broke_a_plan_is_named(llm: ChatConure) -> None:
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


def test_what_templates_run_of_the_app_runs_once(llm: ChatConure) -> None:
    ticks = iter(range(100))
    ticking = ask("{x} at {now}").partial(now=lambda: str(next(ticks)))
    fast = accelerate(ticking | llm | TEXT | ask("{y}") | llm)
    assert fast.invoke({"x": "tea"}).content == llm.invoke(llm.invoke("tea at 0").content).content
    assert next(ticks) == 1
    (run,) = fast.explain().runs
    assert (run.num_served, run.misses, run.wasted) == (2, [], [])


def test_arguments_of_one_call_are_nobodys_plan(llm: ChatConure) -> None:
    fast = accelerate(llm)
    assert fast.invoke("tea", stop=["a"]).content == llm.invoke("tea", stop=["a"]).content
    (run,) = fast.explain().runs
    assert (run.num_planned, len(run.misses)) == (0, 1)


def test_caches_and_limiters_keep_their_say(client: Client) -> None:
    cached = ChatConure(client=client, cache=InMemoryCache(), temperature=0)
    fast = accelerate(ask("{x}") | cached | TEXT)
    assert fast.invoke("tea") == fast.invoke("tea")
    assert [(run.num_planned, len(run.misses)) for run in fast.explain().runs] == [(0, 1), (0, 0)]
    assert "cache" in str(fast.explain())
    limiter = InMemoryRateLimiter(requests_per_second=1000, check_every_n_seconds=0.001)
    limited = ChatConure(client=client, rate_limiter=limiter)
    assert "rate limiter" in str(accelerate(ask("{x}") | limited).explain())


def test_a_call_that_takes_too_long_is_given_up_and_its_program_ended(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_call=5.0)
    with Client(app=create_app(config)) as client:
        llm = ChatConure(client=client, timeout=0.2)
        fast = accelerate(ask("{x}") | llm | TEXT | ask("{y}") | llm)
        with pytest.raises(NotReadyError, match=r"no answer after 0\.2 s"):
            fast.invoke("tea")
        (run,) = fast.explain().runs
        assert client.attach(run.program).status().status == "cancelled"


async def test_an_awaited_call_that_is_cancelled_ends_its_program(tmp_path: Path) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_call=5.0)
    with await asyncio.to_thread(lambda: Client(app=create_app(config))) as client:
        llm = ChatConure(client=client)
        fast = accelerate(ask("{x}") | llm | TEXT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fast.ainvoke("tea"), 0.3)
        (run,) = fast.explain().runs
        status = await asyncio.to_thread(lambda: client.attach(run.program).status())
        assert status.status == "cancelled"
        await llm._aclient().close()


async def test_a_server_that_is_away_is_told_as_that_however_short_the_timeout() -> None:
    retry = Retry(max_retries=1, first_s=0.01, patience_s=0.4, first_patience_s=0.4)
    with Client("http://127.0.0.1:1", retry=retry) as client:
        llm = ChatConure(client=client, timeout=0.1)
        fast = accelerate(ask("{x}") | llm | TEXT)
        with pytest.raises(ServerUnreachableError):
            await asyncio.to_thread(fast.invoke, "tea")
        with pytest.raises(ServerUnreachableError):
            await fast.ainvoke("tea")
        await llm._aclient().close()


async def test_a_chain_that_is_cancelled_again_as_it_leaves_ends_its_program(
    tmp_path: Path, submitted: list[str]
) -> None:
    config = Config(engine="fake", data=tmp_path, time_per_call=60.0, drain_s=0.0)
    with await asyncio.to_thread(lambda: Client(app=create_app(config))) as client:
        llm = ChatConure(client=client)
        fast = accelerate(ask("{x}") | llm | TEXT)
        before = asyncio.all_tasks()
        for num_turns in range(12):
            chain = asyncio.create_task(fast.ainvoke("tea"))
            async with asyncio.timeout(15):
                while len(submitted) == num_turns:  # noqa: ASYNC110 - as the server comes to it
                    await asyncio.sleep(0.01)
            chain.cancel()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            chain.cancel()
            await asyncio.wait([chain])
        await all_ended(client, submitted)
        async with asyncio.timeout(15):
            while asyncio.all_tasks() - before:  # noqa: ASYNC110 - they are nobody's to wait for
                await asyncio.sleep(0.01)
        await llm._aclient().close()


def test_a_plan_that_is_refused_costs_nothing_but_itself(llm: ChatConure) -> None:
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


def test_a_call_that_travels_with_one_that_is_refused_is_made(llm: ChatConure) -> None:
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
async def test_items_have_the_runs_and_the_errors_of_langchains_batches(
    llm: ChatConure, name: str
) -> None:
    def outcome(made: Any) -> Any:
        return repr(made) if isinstance(made, Exception) else comparable(made)

    # Whoever fails beside another is not waited for, here or there.
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
    await llm._aclient().close()


async def test_a_chain_whose_plan_is_refused_goes_on_behind_its_own_steps(llm: ChatConure) -> None:
    bad = llm.bind(constraint={"regex": "(?=a)b"})
    said = (ask("{x}") | bad | TEXT).with_fallbacks([ask("{x}") | llm | TEXT])
    search: RunnableLambda[str, str] = RunnableLambda(lambda text: f"found {text}")
    chain = RunnableParallel(said=said, docs=search) | ask("{docs} {said}") | llm | TEXT
    fast = accelerate(chain)
    expected = await asyncio.to_thread(chain.invoke, "tea")
    assert await asyncio.to_thread(fast.invoke, "tea") == expected
    assert await fast.ainvoke("tea") == expected
    await llm._aclient().close()


def test_an_accelerated_chain_is_a_runnable_among_others(llm: ChatConure) -> None:
    say = ask("{x}") | llm | TEXT
    inner = accelerate(say)
    assert isinstance(accelerate(inner), Accelerated)
    assert (inner | say).invoke("tea") == (say | say).invoke("tea")
    outer = accelerate(inner | say)
    assert outer.invoke("tea") == (say | say).invoke("tea")
    assert inner.get_name() == say.get_name()
    assert inner.with_config(run_name="X").invoke("tea") == say.invoke("tea")
    assert isinstance(llm.invoke("x"), AIMessage)
    with pytest.raises(ProgramError, match="shows no ChatConure"):
        accelerate(RunnableLambda(str))


def test_a_server_that_is_away_is_the_error_of_the_call() -> None:
    llm = ChatConure(base_url="http://127.0.0.1:9", max_retries=0)
    with pytest.raises(ConureError, match="is the server running"):
        accelerate(ask("{x}") | llm).invoke("tea")
