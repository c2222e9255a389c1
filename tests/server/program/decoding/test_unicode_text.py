"""Texts that are Unicode, and texts without control characters."""

from __future__ import annotations

from conure.server.program.decoding.unicode_text import escape_controls, is_unicode


def test_half_of_a_surrogate_pair_is_not_unicode() -> None:
    assert is_unicode("tea \N{TEACUP WITHOUT HANDLE}")
    assert not is_unicode("tea \udcff")


def test_control_characters_become_escapes() -> None:
    assert escape_controls("a\x1b[31m\n\t\x7f\x9b") == r"a\x1b[31m\n\t\x7f\x9b"


def test_other_characters_stay() -> None:
    text = "Grüße \\ 中 \N{MAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER}"
    assert escape_controls(text) == text
