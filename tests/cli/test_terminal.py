"""Text for terminals: the live view of a program."""

from __future__ import annotations

import io

import pytest

from conure.cli.terminal import LiveProgress, PrintedFailures
from conure.server.program.status import Event

rich_console = pytest.importorskip("rich.console")
rich_table = pytest.importorskip("rich.table")


@pytest.fixture
def view() -> LiveProgress:
    return LiveProgress("http://127.0.0.1:8400", PrintedFailures(), rich_console.Console())


def shown(view: LiveProgress, width: int) -> str:
    printed = io.StringIO()
    rich_console.Console(file=printed, width=width).print(view)
    return printed.getvalue()


def test_the_view_is_empty_before_the_first_event(view: LiveProgress) -> None:
    assert shown(view, 40).strip() == ""


def test_an_event_is_not_rendered_at_once(
    view: LiveProgress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rich_table, "Table", None)
    view.show(Event(1, "node.finished", {"node": "letter"}))


def test_a_narrow_terminal_shortens_the_texts_only(view: LiveProgress) -> None:
    text = "Dear Tessa Brook, please come to Kolvar as soon as you can."
    view.show(Event(None, "node.delta", {"node": "letter", "text": text, "offset": 0}))
    view.show(Event(2, "node.finished", {"node": "letter"}))
    (line,) = shown(view, 40).splitlines()
    assert line.split()[:4] == ["letter", "finished", "Dear", "Tessa"]
    assert text in shown(view, 120)
