"""A chain that was read into a program: submit it, run it, and get the chain's own result.

Knows how inputs become variables, how client steps run, and how values become what the
chain would have returned. Refuses to know how the program came to be.

Kept true: whatever the user's functions raise or return that cannot travel is the error
of that step, by its name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from langchain_core.runnables import Runnable, RunnableLambda

from conure.server.program.errors import ConureError, ProgramError
from conure.server.program.ir import Json
from conure.server.program.status import Receipt

from ..client import AsyncClient, Client, Result
from .graph import ClientStep, Graph, Place, unsupported
from .revival import reviver
from .values import Answer, Constant, Either, Local, Lost, Many, Record, Rendered, Text, Value

T = TypeVar("T")


class Outcome(NamedTuple):
    """What one run of a compiled chain came to."""

    output: Any
    """What the chain would have returned."""
    id: str
    """Of the program on the server."""
    receipt: Receipt


class Compiled:
    """A chain as a program."""

    def __init__(self, graph: Graph, value: Value, place: Place) -> None:
        self._value = value
        self._root = graph.root
        self._steps = graph.steps
        self._outputs: dict[int, str] = {}
        if isinstance(value, Constant):
            value = graph.constant(value)
        self._claim(graph, value, place)
        self.outputs: list[str] = list(dict.fromkeys(self._outputs.values()))
        """The variables that the chain's result is made of."""
        self.program: dict[str, Json] = graph.write(self.outputs)
        """The program, as JSON."""
        self.inputs: list[str] = [view.variable for view in graph.root.views]
        """The program's inputs; `submission` makes them of the chain's input."""
        self.functions: dict[str, Callable[..., Any]] = self._functions(_run, None)
        """What the client steps run, by name; to be called with their arguments by name."""
        self.async_functions: dict[str, Callable[..., Awaitable[Any]]] = self._functions(
            _arun, None
        )
        """The same as coroutine functions."""
        if not self.outputs:
            raise unsupported(place, "the chain calls no model and no function: nothing to run")

    def __repr__(self) -> str:
        return f"Compiled({self.program['name']!r}, {len(self.program['nodes'])} nodes)"

    def submission(self, input: Any) -> dict[str, Json]:  # noqa: A002 - LangChain's word
        """The body of `POST /v1/programs` that runs the chain on an input.

        What only a branch, a fallback or another body reads goes wrong there, when it runs.

        Raises:
            ProgramError: if a part of the input that the chain needs in any case cannot travel
                as JSON.
            Exception: whatever LangChain raises for this input where the chain reads it.
        """
        return self._submission(input, None)

    def _submission(self, input: Any, lost: Lost | None) -> dict[str, Json]:  # noqa: A002
        values = {view.variable: view.encode(input, lost) for view in self._root.views}
        return {"program": self.program, "inputs": values}

    def output(self, input: Any, values: Mapping[str, Json], *, program: str = "") -> Any:  # noqa: A002
        """What the chain would have returned.

        Args:
            input: what the submission was made of.
            values: of `outputs`, by name.
            program: id of the program, kept in the metadata of messages.
        """
        return self._assemble(self._value, input, values, program)

    def run(self, client: Client, input: Any, **options: Any) -> Any:  # noqa: A002
        """Run the chain on a server, its client steps in threads here.

        Args:
            client: of the server.
            input: what the chain would be invoked with.
            **options: `objectives` and `options` of the submission.

        Raises:
            ConureError: if the program failed; its cause is what a function raised, if one did.
            Exception: what LangChain raises where a part that ran reads what is not there.
        """
        return self.execute(client, input, **options).output

    async def arun(self, client: AsyncClient, input: Any, **options: Any) -> Any:  # noqa: A002
        """`run`, with await; functions that have an async form run in the caller's loop."""
        return (await self.aexecute(client, input, **options)).output

    def execute(self, client: Client, input: Any, **options: Any) -> Outcome:  # noqa: A002
        """`run`, with the program's id and receipt."""
        lost: Lost = {}
        submission = self._submission(input, lost)
        with _telling(lost):
            result = client.run(submission, functions=self._functions(_run, lost), **options)
        return self._outcome(input, result)

    async def aexecute(self, client: AsyncClient, input: Any, **options: Any) -> Outcome:  # noqa: A002
        """`arun`, with the program's id and receipt."""
        lost: Lost = {}
        submission = self._submission(input, lost)
        functions = self._functions(_arun, lost)
        with _telling(lost):
            result = await client.run(submission, functions=functions, **options)
        return self._outcome(input, result)

    def _functions(self, run: Callable[..., T], lost: Lost | None) -> dict[str, Callable[..., T]]:
        """What runs each client step, by its name."""
        return {step.name: functools.partial(run, step, lost) for step in self._steps}

    def _outcome(self, input: Any, result: Result) -> Outcome:  # noqa: A002
        output = self.output(input, result.outputs, program=result.id)
        return Outcome(output, result.id, result.receipt)

    def _claim(self, graph: Graph, value: Value, place: Place) -> None:
        """Find the variables that a result is made of."""
        if isinstance(value, Rendered):
            raise unsupported(place, "the chain ends in a prompt; let it end in a model")
        if isinstance(value, Record):
            for key, item in value.fields.items():
                self._claim(graph, item, place.branch(key))
            if value.rest is not None:
                self._claim(graph, value.rest, place)
        elif isinstance(value, Answer):
            value.call.is_message = True
            self._outputs[id(value)] = value.call.variable
        elif isinstance(value, Text):
            self._outputs[id(value)] = value.call.variable
        elif isinstance(value, Local) and value.source is not graph.root:
            self._outputs[id(value)] = graph.view(value, "value")
        elif isinstance(value, Either | Many):
            self._outputs[id(value)] = graph.given(value, place)

    def _assemble(
        self,
        value: Value,
        input: Any,  # noqa: A002
        values: Mapping[str, Json],
        program: str,
    ) -> Any:
        if isinstance(value, Record):
            rest = {}
            if value.rest is not None:
                rest = self._assemble(value.rest, input, values, program)
            return rest | {
                key: self._assemble(item, input, values, program)
                for key, item in value.fields.items()
            }
        if isinstance(value, Constant):
            return value.value
        if isinstance(value, Local) and value.source is self._root:
            return value.compute(input)
        given = values[self._outputs[id(value)]]
        if isinstance(value, Text):
            return given["content"] if value.call.is_message else given
        return reviver(value, program)(given)


