"""Messages and values cross the wire as they are, or not at all."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompt_values import StringPromptValue

from conure.adapters.langchain.messages import decode, encode, from_wire, to_wire, to_wire_list
from conure.server.program.errors import ProgramError

CALL = {"id": "c1", "name": "add", "args": {"a": "ü"}, "type": "tool_call"}


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (HumanMessage("hi"), {"role": "user", "content": "hi"}),
        (SystemMessage("s", name="n"), {"role": "system", "content": "s", "name": "n"}),
        (AIMessage(""), {"role": "assistant", "content": ""}),
        (ChatMessage(content="c", role="critic"), {"role": "critic", "content": "c"}),
        (
            ToolMessage("3", tool_call_id="c1"),
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
        ),
        (
            AIMessage("", tool_calls=[CALL]),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a":"ü"}'},
                    }
                ],
            },
        ),
        (
            HumanMessage(["a", {"type": "text", "text": ""}, {"type": "text", "text": "b"}]),
            {"role": "user", "content": "ab"},
        ),
        (
            HumanMessage(["a", {"type": "image_url", "image_url": {"url": "x"}}]),
            {
                "role": "user",
                "content": [
                    {"text": "a"},
                    {"part": {"type": "image_url", "image_url": {"url": "x"}}},
                ],
            },
        ),
    ],
)
def test_a_message_says_the_same_on_the_wire(message: Any, wire: Any) -> None:
    assert to_wire(message) == wire


def test_a_message_without_a_role_is_refused_by_class() -> None:
    with pytest.raises(ProgramError, match="FunctionMessage"):
        to_wire(FunctionMessage(content="x", name="f"))


def test_a_model_takes_what_langchains_models_take() -> None:
    hi = [{"role": "user", "content": "hi"}]
    assert to_wire_list("hi") == hi
    assert to_wire_list(StringPromptValue(text="hi")) == hi
    assert to_wire_list([("human", "hi")]) == hi
    with pytest.raises(ValueError, match="Invalid input type"):
        to_wire_list({"a": 1})


def test_an_answer_carries_its_usage_and_how_it_ended() -> None:
    value = {
        "role": "assistant",
        "content": "hi",
        "finish_reason": "stop",
        "stop": "\n",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "model": "default",
    }
    message = from_wire(value, program="p_1")
    assert message.content == "hi"
    assert message.usage_metadata == {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5}
    assert message.response_metadata == {
        "model_name": "default",
        "model_provider": "conure",
        "program": "p_1",
        "finish_reason": "stop",
        "stop": "\n",
    }


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(JSON)
def test_json_travels_as_itself(value: Any) -> None:
    assert encode(value, what="it") == value
    assert decode(encode(value, what="it")) == value


def test_messages_travel_whole_anywhere_in_a_value() -> None:
    value = {"history": [HumanMessage("a", name="n"), AIMessage("b", tool_calls=[CALL])]}
    assert decode(encode(value, what="it")) == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ((1, 2), "tuple"),
        ({1: 2}, "dict"),
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (math.nan, "float"),
        (datetime.date(2020, 1, 1), "date"),
        (Document(page_content="x"), "Document"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(ProgramError, match=rf"it\['a'\]\[1\] is a {kind}"):
        encode({"a": [0, value]}, what="it")
