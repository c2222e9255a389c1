"""A QueryPipeline of core 0.12 gives equal results plain, accelerated and compiled."""

# Core 0.12 is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

if not version("llama-index-core").startswith("0.12."):
    pytest.skip(
        "QueryPipeline went with core 0.13: run `make test-llamaindex012`", allow_module_level=True
    )

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.query_pipeline import (
    ArgPackComponent,
    FnComponent,
    InputComponent,
    QueryPipeline,
)
from llama_index.core.query_pipeline.components.argpacks import KwargPackComponent
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, accelerate, explain, to_program
from conure.adapters.llamaindex.pipeline.program import _decode, _encode
from conure.server.program.errors import ProgramError, RunError

pytestmark = [
    # The class is deprecated: it is tested on the last core that has it.
    pytest.mark.filterwarnings("ignore:Call to deprecated class QueryPipeline"),
]


class Given(BaseRetriever):
    """Retrieves the query itself."""

    def _retrieve(self, query_bundle: Any) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=TextNode(id_=f"n{n}", text=f"{query_bundle.query_str} {n}"), score=1)
            for n in range(2)
        ]


def shout(text: Any) -> str:
    return str(getattr(text, "message", text)).upper()


def join_nodes(nodes: list[NodeWithScore]) -> str:
    return "\n".join(node.get_content() for node in nodes)


def join_responses(responses: list[Any]) -> str:
    return " & ".join(type(each).__name__ + str(each) for each in responses)


def linked(modules: dict[str, Any], *links: tuple[Any, ...]) -> QueryPipeline:
    """Return a pipeline with links `(src, dest)` or `(src, src_key, dest, dest_key)`."""
    pipeline = QueryPipeline()
    pipeline.add_modules(modules)
    for link in links:
        if len(link) == 2:
            pipeline.add_link(*link)
        else:
            src, src_key, dest, dest_key = link
            pipeline.add_link(src, dest, src_key=src_key, dest_key=dest_key)
    return pipeline


def shapes(llm: Conure) -> dict[str, QueryPipeline]:
    say = PromptTemplate("Say {x}")
    again = PromptTemplate("Again: {y} {{y}} {z}").partial_format(z="now")
    chat = ChatPromptTemplate(
        message_templates=[
            ChatMessage(role="system", content="Be {mood}."),
            ChatMessage(role="user", content="{topic}"),
        ]
    )
    return {
        "one call": QueryPipeline(chain=[say, llm]),
        "two calls": QueryPipeline(chain=[say, llm, again, llm]),
        "call to call": QueryPipeline(chain=[say, llm, llm]),
        "function between": QueryPipeline(chain=[say, llm, FnComponent(fn=shout), again, llm]),
        "function last": QueryPipeline(chain=[say, llm, FnComponent(fn=shout)]),
        "retrieval after rewriting": QueryPipeline(
            chain=[say, llm, Given(), FnComponent(fn=join_nodes), again, llm]
        ),
        "retrieval first": QueryPipeline(chain=[Given(), FnComponent(fn=join_nodes), say, llm]),
        "two inputs": linked(
            {"in": InputComponent(), "p": chat, "l": llm},
            ("in", "topic", "p", "topic"),
            ("in", "mood", "p", "mood"),
            ("p", "l"),
        ),
        "fan and prompt": linked(
            {
                "in": InputComponent(),
                "a": PromptTemplate("A {x}"),
                "la": llm,
                "b": PromptTemplate("B {x}"),
                "lb": llm,
                "sum": PromptTemplate("{one} or {two}?"),
                "l": llm,
            },
            ("in", "x", "a", "x"),
            ("in", "x", "b", "x"),
            ("a", "la"),
            ("b", "lb"),
            ("la", "output", "sum", "one"),
            ("lb", "output", "sum", "two"),
            ("sum", "l"),
        ),
    }


