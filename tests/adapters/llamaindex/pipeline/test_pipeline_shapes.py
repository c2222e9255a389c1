"""QueryPipelines of many shapes give equal results plain, accelerated and compiled.

Where core 0.12 runs joins too early, the accelerated and the compiled pipeline agree.
"""

# Core 0.12 is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

if not version("llama-index-core").startswith("0.12."):
    pytest.skip(
        "QueryPipeline went with core 0.13: run `make test-llamaindex012`", allow_module_level=True
    )

from llama_index.core.base.base_selector import BaseSelector, SelectorResult, SingleSelection
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate, SelectorPromptTemplate
from llama_index.core.query_pipeline import (
    ArgPackComponent,
    FnComponent,
    InputComponent,
    QueryPipeline,
)
from llama_index.core.query_pipeline.components.argpacks import KwargPackComponent
from llama_index.core.query_pipeline.components.router import RouterComponent
from llama_index.core.response_synthesizers import TreeSummarize

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, Report, accelerate, explain, to_program
from conure.server.program.errors import ConureError, ProgramError, RunError

from ...left import all_ended
from .test_pipeline import Given, linked, shout

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated class QueryPipeline")


@pytest.fixture
def llm(make_llm: Callable[..., Conure]) -> Conure:
    return make_llm()


def whole(report: Report) -> bool:
    """Return whether all calls were served from the plan and every planned call was used."""
    return report.num_planned == len(report.calls) > 0 == report.num_wasted


def twice(llm: Conure) -> QueryPipeline:
    return QueryPipeline(chain=[PromptTemplate("A {x}"), llm, PromptTemplate("B {y}"), llm])


def pack(llm: Conure, join: Any, *, links_first: str, is_deep: bool = False) -> QueryPipeline:
    """Return a pipeline with two branches and a join; one branch may be longer."""
    modules = {
        "in": InputComponent(),
        "a": PromptTemplate("A {x}"),
        "la": llm,
        "b": PromptTemplate("B {x}"),
        "lb": twice(llm) if is_deep else llm,
        "join": join,
        "said": FnComponent(fn=lambda pack: f"{[shout(each) for each in pack]}"),
    }
    both = [("la", "output", "join", "a"), ("lb", "output", "join", "b")]
    if links_first == "b":
        both.reverse()
    return linked(
        modules,
        ("in", "x", "a", "x"),
        ("in", "x", "b", "x"),
        ("a", "la"),
        ("b", "lb"),
        *both,
        ("join", "said"),
    )


@pytest.mark.parametrize("is_deep", [False, True], ids=["even", "deep"])
@pytest.mark.parametrize("links_first", ["a", "b"])
@pytest.mark.parametrize("join", [ArgPackComponent, KwargPackComponent])
def test_join_packs_in_link_order(
    llm: Conure, client: Client, join: Any, links_first: str, is_deep: bool
) -> None:
    pipeline = pack(llm, join(), links_first=links_first, is_deep=is_deep)
    fast = accelerate(pipeline)
    made = fast.run(x="tea")
    assert whole(explain(fast))
    assert asyncio.run(fast.arun(x="tea")) == made
    assert to_program(pipeline).run(client, x="tea") == made
    if join is KwargPackComponent:
        assert made == str([name.upper() for name in sorted("ab", reverse=links_first == "b")])


def test_join_readers_are_planned_in_link_order(llm: Conure, client: Client) -> None:
    pipeline = pack(llm, ArgPackComponent(), links_first="b")
    pipeline.add_modules({"p": PromptTemplate("Of {them}"), "l": llm})
    pipeline.add_link("join", "p")
    pipeline.add_link("p", "l")
    fast = accelerate(pipeline)
    made = fast.run_multi({"in": {"x": "tea"}})
    assert whole(explain(fast))
    assert str(to_program(pipeline).run(client, x="tea")["l"]) == str(made["l"]["output"])


def test_join_skips_untaken_branch(llm: Conure) -> None:
    pipeline = linked(
        {
            "p": PromptTemplate("A {x}"),
            "yes": PromptTemplate("Y {x}"),
            "m": llm,
            "no": PromptTemplate("N {x}"),
            "n": llm,
            "join": ArgPackComponent(),
            "of": PromptTemplate("Of {them}"),
            "l": llm,
        },
        ("yes", "m"),
        ("no", "n"),
        ("m", "output", "join", "m"),
        ("n", "output", "join", "n"),
        ("join", "of"),
        ("of", "l"),
    )
    pipeline.add_link("p", "yes", condition_fn=lambda given: True)
    pipeline.add_link("p", "no", condition_fn=lambda given: False)
    fast = accelerate(pipeline)
    answer = llm.complete("Y A tea").text
    assert str(fast.run(x="tea").message.content) == llm.complete(f"Of ['{answer}']").text
    assert whole(explain(fast))


