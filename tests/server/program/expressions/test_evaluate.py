"""Expressions: every operator, every check, and the bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.server.program.errors import ConureError, ExpressionError, ProgramError
from conure.server.program.expressions.evaluate import check, evaluate, input_expression, variables

SCOPE = {"s": "Hello", "n": 3, "l": ["a", 1, None], "o": {"k": [1, {"x": None}], "é": 0.5}}


def v(name: str) -> dict[str, str]:
    return {"var": name}


VALUES: list[tuple[Any, Any]] = [
    (1, 1),
    ("text", "text"),
    ([1, v("n")], [1, 3]),
    (v("s"), "Hello"),
    ({"lit": {"var": "s"}}, {"var": "s"}),
    ({"object": {"a": v("n"), "b": "t"}}, {"a": 3, "b": "t"}),
    ({"get": [v("o"), "k", 1, "x"]}, None),
    ({"get": [v("l"), 0]}, "a"),
    ({"get": [v("l"), -2]}, 1),
    ({"get": [v("l"), -4]}, None),
    ({"get": [v("l"), 9]}, None),
    ({"get": ["abc", 1]}, "b"),
    ({"get": ["abc", -1]}, "c"),
    ({"get": ["abc", 3]}, None),
    ({"get": [v("o"), "nope", "more"]}, None),
    ({"concat": [v("l"), [2]]}, ["a", 1, None, 2]),
    ({"concat": ["x", v("n"), None, v("o")]}, 'x3null{"k":[1,{"x":null}],"é":0.5}'),
    ({"join": [v("l"), "-"]}, "a-1-null"),
    ({"split": ["a,b,,c", ","]}, ["a", "b", "", "c"]),
    ({"strip": " x\n"}, "x"),
    ({"lower": [v("s")]}, "hello"),
    ({"slice": [v("s"), 1, -1]}, "ell"),
    ({"slice": [v("l"), 1]}, [1, None]),
    ({"slice": [v("l"), None, 1]}, ["a"]),
    ({"len": v("s")}, 5),
    ({"len": [v("o")]}, 2),
    ({"find": ["born 1912 in", r"(\d+)"]}, "1912"),
    ({"find": ["abc", "x"]}, None),
    ({"find": ["ac", "a(b)?c"]}, None),
    ({"find_all": ["a1 b22", r"\d+"]}, ["1", "22"]),
    ({"find_all": ["aX bX c", r"(\w)X"]}, ["a", "b"]),
    ({"find_all": ["x", "y"]}, []),
    ({"find_all": ["ab", "(b)|a"]}, [None, "b"]),
    ({"mul": [3, 1.5]}, 4.5),
    ({"idiv": [-7, 2]}, -4),
    ({"mod": [-7, 3]}, 2),
    ({"if": [True, 1, {"fail": "unreached"}]}, 1),
    ({"parse_json": ' {"a": [1]} '}, {"a": [1]}),
    ({"parse_json": 'Sure:\n```json\n{"a": 1}\n```\nDone.'}, {"a": 1}),
    ({"each": [v("l"), "x", [v("x")]]}, [["a"], [1], [None]]),
    ({"each": [["p", "q"], "x", "i", {"concat": [v("x"), v("i")]}]}, ["p0", "q1"]),
    ({"each": [[1, 2], "x", {"each": [[10], "y", {"add": [v("x"), v("y")]}]}]}, [[11], [12]]),
    ({"range": 3}, [0, 1, 2]),
    ({"range": [5, 0, -2]}, [5, 3, 1]),
    ({"range": [3, 3]}, []),
    ({"if": [{"lt": [1, 2]}, "yes", v("absent")]}, "yes"),
    ({"first": [v("absent"), None, {"get": [v("absent"), "x"]}, 7]}, 7),
    ({"first": [v("absent")]}, None),
    ({"and": [1, "x", 0, v("absent")]}, 0),
    ({"or": [0, "", "x", v("absent")]}, "x"),
    ({"not": v("l")}, False),
    ({"eq": [True, 1]}, False),
    ({"eq": [1, 1.0]}, True),
    ({"eq": [{"lit": {"a": 1, "b": [2]}}, {"lit": {"b": [2], "a": 1.0}}]}, True),
    ({"ne": [[1], [True]]}, True),
    ({"lt": ["a", "b"]}, True),
    ({"gt": [1, 2.5]}, False),
    ({"contains": [v("s"), "ell"]}, True),
    ({"contains": [v("l"), None]}, True),
    ({"contains": [[0], False]}, False),
    ({"contains": [v("o"), "k"]}, True),
    ({"add": [1, 2]}, 3),
    ({"sub": [1, 2.5]}, -1.5),
    ({"div": [7, 2]}, 3.5),
    ({"pyrepr": {"lit": {"a": [True, None, "it's"]}}}, "{'a': [True, None, \"it's\"]}"),
    ({"pyrepr": "x"}, "x"),
    ({"json": [v("s")]}, '"Hello"'),
    ({"json": v("l")}, '["a",1,null]'),
]


@pytest.mark.parametrize(("expression", "value"), VALUES, ids=lambda x: json.dumps(x)[:60])
def test_expressions_have_values(expression: Any, value: Any) -> None:
    check(expression, "e")
    found = evaluate(expression, SCOPE)
    assert (found, type(found)) == (value, type(value))


FAILURES: list[tuple[Any, str]] = [
    (v("absent"), "variable.absent"),
    ({"and": [1, v("absent")]}, "variable.absent"),
    ({"get": [v("s"), "k"]}, "expr.type"),
    ({"get": [v("l"), True]}, "expr.type"),
    ({"concat": ["a", v("l")]}, "expr.type"),
    ({"join": ["abc", ""]}, "expr.type"),
    ({"split": ["a", ""]}, "expr.value"),
    ({"lower": 1}, "expr.type"),
    ({"slice": [1, 2]}, "expr.type"),
    ({"len": 3}, "expr.type"),
    ({"find": ["a", {"concat": ["(?", "=a)"]}]}, "expr.regex"),
    ({"parse_json": "{a"}, "expr.json"),
    ({"parse_json": "[" * 100 + "]" * 100}, "expr.json"),
    ({"parse_json": "9" * 30}, "expr.json"),
    ({"parse_json": v("n")}, "expr.type"),
    ({"each": ["abc", "x", 1]}, "expr.type"),
    ({"range": [0, 5, 0]}, "expr.value"),
    ({"range": 10**15}, "expr.fuel"),
    ({"lt": [1, "a"]}, "expr.type"),
    ({"add": [True, 1]}, "expr.type"),
    ({"add": ["a", 1]}, "expr.type"),
    ({"add": [2**64 - 1, 1]}, "expr.number"),
    ({"sub": [-1.7e308, 1.7e308]}, "expr.number"),
    ({"div": [1, 0]}, "expr.value"),
    ({"contains": [5, 5]}, "expr.type"),
    ({"each": [{"range": 1000}, "i", {"each": [{"range": 1000}, "j", 1]}]}, "expr.fuel"),
]


@pytest.mark.parametrize(("expression", "code"), FAILURES, ids=lambda x: json.dumps(x)[:60])
def test_invalid_values_fail_with_a_code(expression: Any, code: str) -> None:
    check(expression, "e")
    with pytest.raises(ExpressionError) as caught:
        evaluate(expression, SCOPE)
    assert caught.value.code == code


def test_the_size_of_a_value_is_limited() -> None:
    long = "x" * 1_000_000
    with pytest.raises(ExpressionError) as caught:
        evaluate({"concat": [v("x")] * 17}, {"x": long})
    assert caught.value.code == "expr.size"


def rounds_until_refused(expression: Any, value: Any) -> int:
    """How often an expression of `x` can be fed its own value."""
    for rounds in range(100):
        try:
            value = evaluate(expression, {"x": value})
        except ExpressionError as error:
            return rounds if error.code == "expr.size" else -1
    return -1


def test_shared_parts_of_a_list_count_repeatedly() -> None:
    assert 5 < rounds_until_refused([v("x"), v("x"), v("x")], ["ha"] * 10) < 15


def test_a_search_costs_fuel() -> None:
    search = {"find": [v("x"), "(a|b|ab)+c"]}
    text = "ab" * 10_000 + "c"
    assert evaluate(search, {"x": text}) == "b"
    with pytest.raises(ExpressionError) as caught:
        evaluate(search, {"x": text}, fuel=100)
    assert caught.value.code == "expr.fuel"


def test_the_depth_of_a_value_is_limited() -> None:
    assert rounds_until_refused([v("x")], []) == 63


REFUSALS: list[tuple[Any, str, str]] = [
    ({"zzz": 1}, "e.zzz", "unknown operator `zzz`; the operators are: add, and, concat"),
    ({"lenght": "x"}, "e.lenght", "unknown operator `lenght`; did you mean `len`?"),
    ({"a": 1, "b": 2}, "e", "exactly one operator"),
    ({}, "e", "exactly one operator"),
    (
        {"join": [[1, {"get": [1]}], ""]},
        "e.join[0][1].get",
        "takes 2 or more operands in a list, got 1",
    ),
    ({"object": {"k": {"var": 3}}}, "e.object.k.var", "name of a variable"),
    ({"object": [1]}, "e.object", "object of expressions"),
    ({"if": [1, 2]}, "e.if", "takes 3 operands in a list, got 2"),
    ({"slice": [1, 2, 3, 4]}, "e.slice", "takes 2 to 3 operands"),
    ({"concat": {"var": "x"}}, "e.concat", "got a value that is not a list"),
    ({"each": [[1], 2, 3]}, "e.each", "[list, name, expression]"),
    ({"each": [[1], "x", {"nope": 1}]}, "e.each[2].nope", "unknown operator"),
    ({"not": {"lower": []}}, "e.not.lower", "takes 1 operands in a list, got 0"),
    ({"find": ["x", "(?=a)"]}, "e.find[1]", "look-around"),
    (
        {"object": {"a": {"partial": "x"}}},
        "e.object.a.partial",
        "needs a `yield` with `mode: partial`",
    ),
    ({"final": "x"}, "e.final", "needs a `yield` with `mode: partial`"),
]


@pytest.mark.parametrize(("expression", "path", "words"), REFUSALS)
def test_malformed_expressions_are_refused_with_path(
    expression: Any, path: str, words: str
) -> None:
    with pytest.raises(ProgramError) as caught:
        check(expression, "e")
    assert (caught.value.code, caught.value.path) == ("program.expression", path)
    assert words in caught.value.message


def test_deeply_nested_expressions_are_refused() -> None:
    deep: Any = 1
    for _ in range(200):
        deep = {"not": [deep]}
    with pytest.raises(ProgramError):
        check(deep, "e")
    with pytest.raises(ExpressionError):
        evaluate(deep, {})


def test_variables_returns_free_names() -> None:
    expression = {
        "each": [
            {"concat": [v("a"), v("x")]},
            "x",
            "i",
            [v("x"), v("i"), v("b"), {"lit": v("c")}, {"object": {"d": v("e")}}],
        ]
    }
    assert variables(expression) == {"a", "x", "b", "e"}
    assert variables(v("a")) == {"a"}
    assert variables("a") == frozenset()
    assert variables(input_expression("a")) == {"a"}
    assert input_expression(["a"]) == ["a"]


OPERATORS = sorted(
    {name for expression, _ in VALUES if isinstance(expression, dict) for name in expression}
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["s", "l", "k", *OPERATORS]), inner, max_size=2)
        | st.tuples(st.sampled_from(OPERATORS), st.lists(inner, max_size=4)).map(
            lambda t: {t[0]: t[1]}
        )
        | st.sampled_from([v("s"), v("l"), v("o"), v("n"), v("absent")])
    ),
    max_leaves=15,
)


@given(JSON, st.dictionaries(st.sampled_from(["s", "l"]), JSON))
def test_any_json_raises_only_conure_errors(expression: Any, scope: dict[str, Any]) -> None:
    refusal = outcome(check, expression, "e")
    assert refusal is None or isinstance(refusal, ProgramError)
    if refusal is None:
        assert variables(expression) <= {"s", "l", "o", "n", "absent", *_names(expression)}
    failure = outcome(evaluate, expression, {**SCOPE, **scope})
    assert failure is None or isinstance(failure, ExpressionError)
    assert refusal or not failure or failure.code != "expr.malformed"


def outcome(function: Callable[..., Any], *arguments: Any) -> ConureError | None:
    """The error of the language that a call raises; any other escapes."""
    try:
        function(*arguments)
    except ConureError as error:
        return error
    return None


def _names(expression: Any) -> set[str]:
    if isinstance(expression, dict):
        found = {x for x in expression.values() if isinstance(x, str)}
        return found.union(*map(_names, expression.values()))
    return set().union(*map(_names, expression)) if isinstance(expression, list) else set()


@pytest.mark.parametrize(
    ("expression", "code"),
    [
        ({"fail": "no"}, "expr.fail"),
        ({"fail": ["no", "not_found"]}, "fail.not_found"),
        ({"fail": ["no", "Bad code"]}, "expr.value"),
        ({"fail": "x" * 5_000}, "expr.size"),
        ({"mul": ["a", 3]}, "expr.type"),
        ({"mul": [[1], 3]}, "expr.type"),
        ({"mul": [True, 3]}, "expr.type"),
        ({"mul": [2**62, 2**62]}, "expr.number"),
        ({"mul": [1e300, 1e300]}, "expr.number"),
        ({"mod": ["%s", 3]}, "expr.type"),
        ({"mod": [1, 0]}, "expr.value"),
        ({"idiv": [1, 0.0]}, "expr.value"),
        ({"find_all": ["a" * 1_000_000, "a*b|a"]}, "expr.fuel"),
    ],
)
def test_arithmetic_and_fail_raise_with_a_code(expression: Any, code: str) -> None:
    check(expression, "e")
    with pytest.raises(ExpressionError) as caught:
        evaluate(expression, {})
    assert caught.value.code == code
