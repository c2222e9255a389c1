"""Symbolic prompts and their prefix hashes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.errors import ExpressionError
from conure.server.program.expressions.evaluate import evaluate
from conure.server.program.expressions.symbolic import (
    FIRST_STEPS,
    STEPS_PER_NODE,
    LiteralText,
    VariableDefinitions,
    VariableText,
    expand,
)
from conure.server.program.expressions.values import text_of
from conure.server.program.ir import GenerateNode, Message
from conure.server.program.prompt_prefix import (
    ContentSegment,
    MultimodalPart,
    SymbolicSplice,
    boundary_reads,
    chat_messages,
    chat_segments,
    prefix_hash,
    prefixes,
    slot_pieces,
)


def v(name: str) -> dict[str, str]:
    return {"var": name}


def prompt(*segments: dict[str, Any], **fields: Any) -> GenerateNode:
    node = {"id": "n", "op": "generate", "prompt": segments, **fields}
    return msgspec.convert(node, GenerateNode)


def chat(*messages: dict[str, Any], output: Any = "out", **fields: Any) -> GenerateNode:
    output = output if isinstance(output, dict) else {"variable": output}
    node = {"id": "n", "op": "generate", "messages": messages, "output": output, **fields}
    return msgspec.convert(node, GenerateNode)


def defined(**expressions: Any) -> VariableDefinitions:
    definitions = VariableDefinitions()
    for name, expression in expressions.items():
        definitions.add(name, expression)
    return definitions


def after_input(expression: Any, definitions: VariableDefinitions | None = None) -> bytes:
    node = prompt({"text": "Q: "}, {"input": expression}, {"output": "o"})
    return prefix_hash(node, definitions)[1]


def in_place(*segments: dict[str, Any]) -> bytes:
    return prefix_hash(prompt({"text": "Q: "}, *segments, {"output": "o"}))[len(segments)]


def test_a_slot_has_the_pieces_between_outputs() -> None:
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
    assert slot_pieces(node, 0) == (LiteralText("<s>", special=True), VariableText(v("q")))
    assert slot_pieces(node, 1) == ()
    assert slot_pieces(node, 2) == (
        MultimodalPart({"type": "image_url"}),
        VariableText({"get": [v("x"), 0]}),
    )


EXPANSIONS: list[tuple[Any, tuple[LiteralText | VariableText, ...]]] = [
    ("plain text", (LiteralText("plain text"),)),
    ({"lit": {"k": ["é", 1.5]}}, (LiteralText('{"k":["é",1.5]}'),)),
    (3, (LiteralText("3"),)),
    (
        {"join": [[v("a"), v("b")], "\n"]},
        (VariableText(v("a")), LiteralText("\n"), VariableText(v("b"))),
    ),
    ({"join": [{"concat": [["x"], [v("a")]]}, ", "]}, (LiteralText("x, "), VariableText(v("a")))),
    ({"join": [v("list"), ", "]}, (VariableText({"join": [v("list"), ", "]}),)),
    (
        {"concat": ["a", v("x"), {"lit": "b"}, "c"]},
        (LiteralText("a"), VariableText(v("x")), LiteralText("bc")),
    ),
    ({"concat": [v("x"), v("y")]}, (VariableText(v("x")), VariableText(v("y")))),
    ({"concat": [v("x"), [1]]}, (VariableText({"concat": [v("x"), [1]]}),)),
    (
        [1, "s", v("x")],
        (LiteralText('[1,"s",'), VariableText({"json": [v("x")]}), LiteralText("]")),
    ),
    (
        {"object": {"k": v("x"), "l": [None]}},
        (LiteralText('{"k":'), VariableText({"json": [v("x")]}), LiteralText(',"l":[null]}')),
    ),
    ({"json": {"object": {}}}, (LiteralText("{}"),)),
    ({"lower": "ABC"}, (LiteralText("abc"),)),
    ({"lower": v("x")}, (VariableText({"lower": v("x")}),)),
    ({"parse_json": "{"}, (VariableText({"parse_json": "{"}),)),
    ({"join": [[], "x"]}, ()),
]


@pytest.mark.parametrize(("expression", "pieces"), EXPANSIONS)
def test_expressions_expand_to_pieces(
    expression: Any, pieces: tuple[LiteralText | VariableText, ...]
) -> None:
    assert expand(expression) == pieces


TEXTS = st.text('ab\n"é', max_size=3)
NAMES = st.sampled_from("xyz")
SCALARS = TEXTS | st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2)
EXPRESSIONS = st.recursive(
    TEXTS | NAMES.map(v) | SCALARS.map(lambda x: {"lit": x}) | st.integers(-5, 5),
    lambda inner: st.one_of(
        # `expand` and `evaluate` differ on purpose for an inserted `concat` with a list as operand.
        # The leading "" excludes that case.
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
def test_joined_pieces_equal_the_value(expression: Any, scope: dict[str, Any]) -> None:
    try:
        whole = text_of(evaluate(expression, scope))
    except ExpressionError:
        return
    pieces = expand(expression)
    texts = [
        p.text if isinstance(p, LiteralText) else text_of(evaluate(p[0], scope)) for p in pieces
    ]
    assert "".join(texts) == whole


@given(EXPRESSIONS, EXPRESSIONS)
def test_definitions_do_not_change_text(inner: Any, outer: Any) -> None:
    scope = {"x": "X", "z": {"k": 1}}
    definitions = defined(y=inner if "y" not in str(inner) else 1)
    try:
        scope["y"] = evaluate(definitions.get("y"), scope)
        whole = text_of(evaluate(outer, scope))
    except ExpressionError:
        return
    pieces = expand(outer, definitions)
    texts = [
        p.text if isinstance(p, LiteralText) else text_of(evaluate(p[0], scope)) for p in pieces
    ]
    assert "".join(texts) == whole


def test_an_expression_hashes_like_text_in_place() -> None:
    assert after_input({"join": [[v("a"), v("b")], "\n"]}) == in_place(
        {"input": "a"}, {"text": "\n"}, {"input": "b"}
    )
    assert after_input({"concat": [v("a"), v("b")]}) == in_place({"input": "a"}, {"input": "b"})
    assert after_input({"lit": "text"}) == in_place({"text": "te"}, {"text": "xt"})
    assert after_input([v("a")]) == in_place(
        {"text": "["}, {"input": {"json": v("a")}}, {"text": "]"}
    )


def test_a_definition_hashes_like_text_in_place() -> None:
    definitions = defined(
        both={"join": [[v("a"), v("b")], "\n"]}, twice={"concat": ["x", v("both")]}, data=[v("a")]
    )
    assert after_input("twice", definitions) == in_place(
        {"text": "x"}, {"input": "a"}, {"text": "\n"}, {"input": "b"}
    )
    assert after_input("data", definitions) == in_place({"input": "data"})


def test_hashes_ignore_segmentation_but_not_special_text() -> None:
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
def test_different_prefixes_have_different_hashes(other: GenerateNode) -> None:
    node = prompt({"text": "a"}, {"input": "x"}, {"output": "o"})
    assert not set(prefix_hash(node)[1:]) & set(prefix_hash(other))


def test_a_consumer_shares_its_producers_prefix() -> None:
    producer = prompt({"text": "Write: "}, {"input": "task"}, {"output": "code", "stop": ["#"]})
    consumer = prompt(
        {"text": "Write: "}, {"input": "task"}, {"input": "code"}, {"text": "Test"}, {"output": "t"}
    )
    assert prefix_hash(producer) == prefix_hash(consumer)[:3]
    # The text of a parsed value may differ from the generated text.
    parsed = prompt(
        {"text": "Write: "}, {"input": "task"}, {"output": "code", "constraint": {"type": "list"}}
    )
    assert prefix_hash(parsed)[2] != prefix_hash(consumer)[2]


def test_boundaries_report_constants_and_reads() -> None:
    node = prompt(
        {"text": "a"}, {"input": {"lit": "b"}}, {"input": "x"}, {"text": "c"}, {"output": "o"}
    )
    assert prefixes(node).constants == (True, True, False, False, False)
    assert [sorted(reads) for reads in boundary_reads(node)] == [[], [], ["x"], [], ["o"]]
    assert prefixes(prompt({"part": {}}, {"output": "o"})).constants == (False, False)


SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": [{"text": "Q: "}, {"input": "q"}]}


def test_content_segments_are_flattened() -> None:
    node = chat(SYSTEM, ASK, {"splice": "history"}, {"role": "assistant", "tool_calls": []})
    assert chat_segments(node) == (
        ContentSegment(0, (LiteralText("Be brief."),)),
        ContentSegment(1, (LiteralText("Q: "),)),
        ContentSegment(1, (VariableText(v("q")),)),
        SymbolicSplice(2, v("history")),
        ContentSegment(3, (LiteralText(""),)),
    )
    assert len(prefix_hash(node)) == len(chat_segments(node)) + 1
    assert prefixes(node).constants == (True, True, False, False, False, False)


def test_a_continued_turn_shares_the_last_boundary() -> None:
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
def test_message_fields_and_tools_change_the_hash(other: GenerateNode) -> None:
    assert prefix_hash(chat(SYSTEM, ASK))[2] not in prefix_hash(other)


def test_a_concatenated_history_is_spliced_by_part() -> None:
    turn = {"object": {"role": "user", "content": "Next."}}
    definitions = defined(
        second={"concat": [v("first"), [v("answer"), turn]]},
        third={"concat": [v("second"), [v("reply")]]},
    )
    node = chat({"splice": "third"})
    assert chat_messages(node, definitions) == (
        SymbolicSplice(0, v("first")),
        SymbolicSplice(1, v("answer")),
        Message(role="user", content="Next."),
        SymbolicSplice(3, v("reply")),
    )
    written = chat({"splice": "first"}, {"splice": "answer"}, {"role": "user", "content": "Next."})
    assert prefix_hash(node, definitions)[:3] == prefix_hash(written)[:3]
    assert chat_messages(node) == (SymbolicSplice(0, v("third")),)


@pytest.mark.parametrize("start", [["m"], {"concat": ["t", {"var": "x"}]}])
def test_expansion_of_definitions_is_bounded(start: Any) -> None:
    definitions = defined(v0=start)
    for i in range(1, 2_000):
        definitions.add(f"v{i}", {"concat": [v(f"v{i - 1}")] * (2 if i < 60 else 1)})
        definitions.budget.left += STEPS_PER_NODE
    for name in ("v1", "v59", "v1999"):
        assert 0 < len(expand(v(name), definitions)) <= 20_000
        assert 0 < len(chat_segments(chat({"splice": name}), definitions)) <= 20_000
    assert len(chat_segments(chat({"splice": "v10"}), definitions)) == (
        1_024 if isinstance(start, list) else 1
    )


def test_all_splices_of_a_call_are_expanded_to_a_bounded_number_of_messages() -> None:
    turn = {"role": "user", "content": "x"}
    definitions = defined(h={"lit": [turn] * 3_000})
    node = chat(*[{"splice": "h"}] * 50)
    messages = chat_messages(node, definitions)
    assert messages.count(Message(role="user", content="x")) == 9_000
    assert len(messages) == 9_047
    found = prefixes(node, defined(h={"lit": [turn] * 3_000}), closed=True)
    assert (len(found.hashes), len(found.inner)) == (51, 9_048)


def test_expansions_of_splices_take_steps_of_the_graph() -> None:
    definitions = defined(h={"lit": [{"role": "user", "content": "x"}] * 3_000})
    calls = [chat_messages(chat({"splice": "h"}), definitions) for _ in range(100)]
    assert len(calls[0]) == 3_000
    assert calls[-1] == (SymbolicSplice(0, v("h")),)
    assert sum(map(len, calls)) <= FIRST_STEPS


def test_hash_covers_given_ids_and_options_of_the_template() -> None:
    text = {"text": "a"}, {"output": "x"}
    nodes = [
        prompt(*text),
        prompt(*text, prompt_ids=[1]),
        prompt(*text, prompt_ids=[1, 2]),
        chat({"role": "user", "content": "a"}),
        chat({"role": "user", "content": "a"}, template_options={"thinking": True}),
    ]
    hashes = [prefixes(node, closed=True).hashes[0] for node in nodes]
    assert len(set(hashes)) == len(nodes)