def test_nested_pipelines_are_compiled(llm: Conure, client: Client) -> None:
    inner = QueryPipeline(chain=[PromptTemplate("I {x}"), llm, twice(llm)])
    pipeline = QueryPipeline(
        chain=[PromptTemplate("O {x}"), llm, inner, PromptTemplate("{z}"), llm]
    )
    fast = accelerate(pipeline)
    made = str(fast.run(x="tea"))
    assert made == str(pipeline.run(x="tea"))
    assert whole(explain(fast))
    assert len(explain(fast).calls) == 5
    assert str(to_program(pipeline).run(client, x="tea")) == made


def test_nested_pipeline_is_planned_up_to_opaque_module(llm: Conure) -> None:
    inner = linked(
        {"p": PromptTemplate("I {x}"), "l": llm, "f": FnComponent(fn=shout)},
        ("p", "l"),
        ("l", "f"),
    )
    pipeline = linked(
        {"in": PromptTemplate("O {x}"), "inner": inner, "q": PromptTemplate("{z}"), "m": llm},
        ("in", "inner"),
        ("inner", "q"),
        ("q", "m"),
    )
    fast = accelerate(pipeline)
    assert str(fast.run(x="tea")) == str(pipeline.run(x="tea"))
    assert whole(explain(fast))
    assert explain(fast).notes == ["inner.f: a FnComponent runs here"]


def test_nested_accelerated_pipeline_is_planned_once(llm: Conure) -> None:
    pipeline = QueryPipeline(chain=[accelerate(twice(llm)), PromptTemplate("{z}"), llm])
    fast = accelerate(pipeline)
    assert str(fast.run(x="tea")) == str(pipeline.run(x="tea"))
    assert whole(explain(fast))


def test_streamed_response_is_planned(llm: Conure) -> None:
    of_this_core: Any = llm
    last = of_this_core.as_query_component(streaming=True)
    pipeline = QueryPipeline(chain=[PromptTemplate("A {x}"), llm, PromptTemplate("B {y}"), last])
    fast = accelerate(pipeline)
    made = [piece.delta for piece in fast.run(x="tea")]
    assert "".join(made) == "".join(piece.delta for piece in pipeline.run(x="tea"))
    assert whole(explain(fast))
    with pytest.raises(ProgramError, match="module 'LLMChatComponent': its response is streamed"):
        to_program(pipeline)


def test_stream_that_a_prompt_reads_is_left_to_the_pipeline(llm: Conure) -> None:
    of_this_core: Any = llm
    first = of_this_core.as_query_component(streaming=True)
    pipeline = QueryPipeline(chain=[PromptTemplate("A {x}"), first, PromptTemplate("B {y}"), llm])
    fast = accelerate(pipeline)
    assert str(fast.run(x="tea")) == str(pipeline.run(x="tea"))
    report = explain(fast)
    assert (report.num_planned, len(report.calls), report.num_wasted) == (2, 2, 0)


@pytest.mark.parametrize("is_iterator_in_list", [False, True])
def test_iterator_that_a_step_reads_is_left_to_it(
    llm: Conure, client: Client, is_iterator_in_list: bool
) -> None:
    def joined(parts: Any) -> str:
        return ",".join(parts[0] if is_iterator_in_list else parts)

    def given() -> Any:
        letters = (letter for letter in "ab")
        return [letters] if is_iterator_in_list else letters

    pipeline = QueryPipeline(chain=[FnComponent(fn=joined), PromptTemplate("A {x}"), llm])
    expected = str(pipeline.run(parts=given()))
    fast = accelerate(pipeline)
    assert str(fast.run(parts=given())) == expected
    assert whole(explain(fast))
    assert str(to_program(pipeline).run(client, parts=given())) == expected


def test_prompt_without_an_llm_has_its_default_template(llm: Conure, client: Client) -> None:
    def has_chat(llm: Any) -> bool:
        raise AssertionError("no LLM is known")

    choice = SelectorPromptTemplate(
        default_template=PromptTemplate("Of {x}"),
        conditionals=[(has_chat, PromptTemplate("Chat of {x}"))],
    )
    pipeline = QueryPipeline(chain=[choice, llm])
    expected = str(pipeline.run(x="tea"))
    fast = accelerate(pipeline)
    assert str(fast.run(x="tea")) == expected
    assert whole(explain(fast))
    assert str(to_program(pipeline).run(client, x="tea")) == expected


