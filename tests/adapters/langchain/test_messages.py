"""Messages and values are unchanged after a round trip, or rejected."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompt_values import StringPromptValue

from conure.adapters.langchain.chat.messages import from_wire, to_wire, to_wire_list
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
def test_message_converts_to_wire(message: Any, wire: Any) -> None:
    assert to_wire(message) == wire


def test_message_without_role_is_rejected_by_class() -> None:
    with pytest.raises(ProgramError, match="FunctionMessage"):
        to_wire(FunctionMessage(content="x", name="f"))


def test_model_inputs_convert_to_messages() -> None:
    hi = [{"role": "user", "content": "hi"}]
    assert to_wire_list("hi") == hi
    assert to_wire_list(StringPromptValue(text="hi")) == hi
    assert to_wire_list([("human", "hi")]) == hi
    with pytest.raises(ValueError, match="Invalid input type"):
        to_wire_list({"a": 1})


def test_answer_has_usage_and_finish_reason() -> None:
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
