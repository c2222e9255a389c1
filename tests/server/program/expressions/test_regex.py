"""`find` matches as Python's `re` does, in linear time."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from conure.server.program.errors import ExpressionError
from conure.server.program.expressions.evaluate import check, evaluate
from conure.server.program.expressions.regex import CACHE, RegexError, compile_regex

from ....cpu_time import least_cpu_s

ATOMS = ["a", "b", "c", ".", "[ab]", "[^a]", r"[\d_-]", r"\w", r"\d", r"\s", r"\n", "x"]
ANCHORS = ["^", "$", r"\b", r"\B", r"\A", r"\Z"]
COUNTS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{1,}?"]


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    # A repeated part always reads a character: engines differ in empty rounds of a loop.
    reading = st.tuples(st.sampled_from(ATOMS), inner).map("".join)
    return st.tuples(reading, st.sampled_from(COUNTS)).map(lambda t: f"(?:{t[0]}){t[1]}")


PATTERNS = st.recursive(
    st.sampled_from([*ATOMS, *ANCHORS]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda t: f"(?:{t[0]}|{t[1]})"),
        inner.map(lambda t: f"({t})"),
        repeated(inner),
    ),
    max_leaves=6,
)


def found_by_re(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return None if match is None else match[1 if match.re.groups else 0]


@given(
    st.sampled_from(["", "(?i)", "(?m)", "(?s)"]), PATTERNS, st.text("abcABx1_- \n", max_size=12)
)
@example("", r"(a|ab)(c|bcd)", "abcd")
@example("", r"a(b)?", "a")
@example("", r"(b$)", "ab\n")
@example("", r"a\s$", "a\n")
@example("(?m)", r"^b$", "a\nb\n")
def test_find_matches_like_re(flags: str, pattern: str, text: str) -> None:
    # Until 3.14, Python's `\\B` did not match in an empty text.
    assume(text or r"\B" not in pattern)
    # RE2 has no look-ahead: a `$` before the final newline consumes it.
    assume(not re.search(r"\$\W*[^\W)|]", pattern) or not text.endswith("\n"))
    assert compile_regex(flags + pattern).find(text) == found_by_re(flags + pattern, text)


IN_CLASSES = ["[", "^", "[^", "(", "(?:", "{,2}", ":", "$", "a-c", "-", "x", r"\]", r"\\", r"\d"]
CLASSES = st.builds(
    "[{}{}{}]".format,
    st.sampled_from(["", "^"]),
    st.sampled_from(["", "]"]),
    st.lists(st.sampled_from(IN_CLASSES), min_size=1, max_size=4).map("".join),
)


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # of `re`: "[[" may get a meaning
@given(CLASSES, CLASSES, st.text("[]^({,2})-:$\\abx1", max_size=12))
@example("[[]", "[]]", "[42]")
@example("[a[]", "[[]", "[x")
def test_classes_match_like_those_of_re(first: str, second: str, text: str) -> None:
    pattern = rf"{first}(\w*){second}"
    try:
        expected = found_by_re(pattern, text)
    except re.error:
        assume(False)
    assert compile_regex(pattern).find(text) == expected


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"Answer: (\w+)", "Thought: x\nAnswer: Paris.", "Paris"),
        (r"Answer: (\w+)", "Answer: 巴黎 Paris", "巴黎"),
        (r"Answer: (.*)$", "Answer: Paris\n", "Paris"),
        (r"(?s)```json(.*?)```", "a ```json\n{}\n``` b ```json```", "\n{}\n"),
        (r"(?P<year>\d{4})-\d\d", "on 2024-05-06", "2024"),
        (r"[\]a-c\-]+", "xx]a-b", "]a-b"),
        (r"[[:]+", "a[:]", "[:"),
        (r"\u00e9\x41", "éA", "éA"),
        (r"\é+[^\x00-\x7f]", "aéé🦜", "éé🦜"),
        (r"(?i)größe", "GRÖßE", "GRÖßE"),
        (r"[\s\S]+x", "a\u2003\nx", "a\u2003\nx"),
        (r"a{", "a{", "a{"),
    ],
)
def test_common_patterns_match(pattern: str, text: str, found: str) -> None:
    assert compile_regex(pattern).find(text) == found


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "(?!a)", "(?<=a)b", r"(a)\1", "(?P=x)", "(?x) a", "a++", "a**", "*a"),
        *("(a", "a)", "[a", "[b-a]", r"\q", r"\C", r"\Qa\E", r"\x4", r"\u00_1", "\\", "\ud800"),
        *("a{3,2}", "a{2000}", "((a{200}){200}){200}", "a" * 5_000, "(?U)a+", "(?i:a)"),
        "(?:(?:(?:){1000}){1000}){1000}",
    ],
)
def test_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        compile_regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+$", "a" * 5_000 + "b"),
        ("(a|aa)+$", "a" * 5_000 + "b"),
        ("(.*)(.*)(.*)(.*)(.*)x", "a" * 5_000),
        ("^never", "a" * 1_000_000),
        ("needle", "a" * 1_000_000),
        ("(?:[ab]?){300}c", "ab" * 2_500),
    ],
)
def test_find_takes_linear_time(pattern: str, text: str) -> None:
    def find() -> str | None:
        CACHE.clear()  # A pattern keeps the states that a search has reached.
        return compile_regex(pattern).find(text)

    assert find() is None
    # At most 25 ms where measured; a backtracking engine takes minutes.
    assert least_cpu_s(find) < 2
    assert compile_regex(pattern).cost(text) <= 4 * len(text)


def test_without_re2_find_is_left_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    CACHE.clear()
    expression = {"find": ["a", "a"]}
    check(expression, "e")
    with pytest.raises(ExpressionError, match="google-re2") as caught:
        evaluate(expression, {})
    assert caught.value.code == "expr.regex"
