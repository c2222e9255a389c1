"""Chat templates: the origin of each text, and the same ids as transformers' own rendering."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conure.server.program.errors import PromptError
from conure.server.program.ir import Json
from conure.server.prompts.chat import RenderedChat, TemplateMessage
from conure.server.prompts.chat_template import ChatTemplate
from conure.server.prompts.tokenizer import PromptPiece, Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: 26 Jul 2024\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {{- message.content | tojson }}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {{- message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
MISTRAL = """{%- if messages[0]['role'] == 'system' -%}
    {%- set system_message = messages[0]['content'] -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{{- bos_token }}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('After the optional system message, roles must alternate') -}}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {%- if loop.last and system_message is defined -%}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' -}}
        {%- else -%}
            {{- '[INST] ' + message['content'] + '[/INST]' -}}
        {%- endif -%}
    {%- else -%}
        {{- ' ' + message['content'] + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
THINKING = """{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
TEMPLATES = {
    "chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL, "thinking": THINKING,
}  # fmt: skip
MARKERS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
]  # fmt: skip
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def raw_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in MARKERS])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(raw_tokenizer().to_str(), bos_id=None, special_tokens=SPECIALS)


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], SPECIALS, spells_special=tokenizer().spells_special)


@cache
def transformers_tokenizer(name: str) -> Any:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # theirs
        tokenizer_object=raw_tokenizer(), chat_template=TEMPLATES[name], bos_token="<s>",
        eos_token="</s>",
    )  # fmt: skip


def message(role: str, *segments: str, **fields: Any) -> TemplateMessage:
    return TemplateMessage(
        role, tuple(PromptPiece(each, special=False) for each in segments), **fields
    )


def text_of(rendered: RenderedChat) -> str:
    return "".join(piece.text for piece in rendered.pieces)


def plain_of(rendered: RenderedChat) -> str:
    return "".join(piece.text for piece in rendered.pieces if not piece.special)


def upto(rendered: RenderedChat) -> list[str]:
    return [text_of(rendered)[:end] for end in rendered.ends]


def their_ids(
    name: str, messages: Sequence[TemplateMessage], tools: list[Json] | None = None
) -> list[int]:
    chat = [
        {"role": each.role, "content": "".join(piece.text for piece in each.content)}
        | ({"tool_calls": each.tool_calls} if each.tool_calls else {})
        for each in messages
    ]
    ids = transformers_tokenizer(name).apply_chat_template(
        chat, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert isinstance(ids, list)
    return ids


texts = st.lists(
    st.sampled_from(["hello", " ", "\n", "  ", "ä", "你好", "{{ x }}", "{%", "<b>", "\t", "\u00a0"])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    max_size=4,
).map("".join)


def chats(content: st.SearchStrategy[str]) -> st.SearchStrategy[list[TemplateMessage]]:
    """Chats in an order that every template accepts: an optional system message, then turns."""
    segments = st.lists(content, min_size=1, max_size=3)
    system = st.lists(segments.map(lambda each: message("system", *each)), max_size=1)
    turns = st.lists(segments, min_size=1, max_size=4).map(
        lambda each: [
            message("assistant" if i % 2 else "user", *segments) for i, segments in enumerate(each)
        ]
    )
    return st.builds(lambda first, rest: [*first, *rest], system, turns)


names = pytest.mark.parametrize("name", TEMPLATES)


@names
@given(messages=chats(texts))
def test_plain_contents_encode_like_transformers(
    name: str, messages: list[TemplateMessage]
) -> None:
    rendered = template(name).render(messages)
    assert tokenizer().encode(rendered.pieces, bos=False).ids == their_ids(name, messages)


@names
@given(messages=chats(texts | st.sampled_from(MARKERS)))
def test_contents_never_yield_control_tokens(name: str, messages: list[TemplateMessage]) -> None:
    controls = {raw_tokenizer().token_to_id(each) for each in MARKERS}
    harmless = [
        each._replace(content=tuple(PromptPiece("x", special=False) for _ in each.content))
        for each in messages
    ]
    expected = [each for each in their_ids(name, harmless) if each in controls]
    rendered = template(name).render(messages)
    ids = tokenizer().encode(rendered.pieces, bos=False).ids
    assert [each for each in ids if each in controls] == expected


@names
@given(messages=chats(texts))
def test_each_segment_has_a_nondecreasing_end(name: str, messages: list[TemplateMessage]) -> None:
    rendered = template(name).render(messages)
    assert len(rendered.ends) == sum(len(each.content) for each in messages)
    assert list(rendered.ends) == sorted(rendered.ends)
    assert all(0 <= end <= len(text_of(rendered)) for end in rendered.ends)


def test_chat_has_expected_pieces_and_ends() -> None:
    rendered = template("chatml").render(
        [message("system", "Be brief."), message("user", "Sum up: ", "", "a text")]
    )
    assert rendered.pieces == (
        PromptPiece("<|im_start|>system\n", special=True),
        PromptPiece("Be brief.", special=False),
        PromptPiece("<|im_end|>\n<|im_start|>user\n", special=True),
        PromptPiece("Sum up: a text", special=False),
        PromptPiece("<|im_end|>\n<|im_start|>assistant\n", special=True),
    )
    assert [text[-8:] for text in upto(rendered)] == [
        "e brief.",
        "Sum up: ",
        "Sum up: ",
        ": a text",
    ]
    assert not rendered.prefix_break


def test_special_segment_counts_as_template_text() -> None:
    mixed = TemplateMessage(
        "user", (PromptPiece("a", special=False), PromptPiece("<|im_end|>", special=True))
    )
    rendered = template("chatml").render([mixed])
    assert plain_of(rendered) == "a"

    assert [text[-10:] for text in upto(rendered)] == ["rt|>user\na", "<|im_end|>"]


def test_trimming_template_keeps_pieces() -> None:
    rendered = template("gemma").render([message("user", "  ", " a", "<end_of_turn> b", "\n\n")])
    assert plain_of(rendered) == "a<end_of_turn> b"
    assert [text[23:] for text in upto(rendered)] == ["", "a", *["a<end_of_turn> b"] * 2]
    assert not rendered.prefix_break


def test_empty_message_ends_with_previous_segment() -> None:
    rendered = template("chatml").render([message("user", "a"), message("assistant", "")])
    assert upto(rendered) == ["<|im_start|>user\na"] * 2
    first = template("chatml").render([message("user", "")])
    assert first.ends == (0,)


def test_moved_message_breaks_prefix_but_keeps_pieces() -> None:
    chat = [message("system", "</s>"), message("user", "a"), message("assistant", "b")]
    kept = template("mistral").render(chat[:2])
    assert not kept.prefix_break
    moved = template("mistral").render([*chat, message("user", "c")])
    assert moved.prefix_break
    assert plain_of(moved) == "ab</s>c"
    assert set(moved.ends) == {len(text_of(moved))}


def test_rewritten_turn_leaves_one_opaque_piece() -> None:
    chat = [message("user", "a"), message("assistant", "<think>b</think>\n\nc")]
    rendered = template("thinking").render(chat)
    assert rendered.prefix_break
    assert rendered.pieces == (PromptPiece(text_of(rendered), special=True),)
    assert tokenizer().encode(rendered.pieces, bos=False).ids == their_ids("thinking", chat)


def test_control_token_in_opaque_text_is_rejected() -> None:
    chat = [message("user", "say <|im_end|>"), message("assistant", "</think>c")]
    for with_tokenizer in (True, False):
        check = tokenizer().spells_special if with_tokenizer else None
        with pytest.raises(PromptError) as refused:
            ChatTemplate(THINKING, SPECIALS, spells_special=check).render(chat)
        assert refused.value.code == "prompt.special_text"
    with pytest.raises(PromptError):
        ChatTemplate(THINKING, SPECIALS).render([message("user", "</s>"), chat[1]])


def test_template_rejection_keeps_its_message() -> None:
    with pytest.raises(PromptError, match="roles must alternate") as refused:
        template("mistral").render([message("user", "a"), message("user", "b")])
    assert refused.value.code == "prompt.template"


def test_model_without_template_rejects_chats() -> None:
    with pytest.raises(PromptError) as refused:
        ChatTemplate("", {}).render([message("user", "a")])
    assert refused.value.code == "prompt.no_template"


@pytest.mark.parametrize("role", ["<|im_end|>", "user\n", "", "a|b"])
def test_role_must_be_a_plain_word(role: str) -> None:
    with pytest.raises(PromptError) as refused:
        template("chatml").render([message(role, "a")])
    assert refused.value.code == "prompt.role"


TOOL: Json = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks <|eot_id|> up",
        "parameters": {"type": "object", "properties": {"<|eot_id|>": {"type": "string"}}},
    },
}


def test_tools_and_calls_render_like_transformers() -> None:
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"q": 'a "b" ä'}}}]
    chat = [message("user", "q"), message("assistant", "", tool_calls=calls)]
    tool = {"type": "function", "function": {"name": "look", "description": "Looks it up."}}
    rendered = template("llama").render(chat, tools=[tool])
    ids = tokenizer().encode(rendered.pieces, bos=False).ids
    assert ids == their_ids("llama", chat, tools=[tool])
    assert not rendered.prefix_break


def test_strings_of_tools_yield_no_control_tokens() -> None:
    calls = [{"function": {"name": "look", "arguments": {"<|eot_id|>": "<|eot_id|>\n"}}}]
    chat = [
        message("user", "q"),
        message("assistant", "", tool_calls=calls),
        message("tool", '"<|eot_id|>"', tool_call_id="1"),
    ]
    rendered = template("llama").render(chat, tools=[TOOL])
    assert not rendered.prefix_break
    assert text_of(rendered).count("<|eot_id|>") == 9
    marker = raw_tokenizer().get_vocab()["<|eot_id|>"]
    assert tokenizer().encode(rendered.pieces, bos=False).ids.count(marker) == 4
    assert len(rendered.ends) == 3


def test_deeply_nested_tool_is_rejected() -> None:
    deep: Json = "x"
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(PromptError, match="nests deeper"):
        template("llama").render([message("user", "q")], tools=[deep])


def test_one_rendering_uses_one_date() -> None:
    dated = ChatTemplate(
        "{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }} {{ messages[0].content }}", SPECIALS
    )
    rendered = dated.render([message("user", "a")])
    assert not rendered.prefix_break
    written = datetime.strptime(text_of(rendered)[:26], "%Y-%m-%d %H:%M:%S.%f")
    assert abs((datetime.now() - written).total_seconds()) < 60


def test_content_tested_by_template_renders_correctly() -> None:
    source = "{% if messages[0].content == 'a' %}<s>{% else %}{{ messages[0].content }}{% endif %}"
    rendered = ChatTemplate(source, SPECIALS).render([message("user", "a")])
    assert rendered == RenderedChat((PromptPiece("<s>", special=True),), (3,), True)
    assert text_of(ChatTemplate(source, SPECIALS).render([message("user", "b")])) == "b"


def test_dropped_content_leaves_no_trace() -> None:
    source = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    rendered = ChatTemplate(source, {}).render(
        [message("user", "a"), message("critic", "b"), message("user", "c")]
    )
    assert text_of(rendered) == "[a][c]"
    assert rendered.ends == (2, 2, 5)
    assert not rendered.prefix_break


def test_repeated_content_is_plain_each_time() -> None:
    source = "<s>{% for _ in range(2) %}{{ messages[0].content }}|{% endfor %}"
    rendered = ChatTemplate(source, SPECIALS).render([message("user", "<s>", "b")])
    assert [piece.text for piece in rendered.pieces] == ["<s>", "<s>b", "|", "<s>b", "|"]
    assert rendered.ends == (6, 7)


def test_options_are_variables_that_cannot_replace_the_chat() -> None:
    source = "{{ mood | default('none') }}{{ messages[0].content }}"
    template = ChatTemplate(source, {"eos_token": "</s>"})
    chat = [TemplateMessage("user", (PromptPiece("Hi", False),))]

    def text(**options: Json) -> str:
        return "".join(piece.text for piece in template.render(chat, options=options).pieces)

    assert text() == "noneHi"
    assert text(mood="calm", messages=[]) == "calmHi"
    with pytest.raises(PromptError, match="spells a control token"):
        text(mood="</s>")
