"""Reading a QueryPipeline of core 0.12 before it runs: what its modules will be given.

A pipeline is read in the order of its graph, with marks in place of texts that do not exist
yet. LlamaIndex's own modules that only pass values on (inputs, prompts, packs) are run on
them; an LLM becomes a call; everything else, and an edge with a function, is `opaque`.
Knows `module_dict` and `dag`; refuses to run code of the user on marks.

Joins wait for all that leads to them, as their documentation says: `ArgPackComponent` and
`KwargPackComponent` have no required inputs, so that core 0.12 itself runs them first, on
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import networkx
from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.llm import default_completion_to_prompt

from conure.server.program.ir import Expression

from .call import Call
from .core012 import (
    ArgPackComponent,
    InputComponent,
    KwargPackComponent,
    LLMChatComponent,
    LLMCompleteComponent,
    PromptComponent,
    QueryComponent,
    QueryPipeline,
    validate_and_convert_stringable,
)
from .draft import NotPlanned, plain
from .llm import Conure
from .plan import SLOT, Slot, with_slots
from .scope import own_kind

PACKS = (ArgPackComponent, KwargPackComponent)
RANDOM = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Name of a module that is given none, as those of a chain."""
_MARK = re.compile("\ue000[0-9]+\ue001")


class Origin(NamedTuple):
    """What a mark stands for."""

    kind: Literal["chat", "completion", "input", "step"]
    variable: str
    text: Expression
    """Its text, for a prompt."""


