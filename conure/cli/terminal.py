"""Text for terminals: tables, durations, and the progress of a program.

A terminal with the package `rich` shows the nodes and their streaming text live. Everywhere else,
what the user must read is one line on stderr, and each change of a node if the user asks for it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from conure.server.program.decoding.unicode_text import escape_controls
from conure.server.program.status import Event, Receipt

MAX_LIVE_NODES = 24
"""Nodes that the live view shows; a program may have thousands."""


def pretty(value: Any) -> str:
    """Return a value as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def json_line(value: Any) -> str:
    """Return a value as one line of JSON."""
    return msgspec.json.encode(value).decode() + "\n"


def duration(seconds: float) -> str:
    """Return a duration with two significant digits: `85 ms`, `1.2 s`, `3 min`."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86_400:.0f} d"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in aligned columns, with a line of titles."""
    lines = [titles, *(list(map(escape_controls, row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )


def summary(receipt: Receipt) -> str:
    """Return a receipt in one line."""
    prompt, output = receipt.prompt_tokens, receipt.output_tokens
    calls = f"{receipt.calls} call" + ("" if receipt.calls == 1 else "s")
    return (
        f"{calls} · {duration(receipt.wall_s)} · {prompt.computed} of {prompt.logical} prompt "
        f"tokens computed · {output.decoded} tokens generated"
    )


MESSAGES = ("client.requested", "yield")
"""Events that are always printed: what the program asks of its client, and what it yields."""


class PrintedFailures:
    """The failures that were printed: nodes and outputs often share one."""

    def __init__(self) -> None:
        self._printed: set[tuple[str, str]] = set()
        self._lines: dict[tuple[str, str], int] = {}
        """The line of the text whose node failed so."""
        self._node_lines: dict[str, int] = {}
        """The lines of the failures of nodes, for the nodes around them."""

    def note(self, event: Event) -> None:
        """Record the line of the text that an event reports as failed."""
        data: Mapping[str, Any] = event.data
        meta = data.get("meta")
        if event.type != "node.failed" or not isinstance(meta, dict):
            return
        line = self._node_lines.get(data.get("cause", ""), meta.get("line"))
        if isinstance(line, int):
            self._node_lines[data["node"]] = line
            self._lines[data.get("code", ""), data.get("message", "")] = line

    def describe(self, code: str, message: str) -> str:
        """Return code, line and message the first time, and an empty text afterwards."""
        if (code, message) in self._printed:
            return ""
        self._printed.add((code, message))
        line = self._lines.get((code, message))
        parts = (code, f"line {line}" if line else "", message)
        return escape_controls(": ".join(part for part in parts if part))


class Progress(Protocol):
    """Shows a program while it runs."""

    def show(self, event: Event) -> None:
        """Show the change that an event reports."""
        ...


class LineProgress:
    """Prints lines: the messages of a program and, if `is_verbose`, the changes of its nodes."""

    def __init__(self, url: str, failures: PrintedFailures, *, is_verbose: bool) -> None:
        self._url = url
        self._failures = failures
        self._is_verbose = is_verbose

    def show(self, event: Event) -> None:
        """Print the event, unless it is a detail."""
        if not self._is_verbose and event.type not in MESSAGES:
            return
        line = describe(event, self._url, self._failures)
        if line is not None:
            sys.stderr.write(line + "\n")


class LiveProgress:
    """Shows the nodes of a program with their states and the end of their texts.

    Rich renders it some times a second, in another thread. Events come more often.
    """

    def __init__(self, url: str, failures: PrintedFailures, console: Any) -> None:
        self._url = url
        self._failures = failures
        self._console = console
        self._states: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def show(self, event: Event) -> None:
        """Update the view."""
        node = event.data.get("node")
        line = None
        if event.type in MESSAGES:
            line = describe(event, self._url, self._failures)
        if line is not None:
            self._console.print(line, markup=False, highlight=False)
        if not isinstance(node, str) or not event.type.startswith("node."):
            return
        with self._lock:
            if event.type == "node.delta":
                offset = int(event.data.get("offset", 0))
                text = self._texts.get(node, "")[:offset] + str(event.data.get("text", ""))
                self._texts[node] = text
                self._states[node] = "running"
            else:
                self._states[node] = event.type.removeprefix("node.")

    def __rich__(self) -> Any:
        """Return a table of the nodes, for the library `rich`."""
        from rich.table import Table
        from rich.text import Text

        with self._lock:
            states, texts = self._states.copy(), self._texts.copy()
        view = Table.grid(padding=(0, 2))
        view.add_column(no_wrap=True, min_width=min(12, max(map(len, states), default=0)))
        view.add_column(no_wrap=True, min_width=len("finished"))
        view.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        styles = {"finished": "green", "failed": "red", "killed": "yellow", "skipped": "yellow"}
        # Running nodes are last, where the eye is.
        order = sorted(states.items(), key=lambda item: item[1] not in styles)
        for node, state in order[-MAX_LIVE_NODES:]:
            tail = escape_controls(" ".join(texts.get(node, "").split())[-200:])
            view.add_row(Text(node), Text(state, style=styles.get(state, "cyan")), Text(tail))
        return view


def describe(event: Event, url: str, failures: PrintedFailures) -> str | None:
    """Return one line about an event, or None if it is a detail."""
    data: Mapping[str, Any] = event.data
    if event.type == "client.requested":
        where = f"{url}/v1/programs/{data.get('program')}/variables/{data.get('output')}"
        return f"waiting for client step {data.get('name')!r}: PUT {where}"
    if event.type == "yield" and data.get("final"):
        return f"yield {escape_controls(msgspec.json.encode(data.get('value')).decode())}"
    if event.type in ("node.finished", "node.restarted"):
        return f"{data.get('node')}: {event.type.removeprefix('node.')}"
    if event.type in ("node.failed", "node.killed", "node.skipped"):
        failure = failures.describe(str(data.get("code", "")), str(data.get("message", "")))
        state = event.type.removeprefix("node.")
        return f"{data.get('node')}: {state}" + (f", {failure}" if failure else "")
    return None


@contextlib.contextmanager
def progress(url: str, failures: PrintedFailures, *, is_verbose: bool) -> Iterator[Progress]:
    """Return the live view on a terminal, and lines everywhere else or if `is_verbose`."""
    lines = LineProgress(url, failures, is_verbose=is_verbose)
    if is_verbose or not sys.stderr.isatty():
        yield lines
        return
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        yield lines
        return
    console = Console(stderr=True)
    view = LiveProgress(url, failures, console)
    with Live(view, console=console, transient=True, refresh_per_second=12):
        yield view
