"""Tool call formats derived from the templates of several model families."""

from __future__ import annotations

import pytest

from conure.engine.text.byte_tokenizer import CHAT_TEMPLATE
from conure.server.prompts.chat_template import ChatTemplate
from conure.server.prompts.tool_format import ToolFormat, find_tool_format

HERMES = """{%- if tools %}{{- 'tools: ' }}{%- for t in tools %}{{- t | tojson }}{%- endfor %}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role }}
{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}"""
LLAMA = """{%- for t in tools or [] %}{{- t | tojson(indent=4) }}{%- endfor %}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '}' }}
{%- else %}{{- m.content }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}"""
LISTED = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}{{- ', ' if not loop.first }}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}' }}
{%- endfor %}{{- ']' }}
{%- else %}{{- m.content }}{%- endif %}{{- '</s>' }}
{%- endfor %}"""
WHOLE = """{%- for t in tools %}{{- '<|tool|>' + t.function | tojson }}{%- endfor %}
{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<|call|>' + c.function | tojson + '<|/call|>' }}{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}"""
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
XML = """{%- for t in tools or [] %}{{- t.function.name }}{%- endfor %}
{%- for m in messages %}{{- m.role + ': ' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<function=' + c.function.name + '>' }}
{%- for k, v in c.function.arguments.items() %}{{- '<' + k + '>' + v | string }}{%- endfor %}
{%- endfor %}{{- '\\n' }}
{%- endfor %}"""
DOUBLE = LLAMA.replace("arguments | tojson }}", "arguments | tojson | tojson }}")


def found(source: str) -> ToolFormat | None:
    return find_tool_format(ChatTemplate(source, {}))


@pytest.mark.parametrize("source", [HERMES, CHAT_TEMPLATE])
def test_format_of_tagged_calls(source: str) -> None:
    form = found(source)
    assert form is not None
    assert form.marker == "<tool_call>"
    text = form.render_calls([("f", {"a": "ü"}), ("g", {"b": [1, 2]})])
    assert text.strip() == (
        '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"b": [1, 2]}}\n</tool_call>'
    )


def test_format_of_a_single_bare_call() -> None:
    form = found(LLAMA)
    assert form is not None
    assert (form.marker, form.separator) == ("", None)
    assert form.render_calls([("f", {"a": 1})]) == '{"name": "f", "parameters": {"a": 1}}'


def test_format_of_a_call_list() -> None:
    form = found(LISTED)
    assert form is not None
    assert form.marker == "[TOOL_CALLS]"
    calls = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'
    assert form.render_calls([("f", {}), ("g", {})]) == calls


def test_format_of_calls_rendered_as_one_value() -> None:
    form = found(WHOLE)
    assert form is not None
    assert form.marker == "<|call|>"
    calls = '<|call|>{"name": "f", "arguments": {"a": 1}}<|/call|>'
    assert form.render_calls([("f", {"a": 1})]) == calls
    assert form.render_calls([("f", {"a": 1}), ("f", {"a": 1})]) == calls * 2


@pytest.mark.parametrize("source", [PLAIN, XML, DOUBLE, "", "{{ raise_exception('no') }}"])
def test_template_without_json_tools_has_no_format(source: str) -> None:
    assert found(source) is None
