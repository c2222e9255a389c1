"""The event stream of one program: durable events in order, and deltas of streamed texts.

Out of scope: where events come from. The outbox publishes an event once it is durable.

Invariants: a reader receives every event after its starting point exactly once and in order. The
deltas of a variable are contiguous from offset 0 within one attempt. A slow reader needs no memory
of its own: a delta is cut from the text when the reader asks for it, and the last events are stored
once for all readers. A reader that needs earlier events reads the journal. A text is dropped once
its value is published and no reader in `read` has received only a part of it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from ...program.ir import Json
from ...program.status import Event

MAX_KEPT, MAX_KEPT_BYTES = 1_000, 1024 * 1024
"""The last events of a program, and their bytes of JSON, that stay in memory."""


@dataclass(slots=True)
class _StreamedText:
    """The text of one output so far. Parts are joined when the text is read."""

    node: str
    job: str
    variable: str
    attempt: int
    parts: list[str]
    logprobs: list[Json] = field(default_factory=list)
    """One entry per token, if the output requested them."""
    length: int = 0
    version: int = 0
    """The stream's version when the text last changed."""

    def since(self, offset: int) -> str:
        if len(self.parts) > 1:
            self.parts[:] = ["".join(self.parts)]
        return self.parts[0][offset:] if self.parts else ""


class _ReadText(NamedTuple):
    """How much of a text a reader has."""

    attempt: int
    offset: int
    num_logprobs: int = 0


TextOffsets: TypeAlias = dict[str, _ReadText]
"""How much of each text a reader has, by variable; by `yield NODE` for partial values in mode
`delta`."""


@dataclass(slots=True)
class _PartialYield:
    """The latest partial value of a `yield` node."""

    data: dict[str, Json]
    version: int