def test_error_of_a_plan_is_noted(llm: Conure) -> None:
    ran: list[Any] = []

    def is_chat(llm: Any) -> bool:
        ran.append(llm)
        if len(ran) == 1:
            raise KeyError("only once")
        return False

    choice = SelectorPromptTemplate(
        default_template=PromptTemplate("Of {x}"),
        conditionals=[(is_chat, PromptTemplate("Chat of {x}"))],
    )
    of_this_core: Any = choice
    prompt = of_this_core.as_query_component(llm=llm)
    pipeline = QueryPipeline(chain=[prompt, llm, PromptTemplate("B {y}"), llm])
    fast = accelerate(pipeline)
    made = fast.run(x="tea")
    assert str(made) == str(pipeline.run(x="tea"))
    report = explain(fast)
    assert (report.num_planned, len(report.calls), report.num_wasted) == (2, 2, 0)
    assert report.notes == ["KeyError: 'only once'"]


def test_invalid_prompt_input_is_rejected_at_its_module(llm: Conure) -> None:
    pipeline = pack(llm, KwargPackComponent(), links_first="a")
    pipeline.add_modules({"p": PromptTemplate("Of {them}"), "l": llm})
    pipeline.add_link("join", "p")
    pipeline.add_link("p", "l")
    fast = accelerate(pipeline)
    with pytest.raises(ValueError, match="is not stringable") as caught:
        fast.run_multi({"in": {"x": "tea"}})
    assert "\ue000" not in str(caught.value)
    assert whole(explain(fast))
    with pytest.raises(ProgramError, match="module 'p': a dict cannot be the input of a prompt"):
        to_program(pipeline)


@pytest.mark.parametrize("is_awaited", [False, True], ids=["run", "arun"])
def test_batch_is_one_program(llm: Conure, is_awaited: bool) -> None:
    pipeline = twice(llm)
    fast = accelerate(pipeline)
    given = {"x": ["tea", "milk", "ale"]}
    if is_awaited:
        made = asyncio.run(fast.arun(batch=True, **given))
    else:
        made = fast.run(batch=True, **given)
    assert [str(each) for each in made] == [str(each) for each in pipeline.run(batch=True, **given)]
    assert whole(explain(fast))
    assert len(explain(fast).programs) == 1


def test_several_roots_and_leaves_match(llm: Conure, client: Client) -> None:
    pipeline = linked(
        {
            "p": PromptTemplate("A {x}"),
            "l": llm,
            "q": PromptTemplate("B {y}"),
            "m": llm,
            "both": PromptTemplate("{one} {two}"),
            "n": llm,
            "other": PromptTemplate("C {one}"),
            "o": llm,
        },
        ("p", "l"),
        ("q", "m"),
        ("l", "output", "both", "one"),
        ("m", "output", "both", "two"),
        ("both", "n"),
        ("l", "output", "other", "one"),
        ("other", "o"),
    )
    fast = accelerate(pipeline)
    given = {"p": {"x": "tea"}, "q": {"y": "milk"}}
    expected = {key: str(each["output"]) for key, each in pipeline.run_multi(given).items()}
    made, steps = fast.run_multi_with_intermediates(given)
    assert {key: str(each["output"]) for key, each in made.items()} == expected
    assert steps.keys() == pipeline.module_dict.keys()
    assert whole(explain(fast))
    ran = to_program(pipeline).run(client, x="tea", y="milk")
    assert {key: str(each) for key, each in ran.items()} == expected


def after_a_step(llm: Conure, made: Any) -> QueryPipeline:
    """Return a pipeline of a call, a step that returns a value, and a call that reads it."""
    step = FnComponent(fn=lambda given: made)
    return QueryPipeline(chain=[PromptTemplate("A {x}"), llm, step, PromptTemplate("{y}"), llm])


async def test_unsendable_text_fails_and_leaves_nothing_running(
    llm: Conure, client: Client, submitted: list[str]
) -> None:
    pipeline = after_a_step(llm, "\ud800")
    with pytest.raises(ProgramError, match="half of a surrogate pair"):
        await accelerate(pipeline).arun(x="tea")
    with pytest.raises(RunError, match="surrogates") as caught:
        await asyncio.to_thread(to_program(pipeline).run, client, x="tea")
    assert isinstance(caught.value.__cause__, UnicodeEncodeError)
    await all_ended(client, submitted)


