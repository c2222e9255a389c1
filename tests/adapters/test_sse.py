"""Event streams are read the same wherever their bytes are cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.adapters import sse
from conure.adapters.sse import Cursor, Message, Parser
from conure.server.program.errors import ConureError

TEXT = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]))
FIELD = st.tuples(st.sampled_from(["data", "event", "id", "", "retry", "other"]), TEXT)
END = st.sampled_from(["\n", "\r\n", "\r"])


def model(events: list[list[tuple[str, str]]]) -> list[Message]:
    """What the format says these fields mean."""
    messages = []
    for fields in events:
        data = [value for name, value in fields if name == "data"]
        ids = [value for name, value in fields if name == "id"]
        kinds = [value for name, value in fields if name == "event"]
        if data:
            messages.append(
                Message(ids[-1] if ids else None, ["", *kinds][-1] or "message", "\n".join(data))
            )
    return messages


def read(chunks: list[bytes]) -> list[Message]:
    parser = Parser()
    return [message for chunk in chunks for message in parser.feed(chunk)]


@given(st.lists(st.lists(FIELD, max_size=5), max_size=5), END, st.lists(st.integers(0, 400)))
def test_messages_do_not_depend_on_where_the_bytes_are_cut(
    events: list[list[tuple[str, str]]], end: str, cuts: list[int]
) -> None:
    wire = "".join(
        "".join(f"{name}: {value}{end}" for name, value in fields) + end for fields in events
    ).encode()
    # A stream that ends in a lone "\r" keeps it back until it knows what follows.
    wire += b": end\n"
    points = sorted({0, len(wire), *(min(cut, len(wire)) for cut in cuts)})
    chunks = [wire[a:b] for a, b in pairwise(points)]
    assert read(chunks) == model(events)


def test_every_byte_may_come_alone() -> None:
    wire = "\ufeff: hi\r\n\r\nid: 7\r\nevent: a\r\ndata: ü\r\ndata:b\r\n\r\n".encode()
    assert read([bytes([byte]) for byte in wire + b":\n"]) == [Message("7", "a", "ü\nb")]


def test_an_event_without_its_blank_line_is_not_given_out() -> None:
    parser = Parser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\n") == [Message(None, "message", "1")]


def test_the_id_of_one_event_is_not_the_id_of_the_next() -> None:
    messages = read([b"id: 4\ndata: a\n\ndata: b\n\n"])
    assert [message.id for message in messages] == ["4", None]


def test_an_endless_event_is_dropped_before_the_memory_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1_000)
    parser = Parser()
    for _ in range(9):
        parser.feed(b"data: " + b"x" * 100 + b"\n")
    with pytest.raises(ConureError, match="longer than 1000 bytes"):
        parser.feed(b"data: " + b"x" * 101)


def event(seq: int) -> bytes:
    return f"id: {seq}\nevent: node.queued\ndata: {json.dumps({'n': seq})}\n\n".encode()


def test_a_cursor_gives_each_event_once_and_knows_where_it_stands() -> None:
    cursor = Cursor(after=2)
    given_out = cursor.feed(event(2) + event(3) + event(5)[:10])
    cursor.reconnect()
    given_out += cursor.feed(event(3) + event(5))
    assert [e.seq for e in given_out] == [3, 5]
    assert cursor.after == 5


def test_what_is_no_event_of_a_program_is_an_error_that_shows_it() -> None:
    with pytest.raises(ConureError, match="<html>"):
        Cursor().feed(b"data: <html>\n\n")
