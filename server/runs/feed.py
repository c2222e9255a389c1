"""What the readers of one program see: durable events in order, and the text in between.

Knows events, texts that grow, what is said of these, and who waits for the next of any. Refuses
to know where events come from; the executor publishes an event only when the disk has it.

Kept true: a reader gets every event after its starting point exactly once and in order;
the deltas of one variable that it gets are contiguous from offset 0 within one attempt;
a slow reader costs no memory, because deltas are cut from the text when it asks (so they
are coalesced by themselves) and events are kept once for all readers.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from ..program.ir import Json
from ..program.status import Event


@dataclass(slots=True)
class _Text:
    """The text of one output so far. Parts are joined only when somebody reads."""

    node: str
    job: str
    variable: str
    attempt: int
    parts: list[str]
    length: int = 0
    version: int = 0
    """When it began or last grew, in the feed's own count."""
    is_committed: bool = False
    """Its value is published: whoever did not follow the text gets that instead."""

    def since(self, offset: int) -> str:
        if len(self.parts) > 1:
            self.parts[:] = ["".join(self.parts)]
        return self.parts[0][offset:] if self.parts else ""


@dataclass(slots=True)
class _View:
    """What a `yield` says of texts that still grow; a newer one takes its place."""

    data: dict[str, Json]
    version: int


class Feed:
    """Events and texts of one program."""

    def __init__(self, program: str) -> None:
        self.num_readers = 0
        self.first_seq = 0
        """Events before this one are in the journal only."""
        self._program = program
        self._events: list[Event] = []
        self._seqs: list[int] = []
        self._texts: dict[str, _Text] = {}  # in the order in which they last grew
        self._views: dict[str, _View] = {}
        self._version = 0
        self._changed = asyncio.Event()
        self._published = asyncio.Event()
        """What changed is more than a text."""
        self._is_closed = False
        self._is_draining = False

    def publish(self, events: list[Event]) -> None:
        """Add durable events, in order of their sequence numbers."""
        for event in events:
            assert event.seq is not None
            self._events.append(event)
            self._seqs.append(event.seq)
            if event.type == "variable.committed" and event.data["variable"] in self._texts:
                self._texts[event.data["variable"]].is_committed = True
        self._tell()

    def begin_text(self, variable: str, node: str, job: str, attempt: int) -> None:
        """An output starts to grow, or starts again after its engine was lost."""
        self._texts.pop(variable, None)
        self._version += 1
        self._texts[variable] = _Text(node, job, variable, attempt, [], version=self._version)

    def grow(self, variable: str, text: str) -> None:
        """An output grew."""
        grown = self._texts.pop(variable)
        self._texts[variable] = grown
        grown.parts.append(text)
        grown.length += len(text)
        self._version += 1
        grown.version = self._version
        self._wake()

    def complete(self, variable: str, text: str) -> None:
        """An output is whole: what was held back, if anything, becomes the last delta."""
        grown = self._texts.get(variable)
        if grown is not None and grown.length < len(text):
            self.grow(variable, text[grown.length :])

    def text_of(self, variable: str) -> str:
        """What an output has said so far."""
        text = self._texts.get(variable)
        return "" if text is None else text.since(0)

    def show(self, node: str, job: str, mode: str, value: Json) -> None:
        """A `yield` has something to say before it is whole: readers get the latest of it, and
        under `delta` what is new of a text.
        """
        self._version += 1
        data = {"program": self._program, "node": node, "job": job, "mode": mode, "final": False}
        self._views[node] = _View({**data, "value": value}, self._version)
        self._wake()

    def hide(self, node: str) -> None:
        """A `yield` is whole, or over: its last word is an event; safe to repeat."""
        self._views.pop(node, None)

    def close(self) -> None:
        """The last event was published; readers end after it."""
        self._is_closed = True
        self._tell()

    def drain(self) -> None:
        """The server goes away: readers hear so and end."""
        self._is_draining = True
        self._tell()

    async def read(self, after: int, *, is_durable: bool = False) -> AsyncGenerator[Event, None]:
        """Every event after sequence number `after`, and deltas, until the program ends.

        With `is_durable` no deltas: such a reader costs nothing while texts grow.
        """
        self.num_readers += 1
        try:
            position = bisect_right(self._seqs, after)
            offsets: dict[str, tuple[int, int]] = {}
            seen = 0
            while True:
                changed = self._news(is_durable=is_durable)
                # What comes while the reader is busy waits for the next round: its text first.
                end = len(self._events)
                if not is_durable:
                    deltas = [*self._deltas(offsets, seen), *self._shown(offsets, seen)]
                    seen = self._version
                    for delta in deltas:
                        yield delta
                for event in self._events[position:end]:
                    yield event
                position = end
                if end < len(self._events):
                    continue
                if self._is_closed:
                    return
                if self._is_draining:
                    yield Event(None, "server.draining", {"program": self._program})
                    return
                await changed.wait()
        finally:
            self.num_readers -= 1

    def _deltas(self, offsets: dict[str, tuple[int, int]], seen: int) -> list[Event]:
        deltas = []
        for variable, text in reversed(self._texts.items()):
            if text.version <= seen:
                break
            if text.is_committed and variable not in offsets:
                continue
            attempt, offset = offsets.get(variable, (text.attempt, 0))
            if attempt != text.attempt:
                offset = 0
            if text.length > offset:
                data = {
                    "program": self._program,
                    "node": text.node,
                    "job": text.job,
                    "variable": variable,
                    "text": text.since(offset),
                    "attempt": text.attempt,
                    "offset": offset,
                }
                deltas.append(Event(None, "node.delta", data))
            offsets[variable] = (text.attempt, text.length)
        deltas.reverse()
        return deltas

    def _shown(self, offsets: dict[str, tuple[int, int]], seen: int) -> list[Event]:
        events = []
        for node, view in self._views.items():
            if view.version <= seen:
                continue
            data = view.data
            if data["mode"] == "delta":
                key = f"yield {node}"
                _, offset = offsets.get(key, (0, 0))
                offset = min(offset, len(data["value"]))  # shorter: it began again
                offsets[key] = (0, len(data["value"]))
                data = {**data, "value": data["value"][offset:]}
            events.append(Event(None, "yield", data))
        return events

    def _tell(self) -> None:
        """Wake all readers."""
        self._published.set()
        self._wake()

    def _wake(self) -> None:
        """Wake those who read texts."""
        self._changed.set()

    def _news(self, *, is_durable: bool) -> asyncio.Event:
        """What is set by the next change; asked for before reading what there is.

        A new one is made by the first reader after a change, and not by the change: texts grow
        token by token, and readers look once for many of them.
        """
        if self._published.is_set():
            self._published = asyncio.Event()
        if self._changed.is_set():
            self._changed = asyncio.Event()
        return self._published if is_durable else self._changed