@contextlib.contextmanager
def _telling(lost: Lost) -> Iterator[None]:
    """Raise what went wrong with a value itself, where a program failed because of it."""
    try:
        yield
    except ConureError as failure:
        for told, problem in lost.items():
            if repr(told) in failure.message:
                raise problem from failure
        raise


def _run(step: ClientStep, lost: Lost | None, /, **args: Json) -> Json:
    made = step.revive(args)
    for runnable in step.runnables:
        made = _checked(runnable).invoke(made)
    return step.source.pack(made, lost)


async def _arun(step: ClientStep, lost: Lost | None, /, **args: Json) -> Json:
    made = step.revive(args)
    for runnable in step.runnables:
        made = await _checked(runnable).ainvoke(made)
    return step.source.pack(made, lost)


def _checked(runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """The runnable, made to fail where LangChain would go on with a chain that it returned."""
    if not isinstance(runnable, RunnableLambda):
        return runnable
    function = getattr(runnable, "func", None)
    coroutine = getattr(runnable, "afunc", None)
    if not (_is_plain(function) and (coroutine is None or _is_coroutine(coroutine))):
        return runnable
    parts: dict[str, Any] = {}

    if function is not None:

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return _no_chain(runnable, function(*args, **kwargs))

        parts["func"] = call
    if coroutine is not None:

        @functools.wraps(coroutine)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            return _no_chain(runnable, await coroutine(*args, **kwargs))

        parts["afunc" if "func" in parts else "func"] = acall
    return RunnableLambda(**parts)


def _is_plain(function: Any) -> bool:
    """Whether a function returns its value; generators yield it, and LangChain adds it up."""
    return not (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function))


def _is_coroutine(function: Any) -> bool:
    return inspect.iscoroutinefunction(function)


def _no_chain(runnable: Runnable[Any, Any], value: Any) -> Any:
    if isinstance(value, Runnable):
        raise ProgramError(
            "langchain.returned_chain",
            f"the function {runnable.get_name()!r} returned a chain ({type(value).__name__}), "
            "which LangChain would go on with; a program's steps are fixed when it is submitted. "
            "Let the function return the chain's input, or invoke the chain itself",
        )
    return value
