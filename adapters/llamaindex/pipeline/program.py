"""A QueryPipeline of core 0.12, compiled to a program.

Responsibility: prompts, LLMs and packs run on the server; every other module is a client step,
which gets the inputs that the module would get, LLM responses included. A value that is not JSON,
such as a response with its sources, stays in the process; the program has a reference to it.
Unsupported modules are rejected: an edge with a function, a module that streams or loops.

Invariants: compilation runs no user code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

from llama_index.core.base.llms.types import ChatMessage, TextBlock

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Expression, Json

from ...client import Client, StepResult
from ...names import unique_name
from ..acceleration.accelerate import conure_run
from ..acceleration.plan_builder import NotPlanned
from ..acceleration.prompt_inputs import text_read
from ..llm.llm import Conure
from ..llm.messages import chat_response, completion_response
from ..llm.model_request import ModelRequest
from .core012 import (
    BaseStatefulComponent,
    InputComponent,
    LoopComponent,
    QueryComponent,
    QueryPipeline,
    RouterComponent,
    validate_and_convert_stringable,
)
from .reader import GENERATED_NAME, PipelineReader, PlaceholderSource

LocalValues: TypeAlias = dict[str, Any]
"""Values of one run that stay in the process, by reference or by name of an input."""
Deserializer: TypeAlias = Callable[[Json, LocalValues], Any]
ClientFunction: TypeAlias = Callable[..., Json]
"""The function of a client step; takes the local values, then keyword arguments."""

_LOCAL = "__llamaindex_local__"
"""Key that marks a reference to a value that stays in the process."""
_MAX_INT = 2**53
"""Larger integers are not JSON numbers for every reader."""
UNNAMED_INPUT = "input"
"""Name of the only input of an `InputComponent` whose links do not name it."""


class CompiledPipeline:
    """A pipeline compiled to a program."""

    def __init__(self, pipeline: QueryPipeline, name: str) -> None:
        self._pipeline = pipeline
        self._nodes: list[dict[str, Json]] = []
        self._names: set[str] = set()
        self._used_as_text: set[str] = set()
        self._llms: dict[str, Conure] = {}
        """The LLMs of the calls, by module."""
        self._functions: dict[str, ClientFunction] = {}
        """The functions of the client steps, by name."""
        self._has_unnamed_input = False
        self._inputs = {key: self._root_inputs(key) for key in pipeline.get_root_keys()}
        names = [name for inputs in self._inputs.values() for name in inputs]
        if len(set(names)) != len(names):
            raise _unsupported(
                "inputs", f"several roots have inputs of the same name: {sorted(names)}"
            )
        self.inputs: list[str] = names
        """Names of the program's inputs, which are texts."""
        self._names |= set(names)
        self._reader = PipelineReader(pipeline, self._add_call, self._add_client_step)
        outputs = self._read()
        self._leaves = {
            key: self._leaf_output(key, outputs[key]) for key in pipeline.get_leaf_keys()
        }
        self.outputs: list[str] = [variable for variable, _ in self._leaves.values()]
        """Variables from which the pipeline's result is assembled."""
        self.program: dict[str, Json] = {
            "name": name,
            "variables": {each: {"type": "string"} for each in names},
            "nodes": self._nodes,
            "outputs": list(dict.fromkeys(self.outputs)),
        }
        """The program as JSON."""

    def __repr__(self) -> str:
        return f"Compiled({self.program['name']!r}, {len(self._nodes)} nodes)"

    def run(self, client: Client, **inputs: Any) -> Any:
        """Run the pipeline on a server, and its client steps in threads of this process.

        Args:
            client: client of the server.
            **inputs: as for `QueryPipeline.run`, by name. Client steps get the values unchanged. A
                prompt contains the text that LlamaIndex makes of a value.

        Returns:
            The output of the pipeline's only leaf, or a dict of outputs by module.

        Raises:
            ProgramError: if the names of the inputs differ from the pipeline's, an input that a
                prompt prints has no text, or an LLM uses another server than the client.
            ConureError: if the program failed; its cause is the exception of a module, if any.
        """
        return self.execute(client, **inputs)[0]

    def execute(self, client: Client, **inputs: Any) -> tuple[Any, StepResult]:
        """`run`, with the program's id and receipt."""
        if self._has_unnamed_input and len(inputs) == 1:
            inputs = dict(zip(self.inputs, inputs.values(), strict=True))
        if inputs.keys() != set(self.inputs):
            raise ProgramError(
                "to_program.inputs",
                f"the pipeline has the inputs {sorted(self.inputs)}, got {sorted(inputs)}",
            )
        self._check_server(client)
        local: LocalValues = dict(inputs)
        functions = {name: partial(each, local) for name, each in self._functions.items()}
        texts = {name: self._input_text(name, value) for name, value in inputs.items()}
        result = client.run(self.program, inputs=texts, functions=functions)
        outputs = {
            key: deserialize(result.outputs[variable], local)
            for key, (variable, deserialize) in self._leaves.items()
        }
        return (next(iter(outputs.values())) if len(outputs) == 1 else outputs), result

    def _check_server(self, client: Client) -> None:
        for key, llm in self._llms.items():
            if llm.connection().identity != client.identity:
                raise ProgramError(
                    "to_program.server",
                    f"the LLM of module {key!r} uses another server than the client, or other "
                    "headers; create both with the same address and headers, or pass the client "
                    "to the LLM (client=)",
                    path=key,
                )

    def _input_text(self, name: str, value: Any) -> str:
        if name not in self._used_as_text:
            return ""  # client steps alone read it, and an iterator can be read only once
        try:
            return validate_and_convert_stringable(value)
        except ValueError as problem:
            raise ProgramError(
                "to_program.inputs",
                f"a prompt prints the input {name!r}, and a {type(value).__name__} has no text",
            ) from problem

    def _root_inputs(self, key: str) -> list[str]:
        """Return the names of the inputs of a root."""
        module = self._pipeline.module_dict[key]
        if type(module) is InputComponent:
            edges = self._pipeline.dag.out_edges(key, data=True)
            names = list(dict.fromkeys(edge["src_key"] for _, _, edge in edges))
            if None not in names:
                return names
            named = [name for name in names if name is not None]
            if len(named) > 1:
                raise _unsupported(
                    key, f"a link without src_key is ambiguous, as there are the inputs {named}"
                )
            self._has_unnamed_input = not named and len(self._pipeline.get_root_keys()) == 1
            return named or [UNNAMED_INPUT]
        return sorted(module.free_req_input_keys)

    def _read(self) -> dict[str, dict[str, Any]]:
        inputs = {
            key: {
                name: self._reader.placeholder(PlaceholderSource("input", name, {"var": name}))
                for name in names
            }
            for key, names in self._inputs.items()
        }
        outputs = self._reader.read(inputs)
        if self._reader.notes:
            key, _, why = self._reader.notes[0].partition(": ")
            raise _unsupported(key, why)
        return outputs

    def _add_call(
        self, key: str, llm: Conure, call: ModelRequest, reads: frozenset[str], kind: Any
    ) -> PlaceholderSource:
        self._used_as_text |= reads
        self._llms[key] = llm
        variable = self._fresh_name(key)
        limit = {} if call.timeout_s is None else {"timeout_s": call.timeout_s}
        self._nodes.append(call.node(self._fresh_name(f"{key}_call"), variable, **limit))
        return PlaceholderSource(kind, variable, text_read(variable))

    def _add_client_step(
        self, key: str, module: QueryComponent, inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        if isinstance(module, LoopComponent | BaseStatefulComponent):
            raise NotPlanned(f"a {type(module).__name__} cannot be part of a program")
        names = _output_names(module)
        if len(names) != 1:
            raise NotPlanned(f"a {type(module).__name__} must have one output, got {sorted(names)}")
        (output,) = names
        variable = self._fresh_name(key)
        step = self._fresh_name(f"{key}_step")
        args, deserializers = {}, {}
        for name, value in inputs.items():
            args[name], deserializers[name] = self._argument(value)
        self._nodes.append(
            {"id": step, "op": "client", "name": step, "args": args, "output": variable}
        )

        def function(local: LocalValues, **arguments: Json) -> Json:
            given = {name: deserializers[name](value, local) for name, value in arguments.items()}
            with conure_run():  # calls inside the module are one program
                output_value = module.run_component(**given)[output]
            value: dict[str, Json] = {"value": _encode(output_value, local)}
            if variable in self._used_as_text:  # known after the whole pipeline is read
                value["text"] = validate_and_convert_stringable(output_value)
            return value

        self._functions[step] = function
        text = {"get": [{"var": variable}, "text"]}
        return {output: self._reader.placeholder(PlaceholderSource("step", variable, text))}

    def _argument(self, value: Any) -> tuple[Expression, Deserializer]:
        """Return the expression of a value with placeholders, and the deserializer of its JSON."""
        marks = self._reader.placeholders(value)
        if not marks:
            return {"lit": None}, lambda json, local: value
        if isinstance(value, list):
            parts = [self._argument(each) for each in value]
            return [each for each, _ in parts], lambda json, local: [
                deserialize(item, local) for (_, deserialize), item in zip(parts, json, strict=True)
            ]
        if isinstance(value, ChatMessage):
            return self._message_argument(value)
        if isinstance(value, dict):
            named = {key: self._argument(each) for key, each in value.items()}
            return {"object": {key: each for key, (each, _) in named.items()}}, (
                lambda json, local: {
                    key: deserialize(json[key], local) for key, (_, deserialize) in named.items()
                }
            )
        source = self._reader.sources.get(value) if isinstance(value, str) else None
        if source is None or not source.variable:
            return self._text_argument(value), _decode
        return _source_value(source)

    def _text_argument(self, text: str) -> Expression:
        for mark in self._reader.placeholders(text):
            self._used_as_text |= self._reader.variables_of(mark)
        return self._reader.text(text)

    def _message_argument(self, message: ChatMessage) -> tuple[Expression, Deserializer]:
        """Return the texts of a message, and a function that puts them into a copy of it."""
        texts: list[Expression] = [
            self._text_argument(each.text) if isinstance(each, TextBlock) else None
            for each in message.blocks
        ]

        def with_texts(json: Json, local: LocalValues) -> ChatMessage:
            copy = message.model_copy(deep=True)
            for block, text in zip(copy.blocks, json, strict=True):
                if isinstance(block, TextBlock):
                    block.text = text
            return copy

        return texts, with_texts

    def _leaf_output(self, key: str, outputs: Mapping[str, Any]) -> tuple[str, Deserializer]:
        """Return the variable of a leaf's output, and the deserializer of the output."""
        value: Any = next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)
        marks = self._reader.placeholders(value)
        expression, deserialize = self._argument(value)
        if len(marks) == 1 and value == marks[0] and "var" in expression:
            return expression["var"], deserialize
        variable = self._fresh_name(f"{key}_output")
        node = {"id": self._fresh_name(f"{key}_expr"), "op": "expr", "expr": expression}
        self._nodes.append({**node, "output": variable})
        return variable, deserialize

    def _fresh_name(self, hint: str) -> str:
        return unique_name(GENERATED_NAME.sub("module", hint), self._names)


