"""A QueryPipeline of core 0.12 as a program: submit it, run it, and get the pipeline's result.

What `pipeline` reads goes whole: prompts, LLMs and packs are the server's, and every other
module is a client step, which runs here when its inputs are there. Knows nodes and how
values travel. Refuses, by module, what has no place in a program: an edge with a function,
a module that streams or loops.

Kept true: no code of the user runs while a pipeline is read; a client step gets what the
module would get, LLM responses included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from llama_index.core.schema import NodeWithScore, TextNode

from conure.server.program.errors import ProgramError
from conure.server.program.ir import Expression, Json

from ..client import Client, Result
from ..names import fresh
from .call import Call
from .core012 import (
    BaseStatefulComponent,
    InputComponent,
    LoopComponent,
    QueryComponent,
    QueryPipeline,
    validate_and_convert_stringable,
)
from .draft import NotPlanned
from .llm import Conure
from .messages import chat_response, completion_response
from .pipeline import RANDOM, Origin, Reading
from .plan import text_read

Revive: TypeAlias = Callable[[Json], Any]

_NODE = "__llamaindex_node__"
"""Key under which a retrieved node travels as a value among other values."""


def to_program(pipeline: QueryPipeline, *, name: str = "pipeline") -> Compiled:
    """Read a QueryPipeline into a program that runs whole on a server.

    Args:
        pipeline: whose LLMs are `Conure`.
        name: of the program.

    Raises:
        ProgramError: `to_program.unsupported`, with the module that has no place in it.
    """
    return Compiled(pipeline, name)


class Compiled:
    """A pipeline as a program."""

    def __init__(self, pipeline: QueryPipeline, name: str) -> None:
        self._pipeline = pipeline
        self._nodes: list[dict[str, Json]] = []
        self._taken: set[str] = set()
        self._printed: set[str] = set()
        self.functions: dict[str, Callable[..., Json]] = {}
        """What the client steps run, by name; to be called with their arguments by name."""
        self._inputs = {key: self._roots(key) for key in pipeline.get_root_keys()}
        names = [name for inputs in self._inputs.values() for name in inputs]
        if len(set(names)) != len(names):
            raise _unsupported("inputs", f"roots share the names of inputs: {sorted(names)}")
        self.inputs: list[str] = names
        """The program's inputs: texts."""
        self._taken |= set(names)
        self._reading = Reading(pipeline, self._call, self._step)
        outputs = self._read()
        self._leaves = {key: self._leaf(key, outputs[key]) for key in pipeline.get_leaf_keys()}
        self.outputs: list[str] = [variable for variable, _ in self._leaves.values()]
        """The variables that the pipeline's result is made of."""
        self.program: dict[str, Json] = {
            "name": name,
            "variables": {each: {"type": "string"} for each in names},
            "nodes": self._nodes,
            "outputs": list(dict.fromkeys(self.outputs)),
        }
        """The program, as JSON."""

    def __repr__(self) -> str:
        return f"Compiled({self.program['name']!r}, {len(self._nodes)} nodes)"

    def run(self, client: Client, **inputs: str) -> Any:
        """Run the pipeline on a server, its client steps in threads here.

        Args:
            client: of the server.
            **inputs: as of `QueryPipeline.run`, by name.

        Returns:
            What the pipeline's one leaf made; of several leaves a dict, by module.

        Raises:
            ProgramError: if the inputs are not those of the pipeline.
            ConureError: if the program failed; its cause is what a module raised, if one did.
        """
        return self.execute(client, **inputs)[0]

    def execute(self, client: Client, **inputs: str) -> tuple[Any, Result]:
        """`run`, with the program's id and receipt."""
        if inputs.keys() != set(self.inputs):
            raise ProgramError(
                "to_program.inputs",
                f"the pipeline has the inputs {sorted(self.inputs)}, and was given "
                f"{sorted(inputs)}",
            )
        result = client.run(self.program, inputs=inputs, functions=self.functions)
        made = {
            key: revive(result.outputs[variable])
            for key, (variable, revive) in self._leaves.items()
        }
        return (next(iter(made.values())) if len(made) == 1 else made), result

    def _roots(self, key: str) -> list[str]:
        """Names of the inputs of a root."""
        module = self._pipeline.module_dict[key]
        if type(module) is InputComponent:
            edges = self._pipeline.dag.out_edges(key, data=True)
            if any(edge["src_key"] is None for _, _, edge in edges):
                raise _unsupported(key, "its edges do not say which input they carry: src_key")
            return list(dict.fromkeys(edge["src_key"] for _, _, edge in edges))
        return sorted(module.free_req_input_keys)

    def _read(self) -> dict[str, dict[str, Any]]:
        given = {
            key: {name: self._reading.mark(Origin("input", name, {"var": name})) for name in names}
            for key, names in self._inputs.items()
        }
        outputs = self._reading.read(given)
        if self._reading.notes:
            key, _, why = self._reading.notes[0].partition(": ")
            raise _unsupported(key, why)
        return outputs

    def _call(self, key: str, llm: Conure, call: Call, reads: frozenset[str], kind: Any) -> Origin:
        self._printed |= reads
        variable = self._fresh(key)
        self._nodes.append(call.node(self._fresh(f"{key}_call"), variable))
        return Origin(kind, variable, text_read(variable))

    def _step(self, key: str, module: QueryComponent, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(module, LoopComponent | BaseStatefulComponent):
            raise NotPlanned(f"a {type(module).__name__} has no place in a program")
        names = module.output_keys.required_keys
        if len(names) != 1:
            raise NotPlanned(f"a {type(module).__name__} with outputs {sorted(names)} has no place")
        (output,) = names
        variable = self._fresh(key)
        step = self._fresh(f"{key}_step")
        args, revivers = {}, {}
        for name, value in inputs.items():
            args[name], revivers[name] = self._argument(value)
        self._nodes.append(
            {"id": step, "op": "client", "name": step, "args": args, "output": variable}
        )

        def function(**given: Json) -> Json:
            made = module.run_component(
                **{name: revivers[name](value) for name, value in given.items()}
            )[output]
            value: dict[str, Json] = {"value": _encode(made)}
            if variable in self._printed:  # known once all of the pipeline is read
                value["text"] = validate_and_convert_stringable(made)
            return value

        self.functions[step] = function
        text = {"get": [{"var": variable}, "text"]}
        return {output: self._reading.mark(Origin("step", variable, text))}

    def _argument(self, value: Any) -> tuple[Expression, Revive]:
        """An expression for a value with marks in it, and what makes the value of its JSON."""
        marks = self._reading.marks(value)
        if not marks:
            return {"lit": _encode(value)}, _decode
        if isinstance(value, list):
            parts = [self._argument(each) for each in value]
            return [each for each, _ in parts], lambda given: [
                revive(item) for (_, revive), item in zip(parts, given, strict=True)
            ]
        if isinstance(value, dict):
            named = {key: self._argument(each) for key, each in value.items()}
            return {"object": {key: each for key, (each, _) in named.items()}}, lambda given: {
                key: revive(given[key]) for key, (_, revive) in named.items()
            }
        if value != marks[0]:
            for mark in marks:
                self._printed |= self._reading.reads(mark)
            return self._reading.text(value), _decode
        return _whole(self._reading.origins[value])

    def _leaf(self, key: str, outputs: Mapping[str, Any]) -> tuple[str, Revive]:
        """The variable that a leaf's output is, and what makes the output of it."""
        value: Any = next(iter(outputs.values())) if len(outputs) == 1 else dict(outputs)
        marks = self._reading.marks(value)
        expression, revive = self._argument(value)
        if len(marks) == 1 and value == marks[0] and "var" in expression:
            return expression["var"], revive
        variable = self._fresh(f"{key}_output")
        node = {"id": self._fresh(f"{key}_expr"), "op": "expr", "expr": expression}
        self._nodes.append({**node, "output": variable})
        return variable, revive

    def _fresh(self, hint: str) -> str:
        return fresh(RANDOM.sub("module", hint), self._taken)


def _whole(origin: Origin) -> tuple[Expression, Revive]:
    """A thing that only the server has, as what it is."""
    if origin.kind == "chat":
        return {"var": origin.variable}, lambda given: chat_response(given, program="")
    if origin.kind == "completion":
        return {"var": origin.variable}, lambda given: completion_response(given, program="")
    if origin.kind == "step":
        return {"get": [{"var": origin.variable}, "value"]}, _decode
    return origin.text, _decode


def _encode(value: Any) -> Json:
    """A value as JSON; retrieved nodes are allowed among it."""
    if isinstance(value, NodeWithScore) and type(value.node) is TextNode:
        return {_NODE: {"node": value.node.to_dict(), "score": value.score}}
    if isinstance(value, list):
        return [_encode(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(each) for key, each in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return msgspec.to_builtins(value)
    raise ProgramError(
        "llamaindex.not_json",
        f"a {type(value).__name__} cannot travel as JSON; let the module return text, "
        "numbers, lists, dicts with text keys, or text nodes",
    )


def _decode(value: Json) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if isinstance(value, dict):
        if value.keys() == {_NODE}:
            found = value[_NODE]
            return NodeWithScore(node=TextNode.from_dict(found["node"]), score=found["score"])
        return {key: _decode(each) for key, each in value.items()}
    return value


def _unsupported(key: str, why: str) -> ProgramError:
    return ProgramError("to_program.unsupported", f"module {key!r}: {why}", path=key)
