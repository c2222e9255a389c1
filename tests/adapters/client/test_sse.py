"""Event streams are parsed independently of chunk boundaries."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conure.adapters.client import sse
from conure.adapters.client.sse import Cursor, SSEMessage, SSEParser
from conure.server.program.errors import ConureError

TEXT = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]))
FIELD = st.tuples(st.sampled_from(["data", "event", "id", "", "retry", "other"]), TEXT)
END = st.sampled_from(["\n", "\r\n", "\r"])


def model(events: list[list[tuple[str, str]]]) -> list[SSEMessage]:
    """Return the messages of these fields according to the standard."""
    messages = []
    for fields in events:
        data = [value for name, value in fields if name == "data"]
        ids = [value for name, value in fields if name == "id"]
        kinds = [value for name, value in fields if name == "event"]
        if data:
            messages.append(
                SSEMessage(ids[-1] if ids else None, ["", *kinds][-1] or "message", "\n".join(data))
            )
    return messages


def read(chunks: list[bytes]) -> list[SSEMessage]:
    parser = SSEParser()
    return [message for chunk in chunks for message in parser.feed(chunk)]


@given(st.lists(st.lists(FIELD, max_size=5), max_size=5), END, st.lists(st.integers(0, 400)))
def test_messages_do_not_depend_on_chunks(
    events: list[list[tuple[str, str]]], end: str, cuts: list[int]
) -> None:
    wire = "".join(
        "".join(f"{name}: {value}{end}" for name, value in fields) + end for fields in events
    ).encode()
    # The parser keeps a final "\r" until the next byte.
    wire += b": end\n"
    points = sorted({0, len(wire), *(min(cut, len(wire)) for cut in cuts)})
    chunks = [wire[a:b] for a, b in pairwise(points)]
    assert read(chunks) == model(events)


def test_single_byte_chunks_are_parsed() -> None:
    wire = "\ufeff: hi\r\n\r\nid: 7\r\nevent: a\r\ndata: ü\r\ndata:b\r\n\r\n".encode()
    assert read([bytes([byte]) for byte in wire + b":\n"]) == [SSEMessage("7", "a", "ü\nb")]


def test_an_event_needs_its_blank_line() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\n") == [SSEMessage(None, "message", "1")]


def test_an_event_does_not_inherit_an_id() -> None:
    messages = read([b"id: 4\ndata: a\n\ndata: b\n\n"])
    assert [message.id for message in messages] == ["4", None]


def test_an_oversized_event_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1_000)
    parser = SSEParser()
    for _ in range(9):
        parser.feed(b"data: " + b"x" * 100 + b"\n")
    with pytest.raises(ConureError, match="exceeds 1,000 bytes"):
        parser.feed(b"data: " + b"x" * 101)


def event(seq: int) -> bytes:
    return f"id: {seq}\nevent: node.queued\ndata: {json.dumps({'n': seq})}\n\n".encode()


def test_a_cursor_returns_each_event_once() -> None:
    cursor = Cursor(after=2)
    events = cursor.feed(event(2) + event(3) + event(5)[:10])
    cursor.reconnect()
    events += cursor.feed(event(3) + event(5))
    assert [e.seq for e in events] == [3, 5]
    assert cursor.after == 5


def test_an_invalid_event_is_shown_in_the_error() -> None:
    with pytest.raises(ConureError, match="<html>"):
        Cursor().feed(b"data: <html>\n\n")


def test_an_event_may_have_many_chunks() -> None:
    parser = SSEParser()
    value = "x" * 3_000_000
    body = f"id: 1\nevent: e\ndata: {value}\n\nid: 2\ndata: y\n\n".encode()
    messages = [m for i in range(0, len(body), 1_000) for m in parser.feed(body[i : i + 1_000])]
    assert messages == [SSEMessage("1", "e", value), SSEMessage("2", "message", "y")]