def _source_value(source: PlaceholderSource) -> tuple[Expression, Deserializer]:
    """Return the expression and the deserializer of a value that exists only on the server."""
    if source.kind == "chat":
        return {"var": source.variable}, lambda json, local: chat_response(json, program="")
    if source.kind == "completion":
        return {"var": source.variable}, lambda json, local: completion_response(json, program="")
    if source.kind == "step":
        return {"get": [{"var": source.variable}, "value"]}, _decode
    return source.text, lambda json, local: local[source.variable]


def _output_names(module: Any) -> set[str]:
    """Return the names of the outputs of a module; a router has those of its components."""
    if isinstance(module, RouterComponent):
        return {name for each in module.components for name in _output_names(each)}
    names: set[str] = module.output_keys.required_keys
    return names


def _encode(value: Any, local: LocalValues) -> Json:
    """Convert a value to JSON; what is not exactly JSON becomes a reference to a local value."""
    kind = type(value)
    if kind is list:
        return [_encode(each, local) for each in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _encode(each, local) for key, each in value.items()}
    is_number = (kind is int and abs(value) < _MAX_INT) or (kind is float and math.isfinite(value))
    if value is None or is_number or kind in (bool, str):
        return value
    reference = f"{_LOCAL}{uuid4()}"  # client steps run in several threads
    local[reference] = value
    return {_LOCAL: reference}


def _decode(value: Json, local: LocalValues) -> Any:
    if isinstance(value, list):
        return [_decode(each, local) for each in value]
    if isinstance(value, dict):
        if value.keys() == {_LOCAL}:
            return local[value[_LOCAL]]
        return {key: _decode(each, local) for key, each in value.items()}
    return value


def _unsupported(key: str, why: str) -> ProgramError:
    return ProgramError("to_program.unsupported", f"module {key!r}: {why}", path=key)
