"""Parsing of tool calls from complete, truncated and streamed answers, and their grammars."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.engine.constraints.grammar import accepts, byte_tokenizer, compile_grammar
from conure.engine.protocol import EngineError
from conure.server.program.bounded_schema import MAX_BOUNDS
from conure.server.program.errors import ProgramError
from conure.server.program.ir import Constraint, GenerateNode
from conure.server.program.tools import read_tools
from conure.server.prompts.tool_calls import ContentStream, ToolUse, parse_answer
from conure.server.prompts.tool_format import ToolFormat

TAGS = ToolFormat(
    opening='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    separator='}\n</tool_call>\n<tool_call>\n{"name": "',
    closing="}\n</tool_call>",
    key_separator=": ",
    item_separator=", ",
)
BARE = ToolFormat(
    opening='{"name": "',
    middle='", "parameters": ',
    separator=None,
    closing="}",
    key_separator=": ",
    item_separator=", ",
)
FORMATS = pytest.mark.parametrize("form", [TAGS, BARE], ids=["tags", "bare"])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
}


def tool(name: str, parameters: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def node(tools: list[Any], **more: Any) -> GenerateNode:
    body = {"id": "n", "op": "generate", "tools": tools, **more}
    return msgspec.convert(body, GenerateNode)


def use(form: ToolFormat, *tools: Any, **more: Any) -> ToolUse:
    found = read_tools(node(list(tools or (tool("f"), tool("g"))), **more))
    assert found is not None
    return ToolUse(found, form)


def calls_of(text: str, using: ToolUse) -> list[tuple[str, str]]:
    _, calls = parse_answer(text, using, name="p/n/0")
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@FORMATS
def test_calls_are_parsed_with_verbatim_arguments(form: ToolFormat) -> None:
    using = use(form)
    text = form.render_calls([("f", {"a": 1, "b": 'q"} {'})])
    assert calls_of(text, using) == [("f", '{"a": 1, "b": "q\\"} {"}')]
    assert parse_answer(text, using, name="x")[0] == ""
    if form.separator is not None:
        two = form.render_calls([("f", {"a": 1}), ("g", {"a": 2})])
        assert calls_of(two, using) == [("f", '{"a": 1}'), ("g", '{"a": 2}')]


def test_text_may_precede_marked_calls() -> None:
    text = "I will look. \n" + TAGS.render_calls([("f", {"a": 1})])
    content, calls = parse_answer(text, use(TAGS), name="x")
    assert (content, len(calls)) == ("I will look.", 1)


@FORMATS
def test_text_resembling_a_call_is_content(form: ToolFormat) -> None:
    for text in (
        "plain",
        "",
        form.opening,
        form.render_calls([("unknown", {})]),
        form.opening + "f",
        '{"name": 3}',
    ):
        assert parse_answer(text, use(form), name="x") == (text, [])


@FORMATS
def test_truncated_call_has_partial_arguments(form: ToolFormat) -> None:
    whole = form.render_calls([("f", {"a": 1, "b": "long"})])
    cut = whole[: whole.index("long")]
    assert calls_of(cut, use(form)) == [("f", '{"a": 1, "b": "')]


def test_call_ids_are_distinct_and_stable() -> None:
    text = TAGS.render_calls([("f", {"a": 1}), ("g", {"a": 2})])
    ids = [call["id"] for call in parse_answer(text, use(TAGS), name="p/n/0")[1]]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert ids == [call["id"] for call in parse_answer(text, use(TAGS), name="p/n/0")[1]]
    assert ids != [call["id"] for call in parse_answer(text, use(TAGS), name="p/n/1")[1]]


PIECES = st.lists(
    st.sampled_from(
        [
            *("<", "<tool", "_call>", "\n", " ", "x", "f", "{}", "}"),
            *('{"name": "', '", "arguments": '),
            *(form.render_calls([("f", {"a": 1})]) for form in (TAGS, BARE)),
        ]
    ),
    max_size=12,
)


@FORMATS
@given(pieces=PIECES)
def test_streamed_content_is_a_prefix_of_content(form: ToolFormat, pieces: list[str]) -> None:
    using = use(form)
    stream = ContentStream(using)
    streamed = "".join([stream.feed(piece) for piece in pieces])
    content, _ = parse_answer("".join(pieces), using, name="x")
    assert content.startswith(streamed)


@given(text=st.text(alphabet="ab <\n", max_size=30))
def test_plain_text_streams_except_short_end(text: str) -> None:
    stream = ContentStream(use(TAGS))
    streamed = "".join([stream.feed(char) for char in text])
    assert text.startswith(streamed)
    assert streamed.rstrip("< \n") == text.rstrip("< \n")


def holds(using: ToolUse, text: str, constraint: Constraint | None = None) -> bool:
    grammar = using.grammar(constraint)
    if grammar is None:
        return True
    return accepts(compile_grammar(byte_tokenizer(["<|x|>"]), grammar), list(text.encode()))


def test_grammar_permits_text_or_calls() -> None:
    using = use(TAGS)
    call, bad = TAGS.render_calls([("f", {"a": 1})]), TAGS.render_calls([("f", {"a": "x"})])
    two = TAGS.render_calls([("g", {"a": 1, "b": "/ü\n"}), ("f", {"a": 2})])
    for text in ("hello", "", call, "hm\n" + call, two):
        assert holds(using, text), text
    for text in (
        bad,
        TAGS.render_calls([("h", {"a": 1})]),
        TAGS.render_calls([("f", {})]),
        call + "more",
    ):
        assert not holds(using, text), text


@FORMATS
def test_tool_choice_is_enforced(form: ToolFormat) -> None:
    f, g = form.render_calls([("f", {"a": 1})]), form.render_calls([("g", {"a": 1})])
    required = use(form, tool_choice="required")
    assert [holds(required, text) for text in ("hi", f, g)] == [False, True, True]
    named = use(form, tool("f"), tool("g"), tool_choice=tool("g"))
    assert [holds(named, text) for text in ("hi", f, g)] == [False, False, True]
    assert calls_of(g, named) == [("g", '{"a": 1}')]
    none = use(form, tool_choice="none")
    assert holds(none, "hi")
    assert holds(none, f) == (form is BARE)
    assert parse_answer(f, none, name="x") == (f, [])


def test_parallel_calls_can_be_disabled() -> None:
    two = TAGS.render_calls([("f", {"a": 1}), ("g", {"a": 2})])
    assert holds(use(TAGS, tool_choice="required"), two)
    assert not holds(use(TAGS, tool_choice="required", parallel_tool_calls=False), two)


@FORMATS
def test_constraint_applies_to_text_without_calls(form: ToolFormat) -> None:
    number = Constraint(type="int")
    using = use(form)
    found = [
        holds(using, text, number) for text in ("12", "x", form.render_calls([("f", {"a": 1})]))
    ]
    assert found == [True, False, True]


def test_strict_schema_is_enforced_fully() -> None:
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": unique}, "required": ["a"]}
    assert holds(use(TAGS, tool("f", schema)), TAGS.render_calls([("f", {"a": [1, 1]})]))
    with pytest.raises(EngineError):
        holds(use(TAGS, tool("f", schema, strict=True)), "x")
    assert holds(use(TAGS, tool("f", None)), TAGS.render_calls([("f", {})]))
    assert holds(use(TAGS, tool("f", {"type": "object"})), TAGS.render_calls([("f", {"z": {}})]))


@pytest.mark.parametrize("num_integers", [1, MAX_BOUNDS + 1])
def test_the_grammar_of_a_strict_tool_does_not_change_the_tool(num_integers: int) -> None:
    properties = {f"n{i}": {"type": "integer"} for i in range(num_integers)}
    using = use(TAGS, tool("f", {"properties": properties}, strict=True))
    assert using.grammar(None) is not None
    assert using.tools.tools[0].parameters == {"properties": properties}


def test_unsupported_pattern_only_fails_strict_tools() -> None:
    mail = {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"}
    schema = {"type": "object", "properties": {"to": {"anyOf": [mail]}}, "required": ["to"]}
    assert holds(use(TAGS, tool("f", schema)), TAGS.render_calls([("f", {"to": "a@b"})]))
    assert not holds(use(TAGS, tool("f", schema)), TAGS.render_calls([("f", {"to": 1})]))
    with pytest.raises(EngineError):
        holds(use(TAGS, tool("f", schema, strict=True)), "x")


@pytest.mark.parametrize(
    ("tools", "choice", "path"),
    [
        ([{}], None, "tools[0]"),
        ([{"type": "function"}], None, "tools[0].function.name"),
        ([tool('a"b')], None, "tools[0].function.name"),
        ([tool("f"), tool("f")], None, "tools[1].function.name"),
        ([tool("f", [])], None, "tools[0].function.parameters"),
        ([tool("f", {"type": "array"})], None, "tools[0].function.parameters.type"),
        ([tool("f")], "f", "tool_choice"),
        ([tool("f")], tool("g"), "tool_choice"),
        ([], "required", "tool_choice"),
    ],
)
def test_invalid_tools_are_rejected(tools: list[Any], choice: Any, path: str) -> None:
    with pytest.raises(ProgramError) as caught:
        read_tools(node(tools, tool_choice=choice))
    assert (caught.value.code, caught.value.path) == ("program.tools", path)
    assert json.dumps(caught.value.message)
