"""Client steps: what a program asks its client to do, and what came of it.

Reads a program's events and says which function to run now; turns what the function did
into the answer for the server; keeps what the events told about outputs and failures.
Knows no connection and no thread: a client runs the functions and sends the answers.

Kept true: one request id is handed out at most once by a desk, whatever is replayed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from conure.server.program.decode import MAX_BODY_BYTES
from conure.server.program.errors import ConureError, ProgramError, RunError
from conure.server.program.ir import Json
from conure.server.program.status import (
    ENDED,
    Event,
    Problem,
    ProgramStatus,
    PutValue,
    Receipt,
)

from .exchange import failure_of
from .failures import Failures
from .nodes import nodes_of

Function: TypeAlias = Callable[..., Any]
"""Called with the step's `args` by name; returns JSON, or an awaitable of it."""

MAX_VALUE_BYTES = MAX_BODY_BYTES - 1_000
"""Of a value as JSON; the rest of the request needs less."""

MAX_CLOSED = 1_000
"""Programs that a desk remembers after their end."""


class Result(NamedTuple):
    """What a program came to."""

    id: str
    status: str
    outputs: dict[str, Json]
    """By name; an output that was skipped or isolated is missing."""
    receipt: Receipt


class Step(NamedTuple):
    """One request of the server to run a function."""

    request_id: str
    node: str
    name: str
    output: str
    """The variable that waits for the answer."""
    args: dict[str, Json]
    function: Function


class Desk:
    """Which requests were taken, over all runs of one client."""

    def __init__(self) -> None:
        self._taken: dict[str, set[str]] = {}
        self._closed: deque[str] = deque()
        self._lock = threading.Lock()

    def open(
        self,
        program: str,
        outputs: list[str],
        status: ProgramStatus | None = None,
        text: Any = None,
    ) -> Shift:
        """Begin to serve a program.

        Args:
            program: its id.
            outputs: names of its outputs.
            status: of a program that was there before: what has ended is not run again.
            text: the program itself, where it is known.
        """
        variables = {} if status is None else status.variables
        ended = frozenset(name for name, found in variables.items() if found.status in ENDED)
        return Shift(self, program, outputs, ended, Failures(text))

    def close(self, program: str) -> None:
        """The program has ended; only its latest fellows are remembered as well."""
        with self._lock:
            self._closed.append(program)
            while len(self._closed) > MAX_CLOSED:
                self._taken.pop(self._closed.popleft(), None)

    def take(self, program: str, request_id: str) -> bool:
        """Whether this request is new here; it never is again."""
        with self._lock:
            taken = self._taken.setdefault(program, set())
            if request_id in taken:
                return False
            taken.add(request_id)
            return True


class Shift:
    """What one run of a program has said so far."""

    def __init__(
        self,
        desk: Desk,
        program: str,
        outputs: list[str],
        ended: frozenset[str],
        failures: Failures,
    ) -> None:
        self._desk = desk
        self._ended = ended
        self._program = program
        self._outputs = dict.fromkeys(outputs)
        self._values: dict[str, Json] = {}
        self._failures = failures
        self._causes: dict[str, Exception] = {}
        self._end: dict[str, Json] | None = None

    def take(self, event: Event, functions: Mapping[str, Function]) -> Step | None:
        """Learn from an event; return the step it asks for, if it is to be run now."""
        data = event.data
        if event.type == "client.requested":
            if data["output"] in self._ended:
                return None
            if not self._desk.take(self._program, data["request_id"]):
                return None
            name = data["name"]
            function = functions.get(name, _Unknown(name))
            return Step(
                data["request_id"], data["node"], name, data["output"], data["args"], function
            )
        if event.type == "variable.committed" and data["variable"] in self._outputs:
            self._values[data["variable"]] = data["value"]
        elif event.type == "node.failed":
            problem = Problem(code=data["code"], message=data.get("message", ""))
            self._failures.add(data.get("node", ""), problem)
        elif event.type == "program.finished":
            self._end = data
        return None

    def failed(self, step: Step, problem: Exception) -> PutValue:
        """A function failed here; its exception explains the run's failure.

        Returns:
            The answer that says why the step has no value.
        """
        self._causes[step.node] = problem
        return _failure_answer(step, problem)

    def missing(self) -> list[str]:
        """Outputs whose values were not among the events."""
        return [name for name in self._outputs if name not in self._values]

    def found(self, name: str, value: Json) -> None:
        """A missing output was asked for, and has a value."""
        self._values[name] = value

    def needs_status(self) -> bool:
        """Whether the program's last event was not seen, so that its status must be asked."""
        return self._end is None

    def result(self, status: ProgramStatus | None) -> Result:
        """What the program came to.

        Args:
            status: of the program, where its last event was not seen.

        Raises:
            ConureError: if it failed or was stopped.
        """
        phase: str
        if self._end is not None:
            phase = self._end["status"]
            receipt = msgspec.convert(self._end.get("receipt") or {}, Receipt)
        else:
            assert status is not None
            phase = status.status
            receipt = status.receipt or Receipt()
        if phase != "done":
            node = self._failures.told()
            raise self._error(phase, node) from (None if node is None else self._causes.get(node))
        outputs = {name: self._values[name] for name in self._outputs if name in self._values}
        return Result(self._program, phase, outputs, receipt)

    def _error(self, phase: str, node: str | None) -> ConureError:
        if node is None:
            return RunError(f"run.{phase}", f"program {self._program} is {phase}")
        error = failure_of(self._failures[node])
        error.add_note(f"in node {node!r} of program {self._program}")
        return error


def answer_of(step: Step, value: Any) -> PutValue:
    """The answer that gives a step its value.

    Raises:
        TypeError: if the value is not JSON.
        ProgramError: `client.value_too_large` if no server takes so much at once.
    """
    # Encoded here, in the function's thread, so that what cannot be sent is the step's
    # failure and not the connection's.
    encoded = msgspec.json.encode(value)
    if len(encoded) > MAX_VALUE_BYTES:
        raise ProgramError(
            "client.value_too_large",
            f"its value has {len(encoded):,} bytes as JSON, and a server takes at most "
            f"{MAX_VALUE_BYTES:,}; let it return less, or where the value is to be found",
        )
    return PutValue(value=msgspec.Raw(encoded), request_id=step.request_id)


def _failure_answer(step: Step, problem: Exception) -> PutValue:
    """The answer that says why a step has no value."""
    if isinstance(problem, ConureError):
        code, message = problem.code, problem.message
    else:
        code, message = "client.failed", f"{type(problem).__name__}: {problem}"
    error = Problem(code=code, message=f"{step.name}: {message}"[:10_000])
    return PutValue(error=error, request_id=step.request_id)


def check_functions(program: Any, functions: Mapping[str, Function]) -> None:
    """Refuse a program whose client steps nobody here could run.

    Raises:
        ProgramError: `client.no_function` if a step's name is not among the functions.
    """
    for node in nodes_of(program):
        name = str(node.get("name"))
        if node["op"] == "client" and name not in functions:
            raise ProgramError(
                "client.no_function",
                f"the program has a client step {name!r}, and functions has "
                f"{sorted(functions) or 'nothing'}",
            )


class _Unknown:
    """Stands for a function that this client does not have."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, **args: Json) -> Json:
        raise ProgramError("client.no_function", f"this client has no function {self._name!r}")
