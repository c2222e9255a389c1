"""Prompts of `generate` nodes: pieces, boundaries, and invalid splices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from conure.engine.text.byte_tokenizer import CHAT_TEMPLATE, EOS_IDS, SPECIAL_TOKENS, tokenizer_json
from conure.server.program.errors import ExpressionError, PromptError
from conure.server.program.ir import GenerateNode, Json
from conure.server.program.prompt_prefix import prefix_hash
from conure.server.prompts import prompt as prompts
from conure.server.prompts.chat_template import ChatTemplate
from conure.server.prompts.prompt import RenderedPrompt, render_chat, render_slot, render_value
from conure.server.prompts.tokenizer import PromptPiece, Tokenizer

TOKENIZER = Tokenizer(tokenizer_json(), bos_id=None, special_tokens=SPECIAL_TOKENS)
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, SPECIAL_TOKENS, spells_special=TOKENIZER.spells_special)
CALLS = ChatTemplate(
    "{% for m in messages %}{{ m.role }}/{{ m.name }}/{{ m.tool_call_id }}/{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{{ tools | tojson }}",
    {},
)


def node(**fields: Any) -> GenerateNode:
    return msgspec.convert({"op": "generate", "id": "n", **fields}, GenerateNode)


def chat(*messages: Json, **fields: Any) -> GenerateNode:
    return node(messages=list(messages), output={"variable": "out"}, **fields)


def upto(rendered: RenderedPrompt) -> list[str]:
    text = "".join(piece.text for piece in rendered.pieces)
    return [text[:end] for end in rendered.ends]


def text_of(rendered: RenderedPrompt) -> str:
    return "".join(piece.text for piece in rendered.pieces)


GROWING = node(
    prompt=[
        {"text": "<|im_start|>", "special": True},
        {"input": "task"},
        {"text": "\nCode:"},
        {"output": "code"},
        {"text": "\nTest:"},
        {"input": {"concat": ["<", {"var": "code"}, ">"]}},
        {"output": "test"},
        {"output": "more"},
        {"input": "never"},
    ]
)
VALUES = {"task": "t", "code": "c", "test": "e", "more": "m"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a \"b\"\n", "a \"b\"\n"),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ([1, {"ä": ["x"]}], '[1,{"ä":["x"]}]'),
        ({}, "{}"),
    ],
)  # fmt: skip
def test_strings_render_unchanged_and_others_as_json(value: Json, text: str) -> None:
    assert render_value(value) == text


def test_slot_is_the_text_between_two_outputs() -> None:
    first = render_slot(GROWING, 0, {"task": {"n": 1}})
    assert first.pieces == (
        PromptPiece("<|im_start|>", special=True),
        PromptPiece('{"n":1}', special=False),
        PromptPiece("\nCode:", special=False),
    )
    assert upto(first) == ["<|im_start|>", '<|im_start|>{"n":1}', '<|im_start|>{"n":1}\nCode:']
    assert not first.prefix_break
    second = render_slot(GROWING, 1, {"code": "x"})
    assert upto(second) == ["\nTest:", "\nTest:<x>"]
    assert render_slot(GROWING, 2, {}) == RenderedPrompt((), (), False)


def test_only_special_text_yields_special_tokens() -> None:
    rendered = render_slot(GROWING, 0, {"task": "<|im_end|>"})
    ids = TOKENIZER.encode(rendered.pieces, bos=True).ids
    assert ids[0] == 257
    assert all(each < 256 for each in ids[1:])


def test_boundaries_match_prefix_hashes() -> None:
    messages = chat(
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"text": "a"}, {"input": "x"}, {"text": "b"}]},
        {"role": "assistant"},
        {"splice": "history"},
        {"splice": "nothing"},
        {"role": "user", "content": []},
        {"role": "user", "content": "z"},
    )
    rendered = render_chat(
        messages,
        {
            "x": [1],
            "history": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}],
            "nothing": [],
        },
        TEMPLATE,
    )
    tails = [text.rsplit("\n", 1)[-1] for text in upto(rendered)]
    assert tails == ["S", "a", "a[1]", "a[1]b", "a[1]b", "r", "r", "r", "z"]
    # The last hash includes the answer.
    assert len(rendered.ends) == len(prefix_hash(messages)) - 1
    numbers = [len(render_slot(GROWING, slot, VALUES).ends) for slot in range(3)]
    assert sum(numbers) + 3 + 1 == len(prefix_hash(GROWING))


def test_leading_empty_splice_ends_at_zero() -> None:
    messages = chat({"splice": "none"}, {"role": "user", "content": "a"})
    assert render_chat(messages, {"none": []}, TEMPLATE).ends == (0, 18)


def test_message_text_is_never_special() -> None:
    rendered = render_chat(
        chat(
            {"role": "user", "content": [{"text": "<|im_end|>", "special": True}]},
            {"role": "user", "content": "<|im_end|>"},
            {"splice": "more"},
        ),
        {"more": {"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}},
        TEMPLATE,
    )
    ids = TOKENIZER.encode(rendered.pieces, bos=False).ids
    assert ids.count(EOS_IDS[0]) == 3
    assert ids.count(257) == 4


def test_names_tool_calls_and_tools_reach_the_template() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "ä"}'}}
    odd = {"type": "function", "function": {"name": "f", "arguments": "no json"}}
    rendered = render_chat(
        chat(
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "r"},
            {"splice": "more"},
            tools=[{"type": "function"}],
        ),
        {
            "more": {
                "role": "assistant",
                "content": None,
                "tool_calls": [odd],
                "finish_reason": "stop",
            }
        },
        CALLS,
    )
    assert text_of(rendered) == (
        'assistant///{"a": "ä"};tool/f/c1/r;assistant///"no json";[{"type": "function"}]'
    )


def test_splices_of_too_many_messages_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    def counted(*args: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return read(*args)

    read = prompts._read_message
    monkeypatch.setattr(prompts, "_read_message", counted)
    monkeypatch.setattr(prompts, "MAX_MESSAGES", 100)
    history = [{"role": "user", "content": "x"}] * 30
    assert len(render_chat(chat(*[{"splice": "h"}] * 3), {"h": history}, TEMPLATE).ends) == 3
    num_read = 0
    with pytest.raises(PromptError, match="More than 100 messages") as caught:
        render_chat(chat(*[{"splice": "h"}] * 1_000), {"h": history}, TEMPLATE)
    assert (caught.value.code, caught.value.path) == ("prompt.too_long", "nodes.n.messages[3]")
    assert num_read == 90


CALLED: Json = {
    "role": "assistant",
    "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": '{"a":"12345678"}'}}
    ],
}


@pytest.mark.parametrize(
    "make",
    [
        lambda: render_slot(node(prompt=[{"input": "v"}] * 1_000 + [{"output": "o"}]), 0, LONG),
        lambda: render_chat(
            chat({"role": "user", "content": [{"input": "v"}] * 1_000}), LONG, TEMPLATE
        ),
        lambda: render_chat(chat(*[{"splice": "m"}] * 1_000), LONG, TEMPLATE),
        lambda: render_chat(chat(*[{"splice": "c"}] * 1_000), LONG, TEMPLATE),
    ],
    ids=["prompt", "content", "splices", "tool calls"],
)
def test_values_of_too_many_characters_are_refused_before_they_are_joined(
    make: Callable[[], RenderedPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_CHARS", 2_000)
    with pytest.raises(PromptError, match="More than 2,000 characters") as caught:
        make()
    assert caught.value.code == "prompt.too_long"


LONG: Json = {"v": ["x" * 20], "m": {"role": "user", "content": "x" * 20}, "c": CALLED}


def test_spliced_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c"}]
    spliced = {"role": "user", "content": parts}
    assert upto(render_chat(chat({"splice": "m"}), {"m": spliced}, TEMPLATE)) == [
        "<|im_start|>user\nabc"
    ]


@pytest.mark.parametrize(
    ("value", "path", "reason"),
    [
        ("text", "splice", "not an object"),
        (None, "splice", "not an object"),
        ([{"role": "user", "content": "a"}, 3], "splice[1]", "not an object"),
        ({"content": "a"}, "splice", "its role None"),
        ({"role": ["user"], "content": "a"}, "splice", "its role"),
        ({"role": "<|im_end|>", "content": "a"}, "splice", "its role"),
        ({"role": "user", "content": 3}, "splice", "content must be"),
        ({"role": "user", "content": [{"text": "a"}]}, "splice", "part 0"),
        ({"role": "user", "content": [{"type": "text"}]}, "splice", "part 0"),
        ({"role": "user", "content": [3]}, "splice", "part 0"),
        ({"role": "user", "tool_calls": {}}, "splice", "tool_calls"),
        ({"role": "user", "name": 3}, "splice", "name"),
        ({"role": "user", "tool_call_id": []}, "splice", "tool_call_id"),
    ],
)
def test_non_message_value_is_not_spliced(value: Json, path: str, reason: str) -> None:
    with pytest.raises(PromptError, match=reason) as refused:
        render_chat(chat({"splice": "m"}), {"m": value}, TEMPLATE)
    assert refused.value.code == "prompt.splice"
    assert refused.value.path == f"nodes.n.messages[0].{path}"
    assert refused.value.message.startswith("Node `n` splices `m`, which is not a message or a")


PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}


def test_non_text_part_is_rejected_with_its_path() -> None:
    renders: list[Callable[[], RenderedPrompt]] = [
        lambda: render_slot(node(prompt=[{"part": PICTURE}, {"output": "o"}]), 0, {}),
        lambda: render_chat(
            chat({"role": "user", "content": [{"text": "a"}, {"part": PICTURE}]}), {}, TEMPLATE
        ),
        lambda: render_chat(
            chat({"splice": "m"}), {"m": {"role": "user", "content": [PICTURE]}}, TEMPLATE
        ),
    ]
    found = []
    for render in renders:
        with pytest.raises(PromptError) as refused:
            render()
        assert refused.value.code == "engine.unsupported_part"
        found.append(refused.value.path)
    assert found == [
        "nodes.n.prompt[0]",
        "nodes.n.messages[0].content[1]",
        "nodes.n.messages[0].splice.content[0]",
    ]


def test_failing_expression_reports_its_path() -> None:
    broken = node(prompt=[{"input": {"parse_json": {"var": "x"}}}, {"output": "o"}])
    with pytest.raises(ExpressionError) as refused:
        render_slot(broken, 0, {"x": "{"})
    assert refused.value.code == "expr.json"
    assert refused.value.path == "nodes.n.prompt[0].input"


def test_template_rejection_names_the_node() -> None:
    strict = ChatTemplate("{{ raise_exception('No system role') }}", {})
    with pytest.raises(PromptError, match="No system role") as refused:
        render_chat(chat({"role": "system", "content": "a"}), {}, strict)
    assert refused.value.code == "prompt.template"
    assert refused.value.path == "nodes.n.messages"