async def test_too_large_value_fails_at_once(
    llm: Conure, client: Client, submitted: list[str]
) -> None:
    pipeline = after_a_step(llm, "x" * 5_000_000)
    too_long = "more than 73728 prompt tokens exceed the limit of 8192 tokens"
    with pytest.raises(ConureError, match=too_long):
        await accelerate(pipeline).arun(x="tea")
    with pytest.raises(ConureError, match=too_long):
        await asyncio.to_thread(to_program(pipeline).run, client, x="tea")
    await all_ended(client, submitted)


@pytest.mark.parametrize("given", [{}, {"y": "tea"}, {"x": "tea", "y": "tea"}])
def test_wrong_inputs_are_named(llm: Conure, client: Client, given: dict[str, str]) -> None:
    with pytest.raises(ProgramError, match=r"has the inputs \['x'\], got"):
        to_program(twice(llm)).run(client, **given)


def test_unnamed_input_of_the_notebooks_is_compiled(llm: Conure, client: Client) -> None:
    pipeline = QueryPipeline()
    pipeline.add_modules({"input": InputComponent(), "prompt": PromptTemplate("A {x}"), "llm": llm})
    pipeline.add_link("input", "prompt")
    pipeline.add_link("prompt", "llm")
    expected = str(pipeline.run(input="tea"))
    compiled = to_program(pipeline)
    assert str(compiled.run(client, input="tea")) == expected
    assert str(compiled.run(client, query="tea")) == expected
    pipeline.add_modules({"second": PromptTemplate("B {x} {y}")})
    pipeline.add_link("input", "second", src_key="a", dest_key="x")
    pipeline.add_link("input", "second", src_key="b", dest_key="y")
    with pytest.raises(ProgramError, match=r"ambiguous, as there are the inputs \['a', 'b'\]"):
        to_program(pipeline)


def test_synthesizer_as_last_module_returns_its_response(llm: Conure, client: Client) -> None:
    pipeline = QueryPipeline()
    pipeline.add_modules(
        {
            "input": InputComponent(),
            "prompt": PromptTemplate("A {x}"),
            "llm": llm,
            "retriever": Given(),
            "summarizer": TreeSummarize(llm=llm),
        }
    )
    pipeline.add_link("input", "prompt")
    pipeline.add_link("prompt", "llm")
    pipeline.add_link("llm", "retriever")
    pipeline.add_link("llm", "summarizer", dest_key="query_str")
    pipeline.add_link("retriever", "summarizer", dest_key="nodes")
    expected = pipeline.run(input="tea")
    made = to_program(pipeline).run(client, input="tea")
    assert str(made) == str(expected)
    assert [each.text for each in made.source_nodes] == [
        each.text for each in expected.source_nodes
    ]


class Always(BaseSelector):
    """Selects the second choice."""

    def _select(self, choices: Any, query: Any) -> Any:
        return SelectorResult(selections=[SingleSelection(index=1, reason="it fits")])

    async def _aselect(self, choices: Any, query: Any) -> Any:
        return self._select(choices, query)

    def _get_prompts(self) -> Any:
        return {}

    def _update_prompts(self, prompts_dict: Any) -> None:
        pass


def test_router_is_compiled(llm: Conure, client: Client) -> None:
    router = RouterComponent(
        selector=Always(), choices=["one", "two"], components=[llm, twice(llm)]
    )
    pipeline = QueryPipeline(chain=[router, PromptTemplate("Again {y}"), llm])
    expected = str(pipeline.run(query="tea"))
    assert str(to_program(pipeline).run(client, query="tea")) == expected


def test_messages_are_inputs_of_client_steps(llm: Conure, client: Client) -> None:
    def chat(query: str, history: list[ChatMessage]) -> list[ChatMessage]:
        return [*history, ChatMessage(role="user", content=query)]

    pipeline = linked(
        {
            "input": InputComponent(),
            "chat": FnComponent(fn=chat),
            "said": FnComponent(fn=lambda messages: llm.chat(messages)),
        },
        ("input", "query", "chat", "query"),
        ("input", "history", "chat", "history"),
        ("chat", "said"),
    )
    given: Any = {"query": "tea", "history": [ChatMessage("hi"), ChatMessage("ho")]}
    made = to_program(pipeline).run(client, **given)
    assert str(made) == str(pipeline.run(**given))
