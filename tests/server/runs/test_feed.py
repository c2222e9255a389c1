"""What readers of a program see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from conure.server.program.status import Event
from conure.server.runs.feed import Feed


def committed(seq: int) -> Event:
    return Event(seq, "variable.committed", {"seq": seq, "variable": "other"})


async def take(reading: AsyncGenerator[Event, None], count: int) -> list[Event]:
    return [await asyncio.wait_for(anext(reading), 1) for _ in range(count)]


async def test_a_reader_gets_every_event_after_its_start_once_and_in_order() -> None:
    feed = Feed("p")
    feed.publish([committed(3), committed(5)])
    reading = feed.read(3)
    assert [event.seq for event in await take(reading, 1)] == [5]
    feed.publish([committed(9)])
    feed.close()
    assert [event.seq async for event in reading] == [9]


async def test_a_late_reader_first_gets_the_text_so_far_at_offset_0() -> None:
    feed = Feed("p")
    feed.begin_text("x", "n", "main", 1)
    feed.grow("x", "Hel")
    feed.grow("x", "lo")
    reading = feed.read(0)
    [first] = await take(reading, 1)
    assert (first.seq, first.data["text"], first.data["offset"]) == (None, "Hello", 0)
    feed.grow("x", ", world")
    [second] = await take(reading, 1)
    assert (second.data["text"], second.data["offset"]) == (", world", 5)
    await reading.aclose()
    assert feed.num_readers == 0


async def test_deltas_that_a_slow_reader_missed_come_as_one() -> None:
    feed = Feed("p")
    feed.begin_text("x", "n", "main", 1)
    feed.grow("x", "a")
    reading = feed.read(0)
    await take(reading, 1)
    for letter in "bcdef":
        feed.grow("x", letter)
    [delta] = await take(reading, 1)
    assert (delta.data["text"], delta.data["offset"]) == ("bcdef", 1)
    await reading.aclose()


async def test_a_new_attempt_starts_again_at_offset_0() -> None:
    feed = Feed("p")
    feed.begin_text("x", "n", "main", 1)
    feed.grow("x", "half of")
    reading = feed.read(0)
    await take(reading, 1)
    feed.begin_text("x", "n", "main", 2)
    feed.grow("x", "again")
    [delta] = await take(reading, 1)
    assert (delta.data["attempt"], delta.data["offset"], delta.data["text"]) == (2, 0, "again")
    await reading.aclose()


async def test_the_last_delta_comes_before_the_commit() -> None:
    feed = Feed("p")
    feed.begin_text("x", "n", "main", 1)
    feed.grow("x", "abc")
    feed.complete("x", "abcdef")
    feed.publish([committed(1)])
    reading = feed.read(0)
    delta, commit = await take(reading, 2)
    assert delta.data["text"] == "abcdef"
    assert commit.seq == 1
    await reading.aclose()


async def test_readers_of_a_draining_server_hear_so_and_end() -> None:
    feed = Feed("p")
    feed.publish([committed(1)])
    feed.drain()
    assert [event.type async for event in feed.read(0)] == [
        "variable.committed",
        "server.draining",
    ]


async def test_an_output_that_only_begins_hides_no_other_text() -> None:
    feed = Feed("p")
    feed.begin_text("x", "n", "main", 1)
    feed.grow("x", "text")
    feed.begin_text("y", "m", "main", 1)
    reading = feed.read(0)
    [delta] = await take(reading, 1)
    assert (delta.data["variable"], delta.data["text"]) == ("x", "text")
    await reading.aclose()


async def test_text_that_comes_while_a_reader_is_busy_is_read_before_its_commit() -> None:
    feed = Feed("p")
    feed.begin_text("x", "n", "main", 1)
    feed.grow("x", "ab")
    feed.publish([Event(1, "node.started", {})])
    reading = feed.read(0)
    await take(reading, 2)
    feed.grow("x", "cd")
    feed.publish([committed(2)])
    delta, commit = await take(reading, 2)
    assert (delta.data["text"], delta.data["offset"]) == ("cd", 2)
    assert commit.seq == 2
    feed.close()
    feed.drain()
    assert [event async for event in reading] == [], "it has ended, so nobody needs to be told"


async def test_a_reader_of_events_alone_is_not_woken_by_texts() -> None:
    feed = Feed("p")
    feed.begin_text("x", "n", "main", 1)
    reading = feed.read(0, is_durable=True)
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    for letter in "abc":
        feed.grow("x", letter)
        await asyncio.sleep(0)
    assert not waiting.done()
    feed.publish([committed(1)])
    assert (await asyncio.wait_for(waiting, 1)).seq == 1
    feed.close()
    assert [event async for event in reading] == []
