"""Estimated sizes of patterns, compared with RE2's programs, and what compiling costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conure.server.program.errors import ExpressionError, ProgramError
from conure.server.program.expressions import regex
from conure.server.program.expressions.budget import WorkBudget
from conure.server.program.expressions.evaluate import FUEL, check, evaluate
from conure.server.program.expressions.regex import (
    CACHE,
    MAX_STATES,
    PatternsTakeLongError,
    RegexError,
    checking,
    compile_regex,
)
from conure.server.program.expressions.regex_size import num_states
from conure.server.program.expressions.value_schema import check_schema

LARGE = r"\w{20}"
"""27,000 states."""


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The patterns that are compiled, twice each: with classes of Unicode and of ASCII."""
    patterns: list[str] = []
    compile_text = regex._compile

    def counted(re2: Any, text: str, pattern: str) -> Any:
        patterns.append(pattern)
        return compile_text(re2, text, pattern)

    monkeypatch.setattr(regex, "_compile", counted)
    CACHE.clear()
    yield patterns
    CACHE.clear()


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        *((r"Answer: (\w+)", 1.1), (r"\w{50}", 1.1), (r"(\w{10}){5}", 1.1), (r"\W{50}", 1.1)),
        *((r"\d{300}", 1.1), (r"\D{300}", 1.1), (r"\s{200}x", 1.3), (r"\S{100}", 1.3)),
        *((r"[\w.+-]+@[\w-]+\.[\w.]+", 1.1), (r"\w{1,40}", 1.1), (r"[\d\w\s]{50}", 1.1)),
        *((r"(?:\d{1,3}\.){3}\d{1,3}", 1.1), (r"(?:a|\w){50}", 1.1), (".{500}", 1.3)),
        *(("a{1000}", 2.1), ("(a{30}){30}", 2.1), ("[^a]{300}", 1.5), ("(?:[ab]?){300}c", 7.1)),
        *((r"[\u0100-\uffff]{200}", 3), ("x" * 4_000, 1.1), ("$" * 100, 1.1), ("é" * 2_000, 1.6)),
    ],
)
def test_an_estimate_is_close_to_the_size_and_not_below(pattern: str, most: float) -> None:
    size = compile_regex(pattern)._regex.programsize
    assert size <= num_states(pattern) + 5 <= most * size + 10


def test_a_pattern_whose_case_is_ignored_counts_more() -> None:
    assert num_states("k" * 1_000, ignores_case=True) == 3_000
    assert compile_regex("(?i)" + "k" * 1_000).size > 3_000


def test_a_pattern_beyond_the_bound_is_refused_uncompiled(compiled: list[str]) -> None:
    with pytest.raises(
        RegexError, match=r"about 133,768 states.* 100,000 .*write `\[A-Za-z0-9_\]`"
    ):
        compile_regex(r"\w{99}abc")
    assert compiled == []
    assert compile_regex(r"\w{70}").size < MAX_STATES


def test_a_computed_pattern_is_paid_for_before_it_is_compiled(compiled: list[str]) -> None:
    items = {"range": [60]}
    found = {"find": ["a", {"concat": [LARGE, {"var": "i"}]}]}
    with pytest.raises(ExpressionError) as caught:
        evaluate({"each": [items, "i", found]}, {})
    assert caught.value.code == "expr.fuel"
    assert len(set(compiled)) == FUEL // 27_000


def test_a_computed_pattern_is_paid_for_once() -> None:
    budget = WorkBudget()
    before = budget.left
    found = {"find": ["a", {"concat": [LARGE, ""]}]}
    evaluate({"each": [{"range": [60]}, "i", found]}, {}, budget=budget)
    assert 27_000 <= before - budget.left < 35_000


def test_a_pattern_of_the_program_is_compiled_again_in_no_trial(compiled: list[str]) -> None:
    expression = {"find": ["a", LARGE]}
    check(expression, "e")
    CACHE.clear()
    compiled.clear()
    with pytest.raises(ExpressionError):
        evaluate(expression, {}, budget=WorkBudget(2_000, is_trial=True))
    assert compiled == []
    assert evaluate(expression, {}, fuel=2_000) is None


def test_the_patterns_of_a_submission_have_a_bound(compiled: list[str]) -> None:
    finds = [{"find": ["", f"{LARGE}{number}"]} for number in range(100)]
    with checking(), pytest.raises(ProgramError, match="patterns of one submission") as caught:
        check(finds, "e")
    assert (caught.value.code, caught.value.path) == ("program.expression", "e[18].find[1]")
    with checking(), pytest.raises(ProgramError, match="patterns of one submission"):
        check_schema({"allOf": [{"pattern": f"{LARGE}x{number}"} for number in range(100)]}, "s")
    compiled.clear()
    with checking():
        check([{"find": ["", f"{LARGE}!"]}] * 500, "e")
    assert len(compiled) == 2


def test_a_trial_ends_before_it_compiles_too_much(compiled: list[str]) -> None:
    with checking(5_000, is_trial=True):
        check({"find": ["", r"\w+"]}, "e")
        compiled.clear()
        with pytest.raises(PatternsTakeLongError):
            check({"find": ["", LARGE]}, "e")
    assert compiled == []
