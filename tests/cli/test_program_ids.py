"""Programs by the beginning of their ids, without a server."""

from __future__ import annotations

import pytest

from conure.cli.command import UsageError
from conure.cli.program_ids import prefix_of, unique_id


@pytest.mark.parametrize(
    ("word", "prefix"),
    [
        ("a", "p_a"),
        ("p_a0", "p_a0"),
        ("0" * 24, "p_" + "0" * 24),
        ("0" * 25, None),
        ("p_", None),
        ("", None),
        ("none", None),
        ("A", None),
        ("%", None),
        ("report.json", None),
    ],
)
def test_only_hexadecimal_digits_begin_an_id(word: str, prefix: str | None) -> None:
    assert prefix_of(word) == prefix


def test_a_unique_beginning_gives_the_id() -> None:
    assert unique_id("a", ["p_ab"]) == "p_ab"


def test_an_unknown_word_is_returned() -> None:
    assert unique_id("a", []) == "a"


def test_an_error_shows_a_few_of_many_ids() -> None:
    with pytest.raises(UsageError, match=r"p_a1, p_a2, p_a3, \.\.\.; give more digits") as caught:
        unique_id("a", ["p_a1", "p_a2", "p_a3", "p_a4"])
    assert "p_a4" not in str(caught.value)
