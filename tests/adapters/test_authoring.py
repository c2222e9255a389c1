# ruff: noqa: E501, D415, RET504 - JSON and functions of the language
"""Programs written as Python functions, and one workflow written in four ways."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

import conure
from conure import Client, Output, ProgramError
from conure.adapters.authoring import gen, job, llm_chat, system, user
from conure.adapters.langchain import ChatConure, to_program
from conure.server.app import create_app
from conure.server.config import Config
from conure.server.language.compiler import compile_source
from conure.server.program.decoding.bodies import revalidate
from conure.server.program.graph.graph import Graph
from conure.server.program.graph.identity import graph_hash
from conure.server.program.ir import Program, Submission

LIMIT = 20
STYLE = "short"


class Tone(StrEnum):
    WARM = "warm"


class Number(int):
    """Is not JSON."""


MAYBE = str | None
TONES = {"first": Tone.WARM, "others": (Tone.WARM, "cold")}


def nested_lists(depth: int) -> list[Any]:
    lists: list[Any] = []
    for _ in range(depth):
        lists = [lists]
    return lists


CYCLIC: list[Any] = []
CYCLIC.append({"tea": CYCLIC})


def strip() -> None:
    """Has the name of a method."""


@conure.function
def slogan(goods: Any, text: Output(max_tokens=12)):  # type: ignore[no-untyped-def, valid-type]
    """A slogan for {{goods}}: {{text}}"""


@conure.function
def shout(text: Any) -> Any:
    return text.upper() + "!"


@conure.program
def shop(goods: str, style: str = "short"):  # type: ignore[no-untyped-def]
    found = slogan(goods)
    with job():
        yield {"loud": shout(found)}
    yield {"slogan": found, "about": gen(f"A {style} story of {goods}. ", max_tokens=LIMIT)}


@conure.program
def naming(goods: str):  # type: ignore[no-untyped-def]
    name = llm_chat(
        [system("You sell tea."), user(f"Name a {goods}.")],
        temperature=0,
        max_tokens=32,
    )["content"]
    answer = llm_chat([user(f"A slogan for {name}:")], temperature=0, max_tokens=32)["content"]
    return answer


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with Client(app=create_app(Config(engine="fake", data=tmp_path))) as client:
        yield client


def test_a_decorated_function_runs_on_the_server(client: Client) -> None:
    result = client.run(shop(goods="tea"))
    assert result.status == "done"
    assert set(result.outputs) >= {"found"}


def test_inputs_and_options_can_be_given_apart(client: Client) -> None:
    run = client.submit(shop.submission())
    run.put("goods", "tea")
    assert run.result(wait_s=20)["found"]


def test_a_text_can_be_submitted_as_it_is(client: Client) -> None:
    assert client.run("x = gen('Tea is ', max_tokens=8)\nyield x").outputs["x"]


@pytest.mark.parametrize(
    "program",
    [
        "topic: str\nx = gen(f'{topic} is ', max_tokens=4)\nyield x",
        {
            "variables": {"topic": {}},
            "nodes": [{"id": "n", "op": "expr", "expr": {"var": "topic"}, "output": "x"}],
            "outputs": ["x"],
        },
    ],
)
def test_run_refuses_a_missing_input(client: Client, program: Any) -> None:
    with pytest.raises(ProgramError, match="no value for input `topic`: give it in `inputs`"):
        client.run(program)
    assert client.run(program, {"topic": "tea"}).status == "done"


def test_an_error_has_the_line_of_the_file(client: Client) -> None:
    @conure.program
    def wrong():  # type: ignore[no-untyped-def]
        yield undefined_name  # type: ignore[name-defined]  # noqa: F821

    line = wrong.function.__code__.co_firstlineno + 2
    with pytest.raises(ProgramError, match=f"line {line}, column 11: `undefined_name`") as caught:
        client.run(wrong())
    assert caught.value.code == "language.undefined_name"


def test_a_prompt_in_a_nested_function_keeps_its_indentation() -> None:
    @conure.program
    def indented() -> Any:
        yield {
            "x": gen("""Continue this Python:
        def f():

            return 1""")
        }

    @conure.program
    def flush() -> Any:
        yield {
            "x": gen("""Continue:
first
""")
        }

    prompt = "Continue this Python:\n        def f():\n\n            return 1"
    assert prompt in indented.source
    assert "Continue:\nfirst\n" in flush.source
    for each in (indented, flush):
        compile_source(each.source)


def test_a_plain_function_is_refused() -> None:
    def plain() -> int:
        return 1

    @conure.program
    def calls_plain():  # type: ignore[no-untyped-def]
        yield plain()

    with pytest.raises(ProgramError, match="decorate it"):
        calls_plain()


def test_a_program_in_a_program_is_refused() -> None:
    @conure.program
    def outer(goods: str):  # type: ignore[no-untyped-def]
        yield {"named": naming(goods)}

    with pytest.raises(ProgramError) as caught:
        outer(goods="tea")
    message = "`naming` is a program: to call it, decorate it with `conure.function`"
    assert (caught.value.code, caught.value.message) == ("language.source", message)


def test_names_in_comprehensions_annotations_and_defaults_are_sent(client: Client) -> None:
    @conure.program
    def shops(goods: list, style: str = STYLE):  # type: ignore[no-untyped-def, type-arg]
        made = [slogan(each) for each in goods]
        yield {"made": made, "about": [gen(f"{style} {each}", max_tokens=LIMIT) for each in goods]}

    assert "def slogan" in shops.source
    assert client.run(shops(goods=["tea", "salt"])).status == "done"

    @conure.function
    def limited(goods: Any, text: Output(max_tokens=LIMIT)):  # type: ignore[no-untyped-def, valid-type]
        """A slogan for {{goods}}: {{text}}"""

    @conure.program
    def shop_of_one(goods: str):  # type: ignore[no-untyped-def]
        yield {"made": limited(goods)}

    assert client.run(shop_of_one(goods="tea")).status == "done"


def test_a_method_is_not_the_function_of_its_name() -> None:
    @conure.program
    def stripped(goods: str):  # type: ignore[no-untyped-def]
        yield {"goods": goods.strip()}

    assert compile_source(stripped.source).name == "stripped"


def test_constants_are_json(client: Client) -> None:
    @conure.program
    def tones():  # type: ignore[no-untyped-def]
        yield {"tones": TONES, "tone": gen("Tea is ", max_tokens=4)}

    assert "TONES = {'first': 'warm', 'others': ('warm', 'cold')}" in tones.source
    assert client.run(tones()).status == "done"


@pytest.mark.parametrize(
    ("constant", "message"),
    [
        (Number(5), "`constant` is not a JSON value"),
        ({"tea"}, "`constant` is not a JSON value"),
        (b"tea", "`constant` is not a JSON value"),
        ({"teas": {"green"}}, "`constant` is not a JSON value"),
        ({"tea": b"green"}, "`constant` is not a JSON value"),
        ([date(2026, 1, 1)], "`constant` is not a JSON value"),
        ((Decimal(1),), "`constant` is not a JSON value"),
        (date(2026, 1, 1), "`constant` is not a JSON value"),
        (range(3), "`constant` is not a JSON value"),
        ({"teas": [{1: "green"}]}, "`constant` has a key that is not a string"),
        ({b"tea": 1}, "`constant` has a key that is not a string"),
        (CYCLIC, "`constant` is not a JSON value"),
        (nested_lists(100_000), "`constant` is not a JSON value"),
    ],
)
def test_a_constant_that_is_not_json_is_refused(constant: Any, message: str) -> None:
    @conure.program
    def tones():  # type: ignore[no-untyped-def]
        yield {"tones": constant}

    with pytest.raises(ProgramError, match=message):
        tones()


def test_modules_and_types_of_variables_are_no_constants() -> None:
    @conure.function
    def toned(goods: Any, text: conure.Output(max_tokens=3)):  # type: ignore[no-untyped-def, valid-type]
        """The tone of {{goods}}: {{text}}"""

    @conure.program
    def tones(goods: str):  # type: ignore[no-untyped-def]
        try:
            tone: MAYBE = toned(goods)
        except Exception:
            tone = "warm"
        yield {"tone": tone}

    assert compile_source(tones.source).name == "tones"


def test_types_of_nested_functions_are_no_constants(client: Client) -> None:
    @conure.program
    def tones(goods: str) -> MAYBE:
        def tone(thing: MAYBE, *, about: MAYBE = STYLE) -> MAYBE:
            text: MAYBE = gen(f"{about} {thing} is ", max_tokens=4)
            return text

        return tone(goods)

    assert tones.source.startswith("STYLE = 'short'")
    assert client.run(tones(goods="tea")).status == "done"


BASE = """
import conure
TONE = "cold"
@conure.function
def slogan(goods):
    return TONE + goods
