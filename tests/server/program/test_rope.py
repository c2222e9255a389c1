"""Prompts as pieces and prefixes as hashes, before anything has a value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.errors import ExpressionError
from conure.server.program.expression import evaluate
from conure.server.program.ir import Generate, Message
from conure.server.program.rope import (
    Content,
    Part,
    Splice,
    boundary_reads,
    chat_messages,
    chat_segments,
    prefix_hash,
    prefixes,
    slot_pieces,
)
from conure.server.program.symbols import Definitions, Text, Value, expand
from conure.server.program.value import text_of


def v(name: str) -> dict[str, str]:
    return {"var": name}


def prompt(*segments: dict[str, Any], **fields: Any) -> Generate:
    node = {"id": "n", "op": "generate", "prompt": segments, **fields}
    return msgspec.convert(node, Generate)


def chat(*messages: dict[str, Any], output: Any = "out", **fields: Any) -> Generate:
    output = output if isinstance(output, dict) else {"variable": output}
    node = {"id": "n", "op": "generate", "messages": messages, "output": output, **fields}
    return msgspec.convert(node, Generate)


def defined(**expressions: Any) -> Definitions:
    definitions = Definitions()
    for name, expression in expressions.items():
        definitions.add(name, expression)
    return definitions


def after_input(expression: Any, definitions: Definitions | None = None) -> bytes:
    node = prompt({"text": "Q: "}, {"input": expression}, {"output": "o"})
    return prefix_hash(node, definitions)[1]


def in_place(*segments: dict[str, Any]) -> bytes:
    return prefix_hash(prompt({"text": "Q: "}, *segments, {"output": "o"}))[len(segments)]


def test_a_slot_has_the_pieces_between_two_outputs() -> None:
    node = prompt(
        {"text": "<s>", "special": True},
        {"input": "q"},
        {"output": "a"},
        {"output": "b"},
        {"part": {"type": "image_url"}},
        {"input": {"get": [v("x"), 0]}},
        {"output": "c"},
        {"text": "tail"},
    )
    assert slot_pieces(node, 0) == (Text("<s>", special=True), Value(v("q")))
    assert slot_pieces(node, 1) == ()
    assert slot_pieces(node, 2) == (Part({"type": "image_url"}), Value({"get": [v("x"), 0]}))


EXPANSIONS: list[tuple[Any, tuple[Text | Value, ...]]] = [
    ("plain text", (Text("plain text"),)),
    ({"lit": {"k": ["é", 1.5]}}, (Text('{"k":["é",1.5]}'),)),
    (3, (Text("3"),)),
    ({"join": [[v("a"), v("b")], "\n"]}, (Value(v("a")), Text("\n"), Value(v("b")))),
    ({"join": [{"concat": [["x"], [v("a")]]}, ", "]}, (Text("x, "), Value(v("a")))),
    ({"join": [v("list"), ", "]}, (Value({"join": [v("list"), ", "]}),)),
    ({"concat": ["a", v("x"), {"lit": "b"}, "c"]}, (Text("a"), Value(v("x")), Text("bc"))),
    ({"concat": [v("x"), v("y")]}, (Value(v("x")), Value(v("y")))),
    ({"concat": [v("x"), [1]]}, (Value({"concat": [v("x"), [1]]}),)),
    (
        [1, "s", v("x")],
        (Text('[1,"s",'), Value({"json": [v("x")]}), Text("]")),
    ),
    (
        {"object": {"k": v("x"), "l": [None]}},
        (Text('{"k":'), Value({"json": [v("x")]}), Text(',"l":[null]}')),
    ),
    ({"json": {"object": {}}}, (Text("{}"),)),
    ({"lower": "ABC"}, (Text("abc"),)),
    ({"lower": v("x")}, (Value({"lower": v("x")}),)),
    ({"parse_json": "{"}, (Value({"parse_json": "{"}),)),
    ({"join": [[], "x"]}, ()),
]


@pytest.mark.parametrize(("expression", "pieces"), EXPANSIONS)
def test_what_builds_text_is_expanded(expression: Any, pieces: tuple[Text | Value, ...]) -> None:
    assert expand(expression) == pieces


TEXTS = st.text('ab\n"é', max_size=3)
NAMES = st.sampled_from("xyz")
SCALARS = TEXTS | st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2)
EXPRESSIONS = st.recursive(
    TEXTS | NAMES.map(v) | SCALARS.map(lambda x: {"lit": x}) | st.integers(-5, 5),
    lambda inner: st.one_of(
        # A list as an operand of an inserted `concat` is the one difference that is meant.
        st.lists(inner, min_size=1, max_size=3).map(lambda xs: {"concat": ["", *xs]}),
        st.tuples(st.lists(inner, max_size=3), TEXTS).map(lambda t: {"join": [*t]}),
        st.lists(inner, max_size=3),
        st.dictionaries(TEXTS, inner, max_size=2).map(lambda d: {"object": d}),
        inner.map(lambda x: {"json": [x]}),
        inner.map(lambda x: {"lower": x}),
    ),
    max_leaves=12,
)


@given(
    EXPRESSIONS,
    st.fixed_dictionaries({"x": TEXTS, "y": SCALARS, "z": st.dictionaries(TEXTS, SCALARS)}),
)
def test_the_texts_of_the_pieces_are_the_text_of_the_value(
    expression: Any, scope: dict[str, Any]
) -> None:
    try:
        whole = text_of(evaluate(expression, scope))
    except ExpressionError:
        return
    pieces = expand(expression)
    texts = [p.text if isinstance(p, Text) else text_of(evaluate(p[0], scope)) for p in pieces]
    assert "".join(texts) == whole


@given(EXPRESSIONS, EXPRESSIONS)
def test_definitions_change_where_a_value_is_found_and_not_its_text(inner: Any, outer: Any) -> None:
    scope = {"x": "X", "z": {"k": 1}}
    definitions = defined(y=inner if "y" not in str(inner) else 1)
    try:
        scope["y"] = evaluate(definitions.get("y"), scope)
        whole = text_of(evaluate(outer, scope))
    except ExpressionError:
        return
    pieces = expand(outer, definitions)
    texts = [p.text if isinstance(p, Text) else text_of(evaluate(p[0], scope)) for p in pieces]
    assert "".join(texts) == whole


def test_an_expression_hashes_as_what_it_builds_hashes_in_place() -> None:
    assert after_input({"join": [[v("a"), v("b")], "\n"]}) == in_place(
        {"input": "a"}, {"text": "\n"}, {"input": "b"}
    )
    assert after_input({"concat": [v("a"), v("b")]}) == in_place({"input": "a"}, {"input": "b"})
    assert after_input({"lit": "text"}) == in_place({"text": "te"}, {"text": "xt"})
    assert after_input([v("a")]) == in_place(
        {"text": "["}, {"input": {"json": v("a")}}, {"text": "]"}
    )


def test_text_that_a_variable_is_defined_by_hashes_as_in_place() -> None:
    definitions = defined(
        both={"join": [[v("a"), v("b")], "\n"]}, twice={"concat": ["x", v("both")]}, data=[v("a")]
    )
    assert after_input("twice", definitions) == in_place(
        {"text": "x"}, {"input": "a"}, {"text": "\n"}, {"input": "b"}
    )
    assert after_input("data", definitions) == in_place({"input": "data"})


def test_how_text_is_cut_does_not_show_but_special_text_does() -> None:
    one = prefix_hash(prompt({"text": "ab"}, {"text": "c"}, {"output": "o"}))
    two = prefix_hash(prompt({"text": "a"}, {"text": "bc"}, {"output": "o"}))
    assert one[0] != two[0]
    assert one[1:] == two[1:]
    special = prefix_hash(prompt({"text": "abc", "special": True}, {"output": "o"}))
    assert special[0] != one[1]
    assert all(len(digest) == 16 for digest in one)


@pytest.mark.parametrize(
    "other",
    [
        prompt({"text": "a"}, {"input": "y"}, {"output": "o"}),
        prompt({"text": "ax"}, {"output": "o"}),
        prompt({"text": 'a{"var":"x"}'}, {"output": "o"}),
        prompt({"text": "a"}, {"input": "x"}, {"output": "o"}, model="large"),
        prompt({"text": "a"}, {"input": {"lower": v("x")}}, {"output": "o"}),
        prompt({"text": "a"}, {"part": {"var": "x"}}, {"output": "o"}),
        chat({"role": "user", "content": [{"text": "a"}, {"input": "x"}]}),
    ],
)
def test_another_prefix_has_another_hash(other: Generate) -> None:
    node = prompt({"text": "a"}, {"input": "x"}, {"output": "o"})
    assert not set(prefix_hash(node)[1:]) & set(prefix_hash(other))


def test_a_consumer_of_a_generated_text_has_its_producers_prefix() -> None:
    producer = prompt({"text": "Write: "}, {"input": "task"}, {"output": "code", "stop": ["#"]})
    consumer = prompt(
        {"text": "Write: "}, {"input": "task"}, {"input": "code"}, {"text": "Test"}, {"output": "t"}
    )
    assert prefix_hash(producer) == prefix_hash(consumer)[:3]
    # A parsed value is written anew, so its text need not be what was generated.
    parsed = prompt(
        {"text": "Write: "}, {"input": "task"}, {"output": "code", "constraint": {"type": "list"}}
    )
    assert prefix_hash(parsed)[2] != prefix_hash(consumer)[2]


def test_boundaries_say_what_is_constant_and_what_is_read() -> None:
    node = prompt(
        {"text": "a"}, {"input": {"lit": "b"}}, {"input": "x"}, {"text": "c"}, {"output": "o"}
    )
    assert prefixes(node).constants == (True, True, False, False, False)
    assert [sorted(reads) for reads in boundary_reads(node)] == [[], [], ["x"], [], ["o"]]
    assert prefixes(prompt({"part": {}}, {"output": "o"})).constants == (False, False)


SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": [{"text": "Q: "}, {"input": "q"}]}


def test_content_segments_are_flattened_and_know_their_message() -> None:
    node = chat(SYSTEM, ASK, {"splice": "history"}, {"role": "assistant", "tool_calls": []})
    assert chat_segments(node) == (
        Content(0, (Text("Be brief."),)),
        Content(1, (Text("Q: "),)),
        Content(1, (Value(v("q")),)),
        Splice(2, v("history")),
        Content(3, (Text(""),)),
    )
    assert len(prefix_hash(node)) == len(chat_segments(node)) + 1
    assert prefixes(node).constants == (True, True, False, False, False, False)


def test_a_turn_continued_has_its_producers_last_boundary() -> None:
    text = chat(SYSTEM, ASK, output="answer")
    more = {"role": "user", "content": "More."}
    repeated = chat(SYSTEM, ASK, {"role": "assistant", "content": [{"input": "answer"}]}, more)
    assert prefix_hash(text) == prefix_hash(repeated)[:4]
    message = chat(SYSTEM, ASK, output={"variable": "answer", "as": "message"})
    spliced = chat(SYSTEM, ASK, {"splice": "answer"}, more)
    assert prefix_hash(message) == prefix_hash(spliced)[:4]
    assert prefix_hash(text)[3] != prefix_hash(message)[3]


@pytest.mark.parametrize(
    "other",
    [
        chat({"role": "user", "content": "Be brief."}, ASK),
        chat({**SYSTEM, "name": "x"}, ASK),
        chat(SYSTEM, ASK, tools=[{"type": "function"}]),
        chat(SYSTEM, {"role": "user", "content": []}, ASK),
    ],
)
def test_roles_names_tools_and_turns_are_part_of_the_prefix(other: Generate) -> None:
    assert prefix_hash(chat(SYSTEM, ASK))[2] not in prefix_hash(other)


def test_a_history_that_expressions_concatenate_is_spliced_part_by_part() -> None:
    turn = {"object": {"role": "user", "content": "Next."}}
    definitions = defined(
        second={"concat": [v("first"), [v("answer"), turn]]},
        third={"concat": [v("second"), [v("reply")]]},
    )
    node = chat({"splice": "third"})
    assert chat_messages(node, definitions) == (
        Splice(0, v("first")),
        Splice(1, v("answer")),
        Message(role="user", content="Next."),
        Splice(3, v("reply")),
    )
    written = chat({"splice": "first"}, {"splice": "answer"}, {"role": "user", "content": "Next."})
    assert prefix_hash(node, definitions)[:3] == prefix_hash(written)[:3]
    assert chat_messages(node) == (Splice(0, v("third")),)


@pytest.mark.parametrize("start", [["m"], {"concat": ["t", {"var": "x"}]}])
def test_definitions_that_double_and_chain_are_expanded_within_bounds(start: Any) -> None:
    definitions = defined(v0=start)
    for i in range(1, 2_000):
        definitions.add(f"v{i}", {"concat": [v(f"v{i - 1}")] * (2 if i < 60 else 1)})
    for name in ("v1", "v59", "v1999"):
        assert 0 < len(expand(v(name), definitions)) <= 20_000
        assert 0 < len(chat_segments(chat({"splice": name}), definitions)) <= 20_000
    assert len(chat_segments(chat({"splice": "v10"}), definitions)) == (
        1_024 if isinstance(start, list) else 1
    )