def joins(llm: Conure, join: Any, after: list[Any]) -> QueryPipeline:
    """Return a pipeline of two calls, a join, and a chain."""
    modules = {
        "in": InputComponent(),
        "a": PromptTemplate("A {x}"),
        "la": llm,
        "b": PromptTemplate("B {x}"),
        "lb": llm,
        "join": join,
    }
    modules |= {f"m{n}": module for n, module in enumerate(after)}
    chain = ["join", *(f"m{n}" for n in range(len(after)))]
    return linked(
        modules,
        ("in", "x", "a", "x"),
        ("in", "x", "b", "x"),
        ("a", "la"),
        ("b", "lb"),
        ("la", "output", "join", "one"),
        ("lb", "output", "join", "two"),
        *itertools.pairwise(chain),
    )


NAMES = [
    "one call",
    "two calls",
    "call to call",
    "function between",
    "function last",
    "retrieval after rewriting",
    "retrieval first",
    "two inputs",
    "fan and prompt",
]


def inputs_of(name: str) -> dict[str, str]:
    if name == "two inputs":
        return {"topic": "tea", "mood": 'it\'s "odd"'}
    return {"input": "tea"} if name == "retrieval first" else {"x": "tea"}


@pytest.fixture(params=[True, False], ids=["chat", "completion"])
def llm(request: pytest.FixtureRequest, make_llm: Callable[..., Conure]) -> Conure:
    return make_llm(is_chat_model=request.param)


@pytest.mark.parametrize("name", NAMES)
def test_accelerated_pipeline_matches_plain_pipeline(llm: Conure, name: str) -> None:
    plain = shapes(llm)[name]
    fast = accelerate(plain)
    given = inputs_of(name)
    assert str(fast.run(**given)) == str(plain.run(**given))
    report = explain(fast)
    assert report.num_planned == len(report.calls) >= 1
    assert report.num_wasted == 0
    assert len(report.programs) == 1


@pytest.mark.parametrize("name", ["two calls", "function between", "fan and prompt"])
async def test_accelerated_async_pipeline_matches_plain_pipeline(
    make_llm: Callable[..., Conure], name: str
) -> None:
    plain = shapes(make_llm())[name]
    fast = accelerate(plain)
    assert str(await fast.arun(x="tea")) == str(await plain.arun(x="tea"))
    report = explain(fast)
    assert report.num_planned == len(report.calls)
    assert report.num_wasted == 0


@pytest.mark.parametrize("name", NAMES)
def test_program_matches_pipeline(llm: Conure, client: Client, name: str) -> None:
    pipeline = shapes(llm)[name]
    given = inputs_of(name)
    compiled = to_program(pipeline)
    assert compiled.inputs == list(given)
    made, result = compiled.execute(client, **given)
    expected = pipeline.run(**given)
    assert str(made) == str(expected)
    assert type(made) is type(expected)
    num_calls = sum(node["op"] == "generate" for node in compiled.program["nodes"])
    assert result.receipt.calls == num_calls


@pytest.mark.parametrize(
    ("join", "after", "expected"),
    [
        (ArgPackComponent(), [FnComponent(fn=join_responses)], " & "),
        (KwargPackComponent(), [FnComponent(fn=lambda pack: f"{sorted(pack)}")], "['one', 'two']"),
    ],
)
def test_joins_wait_for_all_links(
    llm: Conure, client: Client, join: Any, after: list[Any], expected: str
) -> None:
    pipeline = joins(llm, join, after)
    made = accelerate(pipeline).run(x="tea")
    assert expected in made
    assert to_program(pipeline).run(client, x="tea") == made
    # Core 0.12 runs a join first, without inputs, and returns two outputs.
    with pytest.raises(ValueError, match="Only one output"):
        pipeline.run(x="tea")


def test_prompt_prints_joined_list_as_python(llm: Conure, client: Client) -> None:
    pipeline = joins(llm, ArgPackComponent(), [PromptTemplate("Of {them}"), llm])
    fast = accelerate(pipeline)
    made = str(fast.run(x="it's"))
    assert explain(fast).num_planned == 3
    assert explain(fast).num_wasted == 0
    assert str(to_program(pipeline).run(client, x="it's")) == made