"""


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a program that may import the module `base_slogans`."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "base_slogans", raising=False)
    monkeypatch.delitem(sys.modules, "own_shop", raising=False)
    (tmp_path / "base_slogans.py").write_text(BASE)

    def imported(text: str) -> Any:
        (tmp_path / "own_shop.py").write_text(f"import conure\n{text}")
        return importlib.import_module("own_shop").shop

    return imported


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "from base_slogans import slogan\nTONE = 'warm'\n@conure.program\n"
            "def shop(goods: str):\n    yield {'a': TONE, 'b': slogan(goods)}\n",
            "`TONE` is 'warm' in own_shop and 'cold' in base_slogans: rename one of them",
        ),
        (
            "from base_slogans import slogan\n@conure.program\n"
            "def shop(TONE: str):\n    yield {'b': slogan(TONE)}\n",
            "`TONE` is 'cold' in base_slogans and a variable of `shop`: rename one of them",
        ),
        (
            "import base_slogans\nloud = base_slogans.slogan\n@conure.program\n"
            "def shop(goods: str):\n    yield {'b': loud(goods)}\n",
            "`loud` is the function `slogan` under another name: use it as `slogan`",
        ),
        (
            "from base_slogans import slogan\nouter = slogan\n@conure.function\n"
            "def slogan(goods):\n    return goods\n@conure.function\ndef other(goods):\n"
            "    return slogan(goods)\ndef made(slogan):\n    @conure.program\n"
            "    def shop(goods: str):\n        yield {'a': slogan(goods), 'b': other(goods)}\n"
            "    return shop\nshop = made(outer)\n",
            "`slogan` is the function `base_slogans.slogan` in own_shop and the function "
            "`own_shop.slogan` in own_shop: rename one of them",
        ),
    ],
    ids=["constants", "variable", "alias", "functions"],
)
def test_a_name_has_one_meaning_in_all_modules(
    importable: Callable[[str], Any], text: str, message: str
) -> None:
    with pytest.raises(ProgramError) as caught:
        _ = importable(text).source
    assert (caught.value.code, caught.value.message) == ("language.source", message)


def test_a_constant_may_have_one_value_in_two_modules(importable: Callable[[str], Any]) -> None:
    shop = importable(
        "from base_slogans import TONE, slogan\n@conure.program\n"
        "def shop(goods: str):\n    yield {'a': TONE, 'b': slogan(goods)}\n"
    )
    assert compile_source(shop.source).name == "shop"


def test_a_function_of_the_language_does_not_run_here() -> None:
    with pytest.raises(ProgramError, match="runs on a server only"):
        shout("x")


def identity(program: Program) -> str:
    submission, _ = revalidate(Submission(program=program))
    return graph_hash(Graph.build(submission.program, {}))


TEXT = """
goods: str
first = llm_chat([system("You sell tea."), user(f"Name a {goods}.")],
                 temperature=0, max_tokens=32)["context"]
prompt = "A slogan for " + first + ":"
yield {"slogan": llm_chat([user(prompt)], temperature=0, max_tokens=32)["context"]}
"""
GRAPH = {
    "variables": {"goods": {"type": "string"}},
    "nodes": [
        {"id": "b", "op": "generate", "output": {"variable": "y", "temperature": 0, "max_tokens": 32},
         "messages": [{"role": "user", "content": [{"input": {"concat": ["A slogan ", "for ", {"var": "x"}, ":"]}}]}]},
        {"id": "a", "op": "generate", "output": {"variable": "x", "temperature": 0, "max_tokens": 32},
         "messages": [{"role": "system", "content": "You sell tea."},
                      {"role": "user", "content": [{"text": "Name a "}, {"input": "goods"}, {"text": "."}]}]},
    ],
    "outputs": ["y"],
}  # fmt: skip


def test_one_workflow_has_one_identity_in_four_forms() -> None:
    llm = ChatConure(temperature=0, max_tokens=32)
    name = (
        ChatPromptTemplate.from_messages(
            [("system", "You sell tea."), ("human", "Name a {goods}.")]
        )
        | llm
        | StrOutputParser()
    )
    chain = (
        {"name": name}
        | ChatPromptTemplate.from_messages([("human", "A slogan for {name}:")])
        | llm
        | StrOutputParser()
    )
    forms: dict[str, Program] = {
        "text": compile_source(TEXT),
        "graph": msgspec.convert(GRAPH, Program),
        "builder": compile_source(naming.source),
        "chain": msgspec.convert(msgspec.to_builtins(to_program(chain).program), Program),
    }
    assert len({identity(program) for program in forms.values()}) == 1
    other = compile_source(TEXT.replace("Name a", "Find a"))
    assert identity(other) != identity(forms["text"])