class EventStream:
    """The events and texts of one program."""

    def __init__(self, program: str) -> None:
        self.num_readers = 0
        """Clients that read the program; see `reader`."""
        self.first_seq = 0
        """Earlier events are only in the journal."""
        self._program = program
        self.dropped_seq = 0
        """The last event that was dropped from memory; 0: none was."""
        self._events: list[Event] = []
        self._seqs: list[int] = []
        self._num_dropped = 0
        self._num_bytes = 0
        self._texts: dict[str, _StreamedText] = {}  # by last change
        self._committed: set[str] = set()
        """Texts whose values are published, and that a reader still needs."""
        self._offsets: list[TextOffsets] = []
        """What the readers in `read` have of each text."""
        self._partial: dict[str, _PartialYield] = {}
        self._version = 0
        self._changed = asyncio.Event()
        self._published = asyncio.Event()
        """Set when the stream has changed, except by streamed text or a partial `yield`."""
        self._is_closed = False
        self._is_draining = False

    @property
    def num_changes(self) -> int:
        """A number that grows with every event and every change of a text."""
        return self._version + self._num_dropped + len(self._events)

    def publish(self, events: list[Event]) -> None:
        """Add durable events, in order of their sequence numbers."""
        for event in events:
            assert event.seq is not None
            self._events.append(event)
            self._seqs.append(event.seq)
            self._num_bytes += len(event.encoded)
            if event.type == "variable.committed" and event.data["variable"] in self._texts:
                self._committed.add(event.data["variable"])
        self._drop_texts()
        if len(self._events) > 2 * MAX_KEPT or self._num_bytes > 2 * MAX_KEPT_BYTES:
            self._drop_oldest()
        self._wake_all()

    def _drop_oldest(self) -> None:
        """Drop all but the last events, at least one: the journal has them."""
        first = max(0, len(self._events) - MAX_KEPT)
        kept = sum(len(event.encoded) for event in self._events[first:])
        while kept > MAX_KEPT_BYTES and first < len(self._events) - 1:
            kept -= len(self._events[first].encoded)
            first += 1
        if first:
            self.dropped_seq = self._seqs[first - 1]
            self.first_seq = self.dropped_seq + 1
            self._num_dropped += first
            del self._events[:first]
            del self._seqs[:first]
            self._num_bytes = kept

    def _drop_texts(self) -> None:
        """Drop texts with published values that no reader needs.

        A reader without a delta gets only the value.
        """
        for variable in list(self._committed):
            if not any(self._lacks_end(variable, offsets) for offsets in self._offsets):
                self._committed.discard(variable)
                del self._texts[variable]
        if self._is_closed and self.num_readers == 0:
            self._texts.clear()
            self._committed.clear()

    def _lacks_end(self, variable: str, offsets: TextOffsets) -> bool:
        """Return whether a reader has a part of a text, and not the rest."""
        text, read = self._texts[variable], offsets.get(variable)
        if read is None:
            return False
        return text.length > (read.offset if read.attempt == text.attempt else 0)

    @property
    def is_draining(self) -> bool:
        """Whether readers end because the server drains."""
        return self._is_draining

    def begin_text(self, variable: str, node: str, job: str, attempt: int) -> None:
        """Start the text of an output, or restart it after its engine died."""
        self._texts.pop(variable, None)
        self._committed.discard(variable)
        self._version += 1
        self._texts[variable] = _StreamedText(
            node, job, variable, attempt, [], version=self._version
        )

    def append_text(self, variable: str, text: str, logprobs: Sequence[Json] = ()) -> None:
        """Append to the text of an output. Log probabilities are sent with the next text."""
        streamed = self._texts[variable]
        streamed.logprobs += logprobs
        if not text:
            return
        del self._texts[variable]
        self._texts[variable] = streamed
        streamed.parts.append(text)
        streamed.length += len(text)
        self._version += 1
        streamed.version = self._version
        self._wake_text_readers()

    def complete(self, variable: str, text: str) -> None:
        """Complete the text of an output: text that was not streamed becomes the last delta."""
        streamed = self._texts.get(variable)
        if streamed is not None and streamed.length < len(text):
            self.append_text(variable, text[streamed.length :])

    def text_of(self, variable: str) -> str:
        """Return the text of an output so far."""
        text = self._texts.get(variable)
        return "" if text is None else text.since(0)

    def set_partial_yield(self, node: str, job: str, mode: str, value: Json) -> None:
        """Set the partial value of a `yield` node.

        Readers receive the latest value; in mode `delta`, only the new text.
        """
        self._version += 1
        data = {"program": self._program, "node": node, "job": job, "mode": mode, "final": False}
        self._partial[node] = _PartialYield({**data, "value": value}, self._version)
        self._wake_text_readers()

    def clear_partial_yield(self, node: str) -> None:
        """Remove the partial value of a `yield` node that completes or ends; safe to repeat."""
        self._partial.pop(node, None)

    def close(self) -> None:
        """End all readers after the last published event."""
        self._is_closed = True
        self._drop_texts()
        self._wake_all()

    def drain(self) -> None:
        """Send `server.draining` to all readers and end them."""
        self._is_draining = True
        self._wake_all()

    @contextmanager
    def reader(self) -> Iterator[None]:
        """Count a client that reads the program, here or in the journal, until the block ends."""
        self.num_readers += 1
        try:
            yield
        finally:
            self.num_readers -= 1
            self._drop_texts()

    async def read(
        self,
        after: int,
        *,
        is_durable: bool = False,
        texts: Collection[str] | None = None,
        offsets: TextOffsets | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Iterate over the events after number `after`, and deltas, until the program ends.

        Ends early if the next event has been dropped: the reader continues in the journal, and
        then here with the same `offsets`.

        Args:
            after: the last event that the reader has.
            is_durable: yield only durable events: no deltas and no partial values of `yield` nodes.
            texts: yield the deltas of these variables only, and no partial values of `yield` nodes.
            offsets: how much of each text the reader has, changed by this method.
        """
        position = self._num_dropped + bisect_right(self._seqs, after)
        offsets = {} if offsets is None else offsets
        # The reader has the value, or receives it before further text.
        for variable in self._committed:
            offsets.pop(variable, None)
        self._offsets.append(offsets)
        seen = 0
        try:
            while True:
                changed = self._next_change(is_durable=is_durable)
                # Events published while the reader is busy follow the next deltas.
                end = self._num_dropped + len(self._events)
                if not is_durable:
                    deltas = self._deltas(offsets, seen, texts)
                    if texts is None:
                        deltas += self._partial_yields(offsets, seen)
                    seen = self._version
                    for delta in deltas:
                        yield delta
                while position < end:
                    if position < self._num_dropped:
                        return
                    yield self._events[position - self._num_dropped]
                    position += 1
                if end < self._num_dropped + len(self._events):
                    continue
                if self._is_closed:
                    return
                if self._is_draining:
                    yield Event(None, "server.draining", {"program": self._program})
                    return
                await changed.wait()
        finally:
            self._offsets = [each for each in self._offsets if each is not offsets]
            self._drop_texts()

    def recorded(self, after: int) -> list[Event]:
        """Return the events in memory after number `after`."""
        return self._events[bisect_right(self._seqs, after) :]

    def _changed_texts(
        self, seen: int, names: Collection[str] | None
    ) -> list[tuple[str, _StreamedText]]:
        """Return the texts that changed after version `seen`, by last change."""
        if names is None:
            newest = reversed(self._texts.items())
            changed = [*takewhile(lambda each: each[1].version > seen, newest)]
            changed.reverse()
            return changed
        found = [(name, self._texts[name]) for name in names if name in self._texts]
        return sorted(
            (each for each in found if each[1].version > seen), key=lambda each: each[1].version
        )

    def _deltas(
        self, offsets: TextOffsets, seen: int, names: Collection[str] | None
    ) -> list[Event]:
        deltas = []
        for variable, text in self._changed_texts(seen, names):
            if variable in self._committed and variable not in offsets:
                continue
            read = offsets.get(variable)
            if read is None or read.attempt != text.attempt:
                read = _ReadText(text.attempt, 0)
            offset = read.offset
            # Without new text there is no delta. Log probabilities stay pending until the next one.
            if text.length > offset:
                data: dict[str, Json] = {
                    "program": self._program,
                    "node": text.node,
                    "job": text.job,
                    "variable": variable,
                    "text": text.since(offset),
                    "attempt": text.attempt,
                    "offset": offset,
                }
                if text.logprobs:
                    data["logprobs"] = text.logprobs[read.num_logprobs :]
                    data["logprobs_offset"] = read.num_logprobs
                deltas.append(Event(None, "node.delta", data))
                offsets[variable] = _ReadText(text.attempt, text.length, len(text.logprobs))
        self._drop_texts()
        return deltas

    def _partial_yields(self, offsets: TextOffsets, seen: int) -> list[Event]:
        events = []
        for node, partial in self._partial.items():
            if partial.version <= seen:
                continue
            data = partial.data
            if data["mode"] == "delta":
                key = f"yield {node}"
                offset = offsets.get(key, _ReadText(0, 0)).offset
                if len(data["value"]) <= offset:
                    continue  # a call that runs again generates its text from the start
                offsets[key] = _ReadText(0, len(data["value"]))
                data = {**data, "value": data["value"][offset:]}
            events.append(Event(None, "yield", data))
        return events

    def _wake_all(self) -> None:
        """Wake all readers."""
        self._published.set()
        self._wake_text_readers()

    def _wake_text_readers(self) -> None:
        """Wake the readers of texts."""
        self._changed.set()

    def _next_change(self, *, is_durable: bool) -> asyncio.Event:
        """Return an event that the next change sets. Must be called before reading the state.

        The new `asyncio.Event` is created by the first reader after a change and not by every
        change: texts change with every token, and a reader wakes once for many tokens.
        """
        if self._published.is_set():
            self._published = asyncio.Event()
        if self._changed.is_set():
            self._changed = asyncio.Event()
        return self._published if is_durable else self._changed
