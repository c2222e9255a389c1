"""Features that templates may use, and limits that stop hostile templates."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from conure.server.program.errors import PromptError
from conure.server.prompts.template_sandbox import TemplateSandbox

NOW = datetime(2026, 2, 28, 13, 45)


def render(source: str, **variables: Any) -> str:
    return TemplateSandbox(source).render(variables, strftime=NOW.strftime)


def test_loop_controls_are_supported() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert render(source) == "023"


def test_generation_block_only_scopes_names() -> None:
    source = "{% generation %}{% set x = 1 %}{{ a }}{{ x }}{% endgeneration %}{{ x is defined }}"
    assert render(source, a="b") == "b1False"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ v | tojson }}", v={"a": "<ä>'\""}) == '{"a": "<ä>\'\\""}'
    assert render("{{ v | tojson(indent=1) }}", v=[1]) == "[\n 1\n]"


def test_date_is_passed_by_the_caller() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "28 Feb 2026"


def test_template_can_raise_its_own_message() -> None:
    with pytest.raises(PromptError, match="No system role") as refused:
        render("{{ raise_exception('No system role') }}")
    assert refused.value.code == "prompt.template"


def test_macros_namespaces_and_nested_loops_run() -> None:
    source = (
        "{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{% set ns = namespace(n=0) %}"
        "{% for a in x %}{% for b in a %}{% set ns.n = ns.n + b %}{% endfor %}{% endfor %}"
        "{{ ns.n }}:{{ f(3) }}:end"
    )
    assert render(source, x=[[1, 2], [3]]) == "6:321:end"


def test_proportionate_operators_are_allowed() -> None:
    assert render("{{ 2 ** 10 }} {{ 'ab' * 2 }} {{ 3 * [0] }} {{ '%03d' % 7 }} {{ 7 % 4 }}") == (
        "1024 abab [0, 0, 0] 007 3"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for a in [[[[]]]] * 2000 recursive %}{{ loop(m * 2000) }}{% endfor %}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [0] }}",
        "{{ 9 ** 99 ** 99 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
        "{{ lipsum(1) }}",
        "{{ m.__class__.__mro__ }}{{ m.__class__.__mro__[1].__subclasses__() }}",
        "{{ m.append(1) }}",
        "{{ m[0] + 1 }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
    ],
)
def test_template_beyond_limits_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conure.server.prompts.template_sandbox.MAX_STEPS", 50_000)
    with pytest.raises(PromptError) as refused:
        render(source, m=["a"])
    assert refused.value.code == "prompt.template"


def test_template_beyond_cpu_limit_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("conure.server.prompts.template_sandbox.MAX_CPU_S", 0.0)
    with pytest.raises(PromptError, match="too long"):
        render("{% for a in range(99999) %}{{ 'a' * 99 }}{% endfor %}")


@pytest.mark.parametrize("source", ["{% for %}", "{{", "{% generation %}", "{{ x | nothing }}"])
def test_invalid_template_is_rejected(source: str) -> None:
    with pytest.raises(PromptError) as refused:
        TemplateSandbox(source)
    assert refused.value.code == "prompt.template"
