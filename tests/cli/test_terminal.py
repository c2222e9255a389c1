"""Text for terminals: the live view of a program."""

from __future__ import annotations

import io
from typing import Any

import pytest

from conure.cli.terminal import LiveProgress, PrintedFailures
from conure.server.program.status import Event

rich_console = pytest.importorskip("rich.console")


class Screen:
    """Keeps what the live view shows."""

    def __init__(self) -> None:
        self.shown: Any = None

    def update(self, shown: Any) -> None:
        self.shown = shown

    def text(self, width: int) -> str:
        printed = io.StringIO()
        rich_console.Console(file=printed, width=width).print(self.shown)
        return printed.getvalue()


def test_a_narrow_terminal_shortens_the_texts_only() -> None:
    screen = Screen()
    view = LiveProgress("http://127.0.0.1:8400", PrintedFailures(), screen)
    text = "Dear Tessa Brook, please come to Kolvar as soon as you can."
    view.show(Event(None, "node.delta", {"node": "letter", "text": text, "offset": 0}))
    view.show(Event(2, "node.finished", {"node": "letter"}))
    (line,) = screen.text(40).splitlines()
    assert line.split()[:4] == ["letter", "finished", "Dear", "Tessa"]
    assert text in screen.text(120)
