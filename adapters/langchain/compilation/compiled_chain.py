"""A compiled chain: submits the program, runs it, and returns the result of the chain.

Responsibility: conversion of inputs and outputs, and client steps.

Invariants: an exception of a user's function, or a result that JSON cannot carry, is an error of
the client step of that name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

from conure.server.program.errors import ConureError
from conure.server.program.ir import Json
from conure.server.program.status import Receipt

from ...client import AsyncClient, Client, NotReadyError, StepResult
from ..chat.json_values import LocalValues
from .chain_graph import ChainClientStep, ChainGraph, ChainPosition, unsupported
from .deserializers import deserializer
from .values import (
    AnswerTextValue,
    AnswerValue,
    BranchedValue,
    ClientValue,
    Constant,
    DeferredErrors,
    MappedValue,
    PromptTurnsValue,
    Record,
    Value,
)

T = TypeVar("T")


class ChainOutcome(NamedTuple):
    """The result of one run of a compiled chain."""

    output: Any
    """The value that the chain would have returned."""
    id: str
    """Id of the program on the server."""
    receipt: Receipt


class CompiledChain:
    """A chain compiled to a program."""

    def __init__(
        self,
        graph: ChainGraph,
        value: Value,
        position: ChainPosition,
        *,
        reduced: tuple[Callable[..., CompiledChain], tuple[Any, ...]],
    ) -> None:
        """Complete the program.

        Args:
            graph: the chain's calls and steps.
            value: the chain's result.
            position: position of the chain.
            reduced: function and arguments that compile the chain again, as pickle needs them.
        """
        self._reduced = reduced
        self._value = value
        self._root = graph.root
        self._steps = graph.steps
        self._outputs: dict[int, str] = {}
        if isinstance(value, Constant):
            value = graph.client_value(value)
        self._add_outputs(graph, value, position)
        self.outputs: list[str] = list(dict.fromkeys(self._outputs.values()))
        """Variables from which the chain's result is assembled."""
        self.program: dict[str, Json] = graph.build(self.outputs)
        """The program as JSON."""
        self.inputs: list[str] = [view.variable for view in graph.root.views]
        """Inputs of the program; `submission` computes them from the chain's input."""
        self.functions: dict[str, Callable[..., Any]] = self._functions(_run_step)
        """Functions of the client steps by name, called with keyword arguments."""
        self.async_functions: dict[str, Callable[..., Awaitable[Any]]] = self._functions(_arun_step)
        """The same as coroutine functions."""
        if not self.outputs:
            raise unsupported(position, "the chain calls no model and no function: nothing to run")

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced

    def __repr__(self) -> str:
        return f"Compiled({self.program['name']!r}, {len(self.program['nodes'])} nodes)"

    def submission(self, input: Any) -> dict[str, Json]:  # noqa: A002 - LangChain's word
        """Return the body of `POST /v1/programs` that runs the chain on an input.

        An error in a value that only bodies read (of a branch, fallback or map) is raised there,
        when the body runs.

        Raises:
            ProgramError: if JSON cannot carry a part of the input that is always needed.
            Exception: as LangChain for this input.
        """
        return self._submission(input, None)

    def _submission(self, input: Any, errors: DeferredErrors | None) -> dict[str, Json]:  # noqa: A002
        values = {view.variable: view.encode(input, errors) for view in self._root.views}
        return {"program": self.program, "inputs": values}

    def output(self, input: Any, values: Mapping[str, Json], *, program: str = "") -> Any:  # noqa: A002
        """Return the value that the chain would have returned.

        Args:
            input: as in `submission`.
            values: values of `outputs`, by name.
            program: id of the program, for the metadata of messages.
        """
        return self._assemble(self._value, input, values, program)

    def run(self, client: Client, input: Any, **options: Any) -> Any:  # noqa: A002
        """Run the chain on a server, and its client steps in threads of this process.

        Args:
            client: client of the server.
            input: as for `invoke` of the chain.
            **options: `objectives` and `options` of the submission.

        Raises:
            NotReadyError: if a call took longer than the `timeout` of its model.
            ConureError: if the program failed; its cause is the exception of a function, if any.
            Exception: as LangChain, if a part that ran reads a missing input.
        """
        return self.execute(client, input, **options).output

    async def arun(self, client: AsyncClient, input: Any, **options: Any) -> Any:  # noqa: A002
        """`run` for asyncio. Functions with an async form run in the caller's event loop."""
        return (await self.aexecute(client, input, **options)).output

    def execute(self, client: Client, input: Any, **options: Any) -> ChainOutcome:  # noqa: A002
        """`run`, with the program's id and receipt."""
        errors, local = DeferredErrors(), LocalValues()
        with local.active():
            submission = self._submission(input, errors)
            functions = self._functions(_run_step, errors, local)
            with _chain_errors(errors):
                result = client.run(submission, functions=functions, **options)
            return self._outcome(input, result)

    async def aexecute(self, client: AsyncClient, input: Any, **options: Any) -> ChainOutcome:  # noqa: A002
        """`arun`, with the program's id and receipt."""
        errors, local = DeferredErrors(), LocalValues()
        with local.active():
            submission = self._submission(input, errors)
            functions = self._functions(_arun_step, errors, local)
            with _chain_errors(errors):
                result = await client.run(submission, functions=functions, **options)
            return self._outcome(input, result)

    def _functions(
        self,
        run: Callable[..., T],
        errors: DeferredErrors | None = None,
        local: LocalValues | None = None,
    ) -> dict[str, Callable[..., T]]:
        """Return the function of each client step, by name."""
        return {step.name: functools.partial(run, step, errors, local) for step in self._steps}

    def _outcome(self, input: Any, result: StepResult) -> ChainOutcome:  # noqa: A002
        output = self.output(input, result.outputs, program=result.id)
        return ChainOutcome(output, result.id, result.receipt)

    def _add_outputs(self, graph: ChainGraph, value: Value, position: ChainPosition) -> None:
        """Collect the variables of the chain's result in `_outputs`."""
        if isinstance(value, PromptTurnsValue):
            raise unsupported(position, "the chain ends with a prompt; end it with a model")
        if isinstance(value, Record):
            for key, item in value.fields.items():
                self._add_outputs(graph, item, position.branch(key))
            if value.rest is not None:
                self._add_outputs(graph, value.rest, position)
        elif isinstance(value, AnswerValue):
            value.call.is_message = True
            self._outputs[id(value)] = value.call.variable
        elif isinstance(value, AnswerTextValue):
            self._outputs[id(value)] = value.call.variable
        elif isinstance(value, ClientValue) and value.source is not graph.root:
            self._outputs[id(value)] = graph.view_variable(value, "value")
        elif isinstance(value, BranchedValue | MappedValue):
            self._outputs[id(value)] = graph.exported_variable(value, position)

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
        if isinstance(value, ClientValue) and value.source is self._root:
            return value.compute(input)
        json_value = values[self._outputs[id(value)]]
        if isinstance(value, AnswerTextValue) and not value.is_sent_as_message:
            return json_value["content"] if value.call.is_message else json_value
        return deserializer(value, program)(json_value)


@contextlib.contextmanager
def _chain_errors(errors: DeferredErrors) -> Iterator[None]:
    """Raise the errors that the chain would raise instead of the failures of its program.

    These are the error of a deferred value and the timeout of a model.
    """
    try:
        yield
    except ConureError as failure:
        cause = errors.cause_of(failure)
        if cause is not None:
            raise cause from failure
        if failure.code == "node.timeout":  # only nodes of models have a time limit
            raise NotReadyError("client.not_ready", failure.message) from failure
        raise


def _run_step(
    step: ChainClientStep, errors: DeferredErrors | None, local: LocalValues | None, /, **args: Json
) -> Json:
    with nullcontext() if local is None else local.active():
        value = step.deserialize(args)
        for runnable in step.runnables:
            value = runnable.invoke(value)
        return step.source.encode(value, errors)


async def _arun_step(
    step: ChainClientStep, errors: DeferredErrors | None, local: LocalValues | None, /, **args: Json
) -> Json:
    with nullcontext() if local is None else local.active():
        value = step.deserialize(args)
        for runnable in step.runnables:
            value = await runnable.ainvoke(value)
        return step.source.encode(value, errors)
