"""A compiled QueryPipeline has the checks, the values and the server of the pipeline."""

# Core 0.12 is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from typing import Any

import pytest

if not version("llama-index-core").startswith("0.12."):
    pytest.skip(
        "QueryPipeline went with core 0.13: run `make test-llamaindex012`", allow_module_level=True
    )

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.query_pipeline import (
    ArgPackComponent,
    FnComponent,
    InputComponent,
    QueryPipeline,
)
from llama_index.core.schema import NodeWithScore, TextNode

from conure.adapters.client import Client
from conure.adapters.llamaindex import Conure, accelerate, explain, to_program
from conure.adapters.llamaindex.llm.answer_checks import CutAnswerError
from conure.server.program.errors import ProgramError, RunError

from ..conformance import Person
from .test_pipeline import linked

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated class QueryPipeline")


@pytest.fixture
def llm(make_llm: Callable[..., Conure]) -> Conure:
    return make_llm()


CHOICES = {"constraint": {"choices": ["approve it", "reject it"]}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHECKED: dict[str, dict[str, Any]] = {
    "constraint": {"additional_kwargs": CHOICES},
    "tools": {"additional_kwargs": {"tools": [TOOL], "tool_choice": "required"}},
    "parser": {"output_parser": PydanticOutputParser(Person)},
}


@pytest.mark.parametrize("name", CHECKED)
def test_cut_answer_is_refused(make_llm: Callable[..., Conure], client: Client, name: str) -> None:
    llm = make_llm(max_tokens=1, **CHECKED[name])
    pipeline = QueryPipeline(chain=[PromptTemplate("{x}"), llm])
    with pytest.raises(CutAnswerError):
        pipeline.run(x="tea")
    with pytest.raises(RunError) as caught:
        to_program(pipeline).run(client, x="tea")
    assert isinstance(caught.value.__cause__, CutAnswerError)


def test_checked_llm_reads_and_writes_what_it_does_in_the_pipeline(
    make_llm: Callable[..., Conure], client: Client
) -> None:
    checked = make_llm(additional_kwargs=CHOICES)
    chat: Any = ChatPromptTemplate(
        message_templates=[
            ChatMessage(role="system", content="Be {mood}."),
            ChatMessage(role="user", content="{topic}"),
        ]
    )
    pipeline = linked(
        {
            "in": InputComponent(),
            "p": PromptTemplate("Of {x}"),
            "l": make_llm(),
            "chat": chat.as_query_component(format_messages=True),
            "checked": checked,
            "again": PromptTemplate("{z}"),
            "m": make_llm(),
        },
        ("in", "x", "p", "x"),
        ("p", "l"),
        ("l", "output", "chat", "topic"),
        ("in", "mood", "chat", "mood"),
        ("chat", "checked"),
        ("checked", "again"),
        ("again", "m"),
    )
    expected = str(pipeline.run(x="tea", mood="calm"))
    assert str(to_program(pipeline).run(client, x="tea", mood="calm")) == expected


class Upper(Conure):
    """Changes the answers."""

    def chat(self, messages: Any, **kwargs: Any) -> Any:
        response = super().chat(messages, **kwargs)
        response.message.content = (response.message.content or "").upper()
        return response


def test_llm_that_overrides_a_method_is_a_client_step(client: Client) -> None:
    llm = Upper(client=client, temperature=0, max_tokens=8)
    pipeline = QueryPipeline(chain=[PromptTemplate("Say {x}"), llm, PromptTemplate("{y}"), llm])
    expected = str(pipeline.run(x="tea"))
    assert expected == expected.upper().replace("ASSISTANT", "assistant")
    assert str(to_program(pipeline).run(client, x="tea")) == expected
    fast = accelerate(pipeline)
    assert str(fast.run(x="tea")) == expected
    report = explain(fast)
    assert (report.num_planned, report.num_wasted) == (0, 0)
    assert "its LLM is a Upper, which overrides 'chat'" in report.notes[0]


class Own:
    """An object of the app."""


VALUES: dict[str, Any] = {
    "date in a node": [
        NodeWithScore(node=TextNode(text="t", metadata={"day": date(2024, 5, 1)}), score=1)
    ],
    "object in a node": [NodeWithScore(node=TextNode(text="t", metadata={"own": Own()}))],
    "no number": [float("nan"), float("inf")],
    "large number": 2**70,
    "subclass of dict": Counter("tea"),
    "tuple in a node": [NodeWithScore(node=TextNode(text="t", metadata={"tags": ("a", "b")}))],
}


@pytest.mark.parametrize("name", VALUES)
def test_next_module_gets_the_value_itself(client: Client, name: str) -> None:
    got: list[Any] = []
    steps = [
        FnComponent(fn=lambda x: VALUES[name]),
        FnComponent(fn=lambda value: got.append(value)),
    ]
    to_program(QueryPipeline(chain=steps)).run(client, x="tea")
    (value,) = got
    assert repr(value) == repr(VALUES[name])
    assert type(value) is type(VALUES[name])


def test_prompt_of_one_variable_is_a_text(llm: Conure, client: Client) -> None:
    kinds: list[str] = []

    def kind(text: Any) -> str:
        kinds.append(type(text).__name__)
        return "it"

    pipeline = QueryPipeline(
        chain=[PromptTemplate("{x}"), llm, PromptTemplate("{y}"), FnComponent(fn=kind)]
    )
    pipeline.run(x="tea")
    to_program(pipeline).run(client, x="tea")
    assert kinds == ["str", "str"]


def test_packed_values_of_steps_are_printed_for_a_step(client: Client) -> None:
    pipeline = linked(
        {
            "step": FnComponent(fn=lambda x: x.upper()),
            "join": ArgPackComponent(),
            "prompt": PromptTemplate("{them}"),
            "last": FnComponent(fn=lambda text: f"<{text}>"),
        },
        ("step", "output", "join", "a"),
        ("join", "prompt"),
        ("prompt", "last"),
    )
    assert to_program(pipeline).run(client, x="tea") == "<['TEA']>"


def test_chat_prompt_gives_messages_to_a_step(client: Client) -> None:
    chat: Any = ChatPromptTemplate(
        message_templates=[ChatMessage(role="system", content="Be {mood}.")]
    )
    pipeline = QueryPipeline(
        chain=[
            chat.as_query_component(format_messages=True),
            FnComponent(fn=lambda messages: [(each.role, each.content) for each in messages]),
        ]
    )
    assert to_program(pipeline).run(client, mood="calm") == pipeline.run(mood="calm")


def test_program_is_refused_by_a_client_of_another_server(llm: Conure, client: Client) -> None:
    other = Conure(base_url="http://127.0.0.1:9")
    other._model_infos["default"] = {"id": "m", "max_model_len": 1300}
    pipeline = QueryPipeline(chain=[PromptTemplate("{x}"), llm, PromptTemplate("{y}"), other])
    compiled = to_program(pipeline)
    with pytest.raises(ProgramError, match="uses another server than the client") as caught:
        compiled.run(client, x="tea")
    assert caught.value.code == "to_program.server"
