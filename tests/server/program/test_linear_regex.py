"""The linear matcher finds what Python's `re` finds, and cannot be made slow."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from conure.server.program.linear_regex import Regex, StepsError
from conure.server.program.regex_syntax import RegexError

ATOMS = ["a", "b", "c", ".", "[ab]", "[^a]", r"[\d_-]", r"\w", r"\d", r"\s", r"\n", "x"]
ANCHORS = ["^", "$", r"\b", r"\B", r"\A", r"\Z"]
COUNTS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{,2}", "{1,}?"]


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    # What is repeated here always reads: an empty round of a loop is where engines differ.
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


@given(
    st.sampled_from(["", "(?i)", "(?m)", "(?s)"]), PATTERNS, st.text("abcABx1_- \n", max_size=12)
)
@example("", r"(a|ab)(c|bcd)", "abcd")
@example("", r"a(b)?", "a")
@example("(?m)", r"^b$", "a\nb\n")
def test_it_finds_what_re_finds(flags: str, pattern: str, text: str) -> None:
    # Until 3.14, Python's `\\B` did not hold in an empty text.
    assume(text or r"\B" not in pattern)
    expected = re.search(flags + pattern, text)
    found, _ = Regex(flags + pattern).find(text, max_steps=100_000)
    if expected is None:
        assert found is None
    else:
        group = expected.group(1 if expected.re.groups else 0)
        assert found is not None
        assert found == (group, *expected.span())


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"Answer: (\w+)", "Thought: x\nAnswer: Paris.", "Paris"),
        (r"(?s)```json(.*?)```", "a ```json\n{}\n``` b ```json```", "\n{}\n"),
        (r"(?P<year>\d{4})-\d\d", "on 2024-05-06", "2024"),
        (r"[\]a-c\-]+", "xx]a-b", "]a-b"),
        (r"\u00e9\x41", "éA", "éA"),
        (r"(?i)größe", "GRÖßE", "GRÖßE"),
        (r"a{", "a{", "a{"),
    ],
)
def test_what_people_write_works(pattern: str, text: str, found: str) -> None:
    result, _ = Regex(pattern).find(text, max_steps=10_000)
    assert result is not None
    assert result.text == found


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)", "(?!a)", "(?<=a)b", r"(a)\1", "(?P=x)", "(?x) a", "a++", "a**", "^*", "*a"),
        *("(a", "a)", "[a", "[b-a]", r"[\d-z]", r"\q", r"\x4", r"\u00_1", "\\"),
        *("a{3,2}", "a{2000}", "((a{200}){200}){200}", "a" * 5_000, "(" * 50 + ")" * 50),
    ],
)
def test_what_is_malformed_too_large_or_not_linear_is_refused(pattern: str) -> None:
    with pytest.raises(RegexError):
        Regex(pattern)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(a+)+$", "a" * 5_000 + "b"),
        ("(a|aa)+$", "a" * 5_000 + "b"),
        ("(.*)(.*)(.*)(.*)(.*)x", "a" * 5_000),
        ("^never", "a" * 1_000_000),
        ("needle", "a" * 1_000_000),
        ("(?:(?:(?:){1000}){1000}){1000}", ""),
    ],
)
def test_patterns_that_backtrack_elsewhere_take_steps_linear_in_the_text(
    pattern: str, text: str
) -> None:
    _, steps = Regex(pattern).find(text, max_steps=200_000)
    assert steps <= 40 * len(text) + 10


def test_a_text_too_long_for_the_steps_is_an_error() -> None:
    with pytest.raises(StepsError):
        Regex("(a|b)+c").find("ab" * 1_000, max_steps=500)
