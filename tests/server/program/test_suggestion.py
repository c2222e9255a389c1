"""Suggestions for unknown names."""

from __future__ import annotations

from conure.server.program.suggestion import suggestion


def test_the_most_similar_name_is_suggested() -> None:
    assert suggestion("temprature", ["top_p", "temperature"]) == "did you mean `temperature`?"


def test_without_a_similar_name_the_other_text_is_returned() -> None:
    assert suggestion("x", ["temperature"], "remove it") == "remove it"
    assert suggestion("temprature", ["temperature"], similarity=0.99) == ""
