"""Examples for fine-tuning from the traces of programs. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from conure.server.program.ir import Json


def training_examples(spans: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Json]]:
    """Yield one example per LLM output of a trace that was complete.

    An output that was cut by its `max_tokens`, or that is not a value of its type, is left out.

    Returns:
        `{"messages": [...]}` for a chat call, the answer last, and
        `{"prompt": text, "completion": text}` for a call with a prompt. If the trace has token
        ids, also `prompt_token_ids` and `completion_token_ids`.
    """
    for span in spans:
        attributes = span["attributes"]
        is_call = attributes.get("openinference.span.kind") == "LLM"
        if not is_call or span["status_code"] != "OK":
            continue
        if attributes.get("llm.finish_reason") == "length":
            continue
        example: dict[str, Json]
        if "llm.choices.0.completion.text" in attributes:
            example = {
                "prompt": attributes["llm.prompts.0.prompt.text"],
                "completion": attributes["llm.choices.0.completion.text"],
            }
        else:
            messages = _messages(attributes, "llm.input_messages")
            example = {"messages": messages + _messages(attributes, "llm.output_messages")}
            if tools := list(_items(attributes, "llm.tools")):
                example["tools"] = [msgspec.json.decode(tool["tool.json_schema"]) for tool in tools]
        if "conure.prompt_token_ids" in attributes:
            example["prompt_token_ids"] = attributes["conure.prompt_token_ids"]
            example["completion_token_ids"] = attributes["conure.output_token_ids"]
        yield example


def _messages(attributes: Mapping[str, Json], prefix: str) -> list[Json]:
    return [_message(fields) for fields in _items(attributes, prefix)]


def _message(fields: Mapping[str, Json]) -> dict[str, Json]:
    message: dict[str, Json] = {
        name: fields[f"message.{name}"]
        for name in ("role", "content", "name", "tool_call_id")
        if f"message.{name}" in fields
    }
    calls = [
        {
            "id": call.get("tool_call.id", ""),
            "type": "function",
            "function": {
                "name": call.get("tool_call.function.name", ""),
                "arguments": call.get("tool_call.function.arguments", ""),
            },
        }
        for call in _items(fields, "message.tool_calls")
    ]
    return {**message, "tool_calls": calls} if calls else message


def _items(attributes: Mapping[str, Json], prefix: str) -> Iterator[dict[str, Json]]:
    """Yield the objects of a flattened list: `{prefix}.{index}.{name}`."""
    items: dict[int, dict[str, Json]] = {}
    for key, value in attributes.items():
        if key.startswith(f"{prefix}."):
            index, _, name = key[len(prefix) + 1 :].partition(".")
            items.setdefault(int(index), {})[name] = value
    for _, item in sorted(items.items()):
        yield item
