"""Tool calls are read out of an answer whole, cut or in pieces; grammars leave room for them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.engine.api import EngineError
from conure.engine.grammar import accepts, byte_tokenizer, compile_grammar
from conure.server.program.errors import ProgramError
from conure.server.program.ir import Constraint, Generate
from conure.server.program.tools import read_tools
from conure.server.prompts.tool_calls import ContentStream, ToolUse, read_answer
from conure.server.prompts.tool_format import ToolFormat

TAGS = ToolFormat(
    opening='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    joint='}\n</tool_call>\n<tool_call>\n{"name": "',
    closing="}\n</tool_call>",
    key_separator=": ",
    item_separator=", ",
)
BARE = ToolFormat(
    opening='{"name": "',
    middle='", "parameters": ',
    joint=None,
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


def node(tools: list[Any], **more: Any) -> Generate:
    body = {"id": "n", "op": "generate", "tools": tools, **more}
    return msgspec.convert(body, Generate)


def use(form: ToolFormat, *tools: Any, **more: Any) -> ToolUse:
    found = read_tools(node(list(tools or (tool("f"), tool("g"))), **more))
    assert found is not None
    return ToolUse(found, form)


def calls_of(text: str, using: ToolUse) -> list[tuple[str, str]]:
    _, calls = read_answer(text, using, name="p/n/0")
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@FORMATS
def test_calls_are_read_with_their_arguments_as_written(form: ToolFormat) -> None:
    using = use(form)
    text = form.spell([("f", {"a": 1, "b": 'q"} {'})])
    assert calls_of(text, using) == [("f", '{"a": 1, "b": "q\\"} {"}')]
    assert read_answer(text, using, name="x")[0] == ""
    if form.joint is not None:
        two = form.spell([("f", {"a": 1}), ("g", {"a": 2})])
        assert calls_of(two, using) == [("f", '{"a": 1}'), ("g", '{"a": 2}')]


def test_text_may_come_before_calls_that_begin_with_a_mark() -> None:
    text = "I will look. \n" + TAGS.spell([("f", {"a": 1})])
    content, calls = read_answer(text, use(TAGS), name="x")
    assert (content, len(calls)) == ("I will look.", 1)


@FORMATS
def test_what_only_looks_like_a_call_is_text(form: ToolFormat) -> None:
    for text in (
        "plain",
        "",
        form.opening,
        form.spell([("unknown", {})]),
        form.opening + "f",
        '{"name": 3}',
    ):
        assert read_answer(text, use(form), name="x") == (text, [])


@FORMATS
def test_a_call_that_was_cut_has_what_was_written(form: ToolFormat) -> None:
    whole = form.spell([("f", {"a": 1, "b": "long"})])
    cut = whole[: whole.index("long")]
    assert calls_of(cut, use(form)) == [("f", '{"a": 1, "b": "')]


def test_ids_differ_and_stay_the_same() -> None:
    text = TAGS.spell([("f", {"a": 1}), ("g", {"a": 2})])
    ids = [call["id"] for call in read_answer(text, use(TAGS), name="p/n/0")[1]]
    assert len(set(ids)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert ids == [call["id"] for call in read_answer(text, use(TAGS), name="p/n/0")[1]]
    assert ids != [call["id"] for call in read_answer(text, use(TAGS), name="p/n/1")[1]]


PIECES = st.lists(
    st.sampled_from(
        [
            *("<", "<tool", "_call>", "\n", " ", "x", "f", "{}", "}"),
            *('{"name": "', '", "arguments": '),
            *(form.spell([("f", {"a": 1})]) for form in (TAGS, BARE)),
        ]
    ),
    max_size=12,
)


@FORMATS
@given(pieces=PIECES)
def test_what_is_told_piece_by_piece_begins_the_content(
    form: ToolFormat, pieces: list[str]
) -> None:
    using = use(form)
    stream = ContentStream(using)
    told = "".join([stream.feed(piece) for piece in pieces])
    content, _ = read_answer("".join(pieces), using, name="x")
    assert content.startswith(told)


@given(text=st.text(alphabet="ab <\n", max_size=30))
def test_plain_text_is_told_but_for_a_short_end(text: str) -> None:
    stream = ContentStream(use(TAGS))
    told = "".join([stream.feed(char) for char in text])
    assert text.startswith(told)
    assert told.rstrip("< \n") == text.rstrip("< \n")


def holds(using: ToolUse, text: str, constraint: Constraint | None = None) -> bool:
    grammar = using.grammar(constraint)
    if grammar is None:
        return True
    return accepts(compile_grammar(byte_tokenizer(["<|x|>"]), grammar), list(text.encode()))


def test_a_grammar_lets_through_text_or_calls_of_the_tools() -> None:
    using = use(TAGS)
    call, bad = TAGS.spell([("f", {"a": 1})]), TAGS.spell([("f", {"a": "x"})])
    two = TAGS.spell([("g", {"a": 1, "b": "/ü\n"}), ("f", {"a": 2})])
    for text in ("hello", "", call, "hm\n" + call, two):
        assert holds(using, text), text
    for text in (bad, TAGS.spell([("h", {"a": 1})]), TAGS.spell([("f", {})]), call + "more"):
        assert not holds(using, text), text


@FORMATS
def test_a_choice_is_kept(form: ToolFormat) -> None:
    f, g = form.spell([("f", {"a": 1})]), form.spell([("g", {"a": 1})])
    required = use(form, tool_choice="required")
    assert [holds(required, text) for text in ("hi", f, g)] == [False, True, True]
    named = use(form, tool("f"), tool("g"), tool_choice=tool("g"))
    assert [holds(named, text) for text in ("hi", f, g)] == [False, False, True]
    assert calls_of(g, named) == [("g", '{"a": 1}')]
    none = use(form, tool_choice="none")
    assert holds(none, "hi")
    assert holds(none, f) == (form is BARE)
    assert read_answer(f, none, name="x") == (f, [])


def test_calls_may_be_forbidden_to_be_many() -> None:
    two = TAGS.spell([("f", {"a": 1}), ("g", {"a": 2})])
    assert holds(use(TAGS, tool_choice="required"), two)
    assert not holds(use(TAGS, tool_choice="required", parallel_tool_calls=False), two)


@FORMATS
def test_an_answer_keeps_its_constraint_where_it_is_no_call(form: ToolFormat) -> None:
    number = Constraint(type="int")
    using = use(form)
    found = [holds(using, text, number) for text in ("12", "x", form.spell([("f", {"a": 1})]))]
    assert found == [True, False, True]


def test_strict_tools_are_kept_whole_and_others_as_far_as_grammars_go() -> None:
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": unique}, "required": ["a"]}
    assert holds(use(TAGS, tool("f", schema)), TAGS.spell([("f", {"a": [1, 1]})]))
    with pytest.raises(EngineError):
        holds(use(TAGS, tool("f", schema, strict=True)), "x")
    assert holds(use(TAGS, tool("f", None)), TAGS.spell([("f", {})]))
    assert holds(use(TAGS, tool("f", {"type": "object"})), TAGS.spell([("f", {"z": {}})]))


def test_a_pattern_that_no_grammar_can_keep_is_only_in_the_way_of_strict_tools() -> None:
    mail = {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"}
    schema = {"type": "object", "properties": {"to": {"anyOf": [mail]}}, "required": ["to"]}
    assert holds(use(TAGS, tool("f", schema)), TAGS.spell([("f", {"to": "a@b"})]))
    assert not holds(use(TAGS, tool("f", schema)), TAGS.spell([("f", {"to": 1})]))
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
def test_tools_that_are_none_are_refused(tools: list[Any], choice: Any, path: str) -> None:
    with pytest.raises(ProgramError) as caught:
        read_tools(node(tools, tool_choice=choice))
    assert (caught.value.code, caught.value.path) == ("program.tools", path)
    assert json.dumps(caught.value.message)
