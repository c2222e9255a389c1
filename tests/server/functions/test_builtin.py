"""The functions that every server has, with hostile arguments."""

from __future__ import annotations

from typing import Any

import pytest

from conure.server.functions.builtin import BUILTIN
from conure.server.functions.registry import FunctionRegistry
from conure.server.program.errors import ConureError


@pytest.fixture(scope="module")
def registry() -> FunctionRegistry:
    registry = FunctionRegistry()
    registry.add_all(BUILTIN)
    return registry


def call(registry: FunctionRegistry, name: str, **arguments: Any) -> Any:
    registry.check_call(name, arguments)
    function = registry[name]
    return function.run(**function.check_arguments(arguments))


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("json.parse", {"text": 'Here:\n```json\n{"a": [1]}\n```'}, {"a": [1]}),
        ("regex.extract", {"text": "Score: 7", "pattern": r"Score: (\d)"}, "7"),
        ("regex.extract", {"text": "none", "pattern": "x"}, None),
        ("regex.extract", {"text": "a1b2", "pattern": r"\d", "all": True}, ["1", "2"]),
        ("text.template", {"template": "{{a}}-{{b}} {{{{c}}", "values": {"a": 1, "b": "x"}},
         "1-x {{c}}"),
        ("text.template", {"template": "{{a}}", "values": {"a": "{{b}}", "b": 1}}, "{{b}}"),
        ("calc", {"expression": " 2 * (3 + 4) ** 2 - sqrt(16) "}, 94.0),
        ("calc", {"expression": "7 // 2 + 7 % 4 - -1"}, 7),
        ("calc", {"expression": "max(1, 2.5) + round(pi, 2)"}, 5.640000000000001),
        ("calc", {"expression": "2 ** -1"}, 0.5),
        ("calc", {"expression": "1 ** 200 + (-1) ** 129 + 0 ** 129"}, 0),
        ("calc", {"expression": "round(1250, -2) + round(2.5)"}, 1202),
        ("vote", {"items": ["A", "b", "B.", None, "c"]},
         {"value": "b", "count": 2, "total": 4, "share": 0.5}),
        ("vote", {"items": ["No", "(yes)", "Yes?", "\u00a0yes\u2026", "no"]},
         {"value": "(yes)", "count": 3, "total": 5, "share": 0.6}),
        ("vote", {"items": ["-5", "5", "5", "50%", "C#", "C"]},
         {"value": "5", "count": 2, "total": 6, "share": 1 / 3}),
        ("vote", {"items": ["?", "!", "!"]},
         {"value": "!", "count": 2, "total": 3, "share": 2 / 3}),
        ("vote", {"items": ["+", "-", "-"]},
         {"value": "-", "count": 2, "total": 3, "share": 2 / 3}),
        ("vote", {"items": ["x", "y"]}, {"value": "x", "count": 1, "total": 2, "share": 0.5}),
        ("list.unique", {"items": [1, True, 1, {"a": 1}, {"a": 1}]}, [1, True, {"a": 1}]),
        ("list.unique", {"items": [1, 2, 1, 1.0, 3, 2]}, [1, 2, 1.0, 3]),
        ("list.sort", {"items": [3, 1.5, 2]}, [1.5, 2, 3]),
        ("list.sort", {"items": [{"n": 1}, {"n": 2}], "by": "n", "descending": True},
         [{"n": 2}, {"n": 1}]),
        ("list.flatten", {"items": [[1], 2, [[3]]]}, [1, 2, [3]]),
        ("list.chunk", {"items": [1, 2, 3], "size": 2}, [[1, 2], [3]]),
        ("list.zip", {"left": [1, 2], "right": ["a", "b"]}, [[1, "a"], [2, "b"]]),
        ("list.reverse", {"items": [1, 2]}, [2, 1]),
        ("list.sum", {"items": [1, 2.5]}, 3.5),
    ],
)  # fmt: skip
def test_functions_compute(
    registry: FunctionRegistry, name: str, arguments: dict[str, Any], result: Any
) -> None:
    assert call(registry, name, **arguments) == result


@pytest.mark.parametrize(
    ("name", "arguments", "code"),
    [
        ("json.parse", {"text": "no"}, "expr.json"),
        ("json.parse", {"text": "[" * 100_000}, "expr.json"),
        ("json.parse", {}, "call.argument"),
        ("json.parse", {"text": 3}, "call.argument"),
        ("json.parse", {"text": "1", "strict": True}, "call.argument"),
        ("regex.extract", {"text": "a", "pattern": "(?=a)"}, "expr.regex"),
        ("regex.extract", {"text": "a" * 10**6, "pattern": "a*b|a", "all": True}, "expr.fuel"),
        ("text.template", {"template": "{{a}}", "values": {}}, "text.template"),
        ("text.template", {"template": "{{a", "values": {}}, "text.template"),
        ("text.template", {"template": "{{a}}" * 9_000, "values": {"a": "x" * 10_000}},
         "text.template"),
        ("vote", {"items": [None]}, "vote.empty"),
        ("list.sort", {"items": [1, "a"]}, "list.sort"),
        ("list.sort", {"items": [[1], [2]]}, "list.sort"),
        ("list.sort", {"items": [{"a": 1}], "by": "b"}, "list.sort"),
        ("list.sum", {"items": [True]}, "list.sum"),
        ("list.sum", {"items": [1e308, 1e308]}, "list.sum"),
        ("list.sum", {"items": [2**63, 2**63]}, "list.sum"),
        ("list.chunk", {"items": [1], "size": 0}, "list.chunk"),
        ("list.zip", {"left": [1], "right": []}, "list.zip"),
        ("unknown", {}, "call.unknown_function"),
    ],
)  # fmt: skip
def test_functions_refuse_what_they_cannot_do(
    registry: FunctionRegistry, name: str, arguments: dict[str, Any], code: str
) -> None:
    with pytest.raises(ConureError) as caught:
        call(registry, name, **arguments)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "10**30",
        "(-8) ** 0.5",
        "1/0",
        "1e308 * 10",
        "'a' * 9",
        "[1] * 3",
        "True",
        "__import__('os').system('true')",
        "pi.__class__",
        "(lambda: 1)()",
        "sqrt(x := 4)",
        "abs(*[1])",
        "max(1)",
        "exp(1000)",
        "log(0)",
        "round(1.5, 10**30)",
        "round(1, -100000000)",
        "round(1, 2.0)",
        "~" * 900 + "1",
        "a" + ".b" * 450,
        "2 << 9",
        "(" * 300 + "1" + ")" * 300,
        "-" * 900 + "1",
        "1" * 1_001,
        "9" * 900,
        "import os",
        "",
        "\x00",
        "1 if 1 else 2",
        "f'{1}'",
        "1;2",
        "1\n2",
        "1j",
    ],
)
def test_calc_accepts_only_bounded_arithmetic(registry: FunctionRegistry, expression: str) -> None:
    with pytest.raises(ConureError) as caught:
        call(registry, "calc", expression=expression)
    assert caught.value.code == "calc.invalid"