@dataclass
class Reading:
    """One reading of one pipeline; modules are read when all they are given is known."""

    pipeline: QueryPipeline
    call: Callable[[str, Conure, Call, frozenset[str], str], Origin]
    """Makes an LLM's call: module, LLM, call, variables it reads, kind of its response."""
    opaque: Callable[[str, QueryComponent, Mapping[str, Any]], dict[str, Any]]
    """Makes the output of a module that is not read; may raise NotPlanned."""
    streams: bool = False
    """Whether calls of modules that stream are made; what reads them is never read."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """By mark."""
    notes: list[str] = field(default_factory=list)
    """What was not read, and why."""
    within: str = ""
    """Names of the pipelines that this one is a module of, each with a dot behind it."""

    def mark(self, origin: Origin) -> str:
        """A text that stands for something that is not there yet."""
        for mark, known in self.origins.items():
            if known == origin:
                return mark
        mark = SLOT.format(len(self.origins))
        self.origins[mark] = origin
        return mark

    def read(
        self, given: Mapping[str, Mapping[str, Any]], executed: frozenset[str] = frozenset()
    ) -> dict[str, dict[str, Any]]:
        """Outputs of all modules that can be read.

        Args:
            given: inputs that modules have, by module.
            executed: modules that ran; what they made is among `given`.
        """
        graph = self.pipeline.dag
        outputs: dict[str, dict[str, Any]] = {}
        for key in networkx.topological_sort(graph):
            if key in executed:
                continue
            module = self.pipeline.module_dict[key]
            try:
                inputs = self._inputs(key, module, dict(given.get(key, {})), executed, outputs)
                outputs[key] = self._output(key, module, {**inputs, **module.partial_dict})
            except NotPlanned as why:
                if str(why):
                    name = RANDOM.sub(type(module).__name__, key)
                    self.notes.append(f"{self.within}{name}: {why}")
        return outputs

    def _inputs(
        self,
        key: str,
        module: QueryComponent,
        inputs: dict[str, Any],
        executed: frozenset[str],
        outputs: Mapping[str, dict[str, Any]],
    ) -> dict[str, Any]:
        for source, _, edge in self.pipeline.dag.in_edges(key, data=True):
            if source in executed:
                continue
            if edge["condition_fn"] is not None or edge["input_fn"] is not None:
                raise NotPlanned(f"the edge from {source} has a function")
            if source not in outputs:
                raise NotPlanned("")  # the module before it says why
            value = _from(edge["src_key"], outputs[source])
            name = edge["dest_key"] or _only(module.free_req_input_keys, key)
            if name in inputs:
                raise NotPlanned(f"its input {name} comes from several modules")
            inputs[name] = value
        missing = module.free_req_input_keys - inputs.keys()
        if missing:
            raise NotPlanned(f"it waits for {sorted(missing)}")
        return in_order_of_links(self.pipeline, key, inputs) if is_join(module) else inputs

    def _output(self, key: str, module: QueryComponent, inputs: dict[str, Any]) -> dict[str, Any]:
        kind = type(module)
        if kind is InputComponent:
            return inputs
        if kind in PACKS and getattr(module, "convert_fn", None) is None:
            return _run(module, inputs)
        if kind is PromptComponent:
            return self._prompt(module, inputs)
        if kind in (LLMChatComponent, LLMCompleteComponent):
            return self._llm(key, module, inputs)
        if own_kind(module) is QueryPipeline:
            return self._nested(key, module, inputs)
        return self.opaque(f"{self.within}{key}", module, inputs)

    def _nested(self, key: str, pipeline: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        roots, leaves = pipeline.get_root_keys(), pipeline.get_leaf_keys()
        if len(roots) != 1 or len(leaves) != 1:
            raise NotPlanned("a pipeline within one has one root and one leaf")
        reading = replace(self, pipeline=pipeline, within=f"{self.within}{key}.")
        outputs = reading.read({roots[0]: inputs})
        if leaves[0] not in outputs:
            raise NotPlanned("")  # the module that was not read says why
        return outputs[leaves[0]]

    def _prompt(self, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(module.llm, Conure | None):
            raise NotPlanned("its prompt is formatted for another LLM")
        prompt = module.prompt
        plain(module.llm or Conure.model_construct(output_parser=None), prompt)
        given = {name: self._stringable(value) for name, value in inputs.items()}
        made = _run(module, given)
        if set(self.marks(made)) - set(self.marks(given)):
            raise NotPlanned("its template has characters that are used as marks here")
        return made

    def _stringable(self, value: Any) -> Any:
        """A list is printed as Python prints it, which the server does for what only it has."""
        if isinstance(value, dict):
            raise NotPlanned("a dict is no input of a prompt")
        if not (isinstance(value, list) and self.marks(value)):
            return value
        texts = [self.text(each) for each in value]
        return self.mark(Origin("input", "", {"pyrepr": [texts]}))

    def _llm(self, key: str, module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        llm = module.llm
        if not isinstance(llm, Conure):
            raise NotPlanned(f"its LLM is a {type(llm).__name__}")
        if module.streaming and not self.streams:
            raise NotPlanned("its response is streamed")
        is_chat = type(module) is LLMChatComponent
        if not is_chat and llm.completion_to_prompt is not default_completion_to_prompt:
            raise NotPlanned("its LLM has a completion_to_prompt of its own")
        if not llm.is_chat_model and llm.messages_to_prompt is not messages_to_prompt:
            raise NotPlanned("its LLM has a messages_to_prompt of its own")
        if not (is_chat and _are_messages(inputs["messages"])):
            inputs = {name: self._stringable(value) for name, value in inputs.items()}
        given = dict(inputs)
        inputs = _accepted(lambda: module.validate_component_inputs(given))
        if is_chat:
            call = llm.chat_call(inputs["messages"], {})
        else:
            call = llm.completion_call(inputs["prompt"], {}, formatted=True)
        marks = self.marks([call.messages, call.prompt])
        if marks:
            slots = [Slot(mark, self.origins[mark].text) for mark in marks]
            made = with_slots(call, slots)
            assert made is not None  # the marks are there
            call = made
        reads = frozenset().union(*(self.reads(mark) for mark in marks))
        kind: Literal["chat", "completion"] = "chat" if is_chat else "completion"
        origin = self.call(f"{self.within}{key}", llm, call, reads, kind)
        if module.streaming:
            raise NotPlanned("")
        return {"output": self.mark(origin)}

    def marks(self, value: Any) -> list[str]:
        """The marks in a value."""
        return list(dict.fromkeys(_MARK.findall(_flat(value))))

    def reads(self, mark: str) -> frozenset[str]:
        """The variables that a mark stands for."""
        return _variables(self.origins[mark].text)

    def text(self, value: Any) -> Expression:
        """An expression for the text of a value with marks in it."""
        if not self.marks(value):
            return {"lit": validate_and_convert_stringable(value)}
        if isinstance(value, ChatMessage):
            value = str(value)
        if not isinstance(value, str):
            raise NotPlanned("a list in a list is printed by code of its own")
        pieces: list[Expression] = []
        end = 0
        for found in _MARK.finditer(value):
            if value[end : found.start()]:
                pieces.append(value[end : found.start()])
            pieces.append(self.origins[found.group()].text)
            end = found.end()
        if value[end:]:
            pieces.append(value[end:])
        return pieces[0] if len(pieces) == 1 else {"concat": pieces}


def is_join(module: QueryComponent) -> bool:
    """Whether a module packs what comes to it."""
    return isinstance(module, PACKS)


def is_held_back(pipeline: QueryPipeline, key: str, executed: set[str]) -> bool:
    """Whether a join still waits for a module that leads to it."""
    return is_join(pipeline.module_dict[key]) and any(
        source not in executed for source, _ in pipeline.dag.in_edges(key)
    )


def in_order_of_links(
    pipeline: QueryPipeline, key: str, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Inputs of a module, those from outside of the pipeline first."""
    linked = [edge["dest_key"] for _, _, edge in pipeline.dag.in_edges(key, data=True)]
    names = [*(name for name in inputs if name not in linked), *linked]
    return {name: inputs[name] for name in names if name in inputs}


def _run(module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What a module of LlamaIndex makes of its inputs."""
    return _accepted(lambda: module.run_component(**inputs))


def _accepted(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What LlamaIndex makes; what it refuses, it refuses again when the pipeline gets there."""
    try:
        return make()
    except ValueError as problem:
        raise NotPlanned(str(problem)) from problem


def _from(src_key: str | None, outputs: Mapping[str, Any]) -> Any:
    if src_key is not None:
        if src_key not in outputs:
            raise NotPlanned(f"its source makes no {src_key!r}")
        return outputs[src_key]
    return outputs[_only(outputs.keys(), "its source")]


def _only(keys: Any, what: str) -> str:
    if len(keys) != 1:
        raise NotPlanned(f"{what} has not one key but {sorted(keys)}")
    return str(next(iter(keys)))


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, ChatMessage) for each in value)


def _flat(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, ChatMessage):
        return str(value)
    if isinstance(value, Mapping):
        return "".join(map(_flat, value.values()))
    if isinstance(value, list | tuple):
        return "".join(map(_flat, value))
    return ""


def _variables(expression: Expression) -> frozenset[str]:
    if isinstance(expression, dict):
        if "var" in expression:
            return frozenset((expression["var"],))
        if "lit" in expression:
            return frozenset()
        expression = list(expression.values())
    if isinstance(expression, list):
        return frozenset().union(*map(_variables, expression))
    return frozenset()
