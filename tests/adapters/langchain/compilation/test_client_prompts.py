"""Prompts that the client renders, for models of Conure and of other providers."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnableParallel

from conure.adapters.client import Client
from conure.adapters.langchain import ChatConure, accelerate, to_program
from conure.server.program.errors import ProgramError

from ..shapes import TEXT, ask

URL = "data:image/png;base64,AA=="
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
WITH_IMAGE = ChatPromptTemplate.from_messages(
    [("human", [{"type": "text", "text": "{q}"}, {"type": "image_url", "image_url": "{link}"}])]
)
STATIC = ChatPromptTemplate.from_messages(
    [HumanMessage([{"type": "text", "text": "What is it?"}, IMAGE])]
)
MUSTACHE = PromptTemplate.from_template("Say {{x}}", template_format="mustache")
SEEN: list[Any] = []


class Seeing(FakeListChatModel):
    """A model of another provider that notes its messages."""

    def _call(self, messages: Any, *args: Any, **kwargs: Any) -> str:
        SEEN.append(messages)
        return "a cat"


@pytest.fixture
def llm(client: Client) -> ChatConure:
    return ChatConure(client=client, temperature=0, max_tokens=20)


def test_a_model_of_another_provider_gets_the_image_of_a_prompt(
    client: Client, llm: ChatConure
) -> None:
    SEEN.clear()
    chain = WITH_IMAGE | Seeing(responses=[]) | TEXT | ask("{y}") | llm | TEXT
    given = {"q": "What is it?", "link": URL}
    expected = chain.invoke(given)
    assert to_program(chain).run(client, given) == expected
    assert accelerate(chain).invoke(given) == expected
    assert len(SEEN) == 3
    assert [each[0].content for each in SEEN] == [SEEN[0][0].content] * 3
    assert SEEN[0][0].content[1] == IMAGE


@pytest.mark.parametrize("part", ["another model", "branch"])
def test_a_static_image_is_refused_with_its_position(part: str) -> None:
    llm = ChatConure(base_url="http://127.0.0.1:9")
    chain: Any = STATIC | Seeing(responses=[]) | TEXT | ask("{y}") | llm
    if part == "branch":
        chain = RunnableBranch((ask("{x}") | llm | TEXT, STATIC), ask("{x}")) | llm
    with pytest.raises(ProgramError, match="content other than text, such as an image") as refused:
        to_program(chain)
    assert (refused.value.code, refused.value.path) == ("to_program.unsupported", "chain.steps[1]")


def test_a_function_gets_a_prompt_that_the_client_renders(client: Client, llm: ChatConure) -> None:
    shout: Runnable[Any, Any] = RunnableLambda(lambda prompt: prompt.to_string().upper())
    chain = MUSTACHE | shout | llm | TEXT
    assert to_program(chain).run(client, {"x": "tea"}) == chain.invoke({"x": "tea"})


def test_a_prompt_that_several_models_read_is_sent_once(client: Client, llm: ChatConure) -> None:
    def copied(given: dict[str, str]) -> dict[str, str]:
        return given.copy()

    def read(given: dict[str, str]) -> str:
        return given["x"]

    as_parts: Any = {"x": RunnableLambda(read)}
    as_dict: Any = RunnableLambda(copied)
    for variables in (as_parts, as_dict):
        chain = variables | MUSTACHE | RunnableParallel(a=llm | TEXT, b=llm | TEXT)
        compiled = to_program(chain)
        prompts = {
            str(node["messages"]) for node in compiled.program["nodes"] if "messages" in node
        }
        assert len(prompts) == 1
        assert compiled.run(client, {"x": "tea"}) == chain.invoke({"x": "tea"})
