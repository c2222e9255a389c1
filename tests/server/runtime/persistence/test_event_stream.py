"""Tests of the event stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from conure.server.program.status import Event
from conure.server.runtime.persistence.event_stream import MAX_KEPT, EventStream


def committed(seq: int) -> Event:
    return Event(seq, "variable.committed", {"seq": seq, "variable": "other"})


async def take(reading: AsyncGenerator[Event, None], count: int) -> list[Event]:
    return [await asyncio.wait_for(anext(reading), 60) for _ in range(count)]


async def test_reader_gets_each_event_once_in_order() -> None:
    feed = EventStream("p")
    feed.publish([committed(3), committed(5)])
    reading = feed.read(3)
    assert [event.seq for event in await take(reading, 1)] == [5]
    feed.publish([committed(9)])
    feed.close()
    assert [event.seq async for event in reading] == [9]


def test_dropped_events_count_as_changes() -> None:
    feed = EventStream("p")
    for seq in range(1, 3 * MAX_KEPT):
        feed.publish([committed(seq)])
        assert feed.num_changes == seq


async def test_late_reader_gets_text_from_offset_0() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "Hel")
    feed.append_text("x", "lo")
    reading = feed.read(0)
    [first] = await take(reading, 1)
    assert (first.seq, first.data["text"], first.data["offset"]) == (None, "Hello", 0)
    feed.append_text("x", ", world")
    [second] = await take(reading, 1)
    assert (second.data["text"], second.data["offset"]) == (", world", 5)
    await reading.aclose()


async def test_reader_of_some_texts_gets_no_others() -> None:
    feed = EventStream("p")
    for variable in "xyz":
        feed.begin_text(variable, "n", "main", 1)
        feed.append_text(variable, variable)
    feed.set_partial_yield("n", "main", "delta", "part")
    reading = feed.read(0, texts=["z", "x", "never"])
    assert [event.data["text"] for event in await take(reading, 2)] == ["x", "z"]
    feed.append_text("y", "!")
    feed.append_text("z", "!")
    [delta] = await take(reading, 1)
    assert (delta.data["variable"], delta.data["text"]) == ("z", "!")
    feed.publish([committed(1)])
    assert [event.seq for event in await take(reading, 1)] == [1]
    await reading.aclose()


async def test_slow_reader_gets_coalesced_deltas() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "a")
    reading = feed.read(0)
    await take(reading, 1)
    for letter in "bcdef":
        feed.append_text("x", letter)
    [delta] = await take(reading, 1)
    assert (delta.data["text"], delta.data["offset"]) == ("bcdef", 1)
    await reading.aclose()


async def test_new_attempt_restarts_at_offset_0() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "half of")
    reading = feed.read(0)
    await take(reading, 1)
    feed.begin_text("x", "n", "main", 2)
    feed.append_text("x", "again")
    [delta] = await take(reading, 1)
    assert (delta.data["attempt"], delta.data["offset"], delta.data["text"]) == (2, 0, "again")
    await reading.aclose()


async def test_partial_yields_of_a_new_attempt_repeat_nothing() -> None:
    feed = EventStream("p")
    feed.set_partial_yield("y", "main", "delta", "half")
    reading = feed.read(0)
    assert [each.data["value"] for each in await take(reading, 1)] == ["half"]
    rest = asyncio.create_task(take(reading, 1))
    feed.set_partial_yield("y", "main", "delta", "ha")
    await asyncio.sleep(0.01)
    assert not rest.done()
    feed.set_partial_yield("y", "main", "delta", "half of")
    assert [each.data["value"] for each in await rest] == [" of"]
    await reading.aclose()


async def test_last_delta_precedes_the_commit() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "abc")
    feed.complete("x", "abcdef")
    feed.publish([committed(1)])
    reading = feed.read(0)
    delta, commit = await take(reading, 2)
    assert delta.data["text"] == "abcdef"
    assert commit.seq == 1
    await reading.aclose()


async def test_draining_ends_readers_with_an_event() -> None:
    feed = EventStream("p")
    feed.publish([committed(1)])
    feed.drain()
    assert [event.type async for event in feed.read(0)] == [
        "variable.committed",
        "server.draining",
    ]


async def test_new_text_does_not_hide_other_texts() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "text")
    feed.begin_text("y", "m", "main", 1)
    reading = feed.read(0)
    [delta] = await take(reading, 1)
    assert (delta.data["variable"], delta.data["text"]) == ("x", "text")
    await reading.aclose()


async def test_busy_reader_gets_text_before_its_commit() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "ab")
    feed.publish([Event(1, "node.started", {})])
    reading = feed.read(0)
    await take(reading, 2)
    feed.append_text("x", "cd")
    feed.publish([committed(2)])
    delta, commit = await take(reading, 2)
    assert (delta.data["text"], delta.data["offset"]) == ("cd", 2)
    assert commit.seq == 2
    feed.close()
    feed.drain()
    assert [event async for event in reading] == [], "it has ended, so nobody needs to be told"


async def test_durable_reader_is_not_woken_by_text() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    reading = feed.read(0, is_durable=True)
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    for letter in "abc":
        feed.append_text("x", letter)
        await asyncio.sleep(0)
    assert not waiting.done()
    feed.publish([committed(1)])
    assert (await asyncio.wait_for(waiting, 60)).seq == 1
    feed.close()
    assert [event async for event in reading] == []


async def test_log_probabilities_before_the_first_text_wait_for_it() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "", ["half"])
    reading = feed.read(0)
    feed.publish([committed(1)])
    assert [event.seq for event in await take(reading, 1)] == [1]
    feed.append_text("x", "\u00e9", ["other half"])
    [delta] = await take(reading, 1)
    assert (delta.data["logprobs"], delta.data["logprobs_offset"]) == (["half", "other half"], 0)
    await reading.aclose()


async def test_log_probabilities_arrive_with_the_text_of_their_tokens() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "a", ["A"])
    reading = feed.read(0)
    [first] = await take(reading, 1)
    assert (first.data["logprobs"], first.data["logprobs_offset"]) == (["A"], 0)
    feed.append_text("x", "", ["half"])  # the first bytes of a character
    feed.append_text("x", "\u00e9", ["other half"])
    [second] = await take(reading, 1)
    assert (second.data["text"], second.data["offset"]) == ("\u00e9", 1)
    assert (second.data["logprobs"], second.data["logprobs_offset"]) == (["half", "other half"], 1)
    late = feed.read(0)
    [whole] = await take(late, 1)
    assert whole.data["logprobs"] == ["A", "half", "other half"]
    await reading.aclose()
    await late.aclose()


def committed_text(seq: int) -> Event:
    return Event(seq, "variable.committed", {"seq": seq, "variable": "x"})


async def test_a_text_is_dropped_with_its_commit() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "ab", ["A"])
    first = feed.read(0)
    [delta] = await take(first, 1)
    assert delta.data["text"] == "ab"
    again = feed.read(0)
    [delta] = await take(again, 1)
    assert (delta.data["text"], delta.data["offset"]) == ("ab", 0), "it has no value yet"
    feed.publish([committed_text(1)])
    assert not feed._texts
    for reading in (first, again, feed.read(0)):
        assert [event.seq for event in await take(reading, 1)] == [1]
        await reading.aclose()


async def test_a_text_stays_for_the_readers_that_lack_its_end() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "ab", ["A"])
    readers = [feed.read(0) for _ in range(3)]
    for reading in readers:
        await take(reading, 1)
    feed.append_text("x", "c", ["C"])
    feed.publish([committed_text(1)])
    slow, slower, gone = readers
    await gone.aclose()
    for reading in (slow, slower):
        assert feed._texts
        delta, commit = await take(reading, 2)
        assert (delta.data["text"], delta.data["logprobs"], commit.seq) == ("c", ["C"], 1)
    assert not feed._texts
    for reading in (slow, slower):
        await reading.aclose()


async def test_texts_without_a_value_are_dropped_with_the_last_reader() -> None:
    feed = EventStream("p")
    feed.begin_text("x", "n", "main", 1)
    feed.append_text("x", "ab")
    with feed.reader():
        feed.close()
        assert [event.data["text"] async for event in feed.read(0)] == ["ab"]
    assert not feed._texts
