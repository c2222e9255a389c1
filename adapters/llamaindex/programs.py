"""The open programs that the calls of one run go into: one, and another where one is full.

One thread writes: it submits, appends and ends, in order, and sends together what came
together. One thread for each program reads its events. Knows threads, clients and how much a
server takes at once. Refuses to know calls and plans.

Kept true: of every node that was sent, its program's events are heard, or it is refused, or
its program is lost; after the end nothing is left running on the server.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from conure.server.program.errors import ConureError, ProgramError, RunError
from conure.server.program.ir import MAX_NODES, Json
from conure.server.program.status import Event, Receipt

from ..client import Client, Run

BATCH = 256
"""Nodes in one request at most: the first of many run while the others are sent, and few
requests are larger than a server takes."""


class Ear(Protocol):
    """Hears of nodes; from any thread."""

    def hear(self, event: Event) -> None:
        """Something happened in a program."""
        ...

    def refuse(self, node: str, problem: Exception) -> None:
        """A node was not sent."""
        ...

    def lose(self, nodes: Sequence[str], problem: Exception, *, is_last: bool) -> None:
        """The program of these nodes has ended, or the server is away.

        Args:
            nodes: that were sent to it, whether they have ended or not.
            problem: why it is over, for those that have not.
            is_last: no node can be sent any more.
        """
        ...


class Programs:
    """Sends nodes, and ends what they run in."""

    def __init__(self, client: Client, ids: list[str], ear: Ear) -> None:
        """Submits nothing until there is a node.

        Args:
            client: to the server.
            ids: gets those of the programs.
            ear: hears what becomes of nodes.
        """
        self.receipt: Future[Receipt] = Future()
        """Of the last program, at its end."""
        self._client = client
        self._ids = ids
        self._ear = ear
        self._outbox: queue.SimpleQueue[list[dict[str, Json]] | str] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        self._runs: list[Run] = []
        self._sent: list[str] = []
        """Nodes of the last program."""

    def send(self, nodes: list[dict[str, Json]]) -> None:
        """Run nodes; does not wait for anything. Not safe in two threads at once."""
        self._outbox.put(nodes)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="conure-session")
            self._writer.start()

    def end(self, *, is_cancelled: bool) -> None:
        """Let what was sent come to its end, or cancel it."""
        self._outbox.put("cancel" if is_cancelled else "close")
        if self._writer is None:
            self.receipt.set_result(Receipt())

    def cancel(self) -> None:
        """Cancel what still runs; for after the end."""
        threading.Thread(target=self._end, args=("cancel",)).start()

    def _write(self) -> None:
        """Body of the writing thread."""
        while True:
            item = self._outbox.get()
            ending = item if isinstance(item, str) else None
            nodes = [] if isinstance(item, str) else list(item)
            while ending is None:
                with contextlib.suppress(queue.Empty):
                    more = self._outbox.get_nowait()
                    if isinstance(more, str):
                        ending = more
                    else:
                        nodes += more
                    continue
                break
            for start in range(0, len(nodes), BATCH):
                self._submit(nodes[start : start + BATCH])
            if ending is not None:
                self._end(ending)
                return

    def _submit(self, nodes: list[dict[str, Json]]) -> None:
        ids = [str(node["id"]) for node in nodes]
        try:
            if not self._runs or len(self._sent) + len(nodes) > MAX_NODES:
                self._open(nodes, ids)
            else:
                self._sent += ids  # before their events can come
                self._runs[-1].append({"nodes": nodes})
        except Exception as problem:  # whatever it is, somebody waits
            if len(nodes) > 1 and _is_of_one(problem):
                half = len(nodes) // 2
                self._submit(nodes[:half])
                self._submit(nodes[half:])
                return
            for node in ids:
                self._ear.refuse(node, problem)

    def _open(self, nodes: list[dict[str, Json]], ids: list[str]) -> None:
        program = {"name": "Conure.llamaindex", "nodes": nodes}
        run = self._client.submit(program, options={"detach": False}, open=True)
        self._runs.append(run)
        self._ids.append(run.id)
        self._sent = ids
        reading = threading.Thread(
            target=self._read, args=(run, ids), name="conure-events", daemon=True
        )
        reading.start()
        for full in self._runs[-2:-1]:
            with contextlib.suppress(ConureError):  # where this fails, it ends by its lease
                full.append({"close": True})

    def _end(self, ending: str) -> None:
        if not self._runs and not self.receipt.done():
            self.receipt.set_result(Receipt())
        # Where this fails, or the client was closed meanwhile, they end by their leases.
        with contextlib.suppress(ConureError, RuntimeError):
            if ending == "cancel":
                for run in self._runs:
                    run.cancel()
            elif self._runs:
                self._runs[-1].append({"close": True})

    def _read(self, run: Run, sent: list[str]) -> None:
        """Body of a reading thread.

        Args:
            run: the program.
            sent: its nodes; grows.
        """
        problem: Exception = RunError("run.ended", f"program {run.id} ended without this answer")
        receipt = Receipt()
        try:
            with contextlib.closing(run.events()) as events:
                for event in events:
                    self._ear.hear(event)
                    if event.type == "program.finished":
                        receipt = msgspec.convert(event.data.get("receipt") or {}, Receipt)
        except Exception as caught:  # told to whoever waits
            problem = caught
        is_last = run is self._runs[-1]
        if is_last and not self.receipt.done():
            self.receipt.set_result(receipt)
        self._ear.lose(sent, problem, is_last=is_last)
        if is_last:
            self._outbox.put("close")


def _is_of_one(problem: Exception) -> bool:
    """Whether some of the nodes may run, if they are sent apart."""
    is_too_large = getattr(problem, "http_status", None) == 413
    return isinstance(problem, ProgramError | ValueError) or is_too_large