def test_an_input_with_reserved_characters_is_not_planned(llm: Conure) -> None:
    pipeline = linked({"p": PromptTemplate("A {x}"), "l": llm}, ("p", "l"))
    fast = accelerate(pipeline)
    for number in (0, 7):
        given = f"tea \ue000{number}\ue001"
        assert str(fast.run(x=given)) == str(pipeline.run(x=given))
    assert explain(fast).num_planned == 0
    assert explain(fast).notes == [
        "an input contains characters that are reserved for placeholders"
    ]


def test_edge_functions_run_in_the_pipeline(llm: Conure, client: Client) -> None:
    pipeline = QueryPipeline()
    pipeline.add_modules(
        {"p": PromptTemplate("A {x}"), "l": llm, "q": PromptTemplate("B {x}"), "m": llm}
    )
    ran: list[str] = []

    def lowered(given: Any) -> str:
        ran.append(str(given))
        return str(given).lower()

    pipeline.add_link("p", "l")
    pipeline.add_link("l", "q", input_fn=lowered)
    pipeline.add_link("q", "m")
    fast = accelerate(pipeline)
    made = str(fast.run(x="tea"))
    assert len(ran) == 1
    assert "\ue000" not in ran[0]
    assert made == str(pipeline.run(x="tea"))
    assert explain(fast).num_planned == 2
    assert explain(fast).notes == ["q: the edge from l has a function"]
    with pytest.raises(ProgramError, match="module 'q': the edge from l has a function"):
        to_program(pipeline)


def test_untaken_branch_is_not_planned(llm: Conure) -> None:
    pipeline = QueryPipeline()
    pipeline.add_modules(
        {"p": PromptTemplate("A {x}"), "l": llm, "yes": PromptTemplate("Y {x}"), "m": llm}
    )
    pipeline.add_modules({"no": PromptTemplate("N {x}"), "n": llm})
    pipeline.add_link("p", "l")
    pipeline.add_link("l", "yes", condition_fn=lambda given: True)
    pipeline.add_link("l", "no", condition_fn=lambda given: False)
    pipeline.add_link("yes", "m")
    pipeline.add_link("no", "n")
    fast = accelerate(pipeline)
    fast.run_multi({"p": {"x": "tea"}})
    report = explain(fast)
    assert (report.num_planned, len(report.calls), report.num_wasted) == (2, 2, 0)


def test_module_exception_is_cause_of_failure(llm: Conure, client: Client) -> None:
    def broken(given: Any) -> str:
        raise KeyError("oh")

    pipeline = QueryPipeline(chain=[PromptTemplate("{x}"), llm, FnComponent(fn=broken)])
    with pytest.raises(KeyError):
        accelerate(pipeline).run(x="tea")
    with pytest.raises(RunError, match="KeyError: 'oh'") as caught:
        to_program(pipeline).run(client, x="tea")
    assert isinstance(caught.value.__cause__, KeyError)


def test_value_that_is_not_json_stays_in_the_process(llm: Conure, client: Client) -> None:
    pipeline = QueryPipeline(
        chain=[PromptTemplate("{x}"), llm, FnComponent(fn=lambda given: {1, 2})]
    )
    assert to_program(pipeline).run(client, x="tea") == {1, 2}


def test_values_of_parallel_steps_have_their_own_references() -> None:
    class Unfilled(dict[str, Any]):
        """Has the length that two threads read before either adds its value."""

        def __len__(self) -> int:
            return 0

    local = Unfilled()
    first, second = _encode({1}, local), _encode({2}, local)
    assert (_decode(first, local), _decode(second, local)) == ({1}, {2})


def test_every_shape_is_tested(make_llm: Callable[..., Conure]) -> None:
    assert list(shapes(make_llm())) == NAMES
