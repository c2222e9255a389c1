"""Text for terminals: the live view of a program."""

from __future__ import annotations

import io

import pytest

from conure.cli.terminal import LiveProgress, PrintedFailures, describe, table
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


ATTACK = "a\x1b[2J\x9b2J\nb"


def test_a_table_has_one_line_per_row_and_no_control_characters() -> None:
    _, row = table(("PROGRAM", "NAME"), [("p_1", ATTACK)]).splitlines()
    assert row == r"p_1      a\x1b[2J\x9b2J\nb"


def test_the_view_has_no_control_characters_of_texts(view: LiveProgress) -> None:
    view.show(Event(None, "node.delta", {"node": "letter", "text": ATTACK, "offset": 0}))
    assert r"a\x1b[2J\x9b2J b" in shown(view, 80)


def test_lines_about_events_have_no_control_characters() -> None:
    yielded = Event(1, "yield", {"final": True, "value": ATTACK})
    failed = Event(2, "node.failed", {"node": "n", "code": "expr.value", "message": ATTACK})
    for event in (yielded, failed):
        line = describe(event, "http://127.0.0.1:8400", PrintedFailures())
        assert line is not None
        assert line.isprintable()
