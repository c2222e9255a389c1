"""Symbolic execution of a QueryPipeline of llama-index-core 0.12.

The reader follows the order of the graph, with placeholders for texts that do not exist yet.
LlamaIndex's own modules that only pass values on (inputs, prompts, packs) run on placeholders; an
LLM becomes a call; any other module is opaque. User code never runs on placeholders.

A join waits for all modules that lead to it, as LlamaIndex documents: `ArgPackComponent` and
`KwargPackComponent` have no required inputs, so core 0.12 would run them first, without inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import networkx
from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.llm import default_completion_to_prompt
from llama_index.core.prompts import SelectorPromptTemplate

from conure.server.program.expressions.evaluate import variables
from conure.server.program.ir import Expression

from ..acceleration.plan_builder import NotPlanned, checked_template, overridden_method
from ..acceleration.prompt_inputs import PLACEHOLDER_FORMAT, PlaceholderInput, with_inputs
from ..acceleration.scope import app_class
from ..llm.llm import Conure
from ..llm.model_request import ModelRequest
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

JOIN_CLASSES = (ArgPackComponent, KwargPackComponent)
GENERATED_NAME = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Name that LlamaIndex generates for a module without a name, such as those of a chain."""
_PLACEHOLDER = re.compile("\ue000[0-9]+\ue001")


class PlaceholderSource(NamedTuple):
    """The value that a placeholder replaces."""

    kind: Literal["chat", "completion", "input", "step"]
    variable: str
    text: Expression
    """Expression of the value's text, for a prompt."""


@dataclass
class PipelineReader:
    """Reads one pipeline; a module is read once all of its inputs are known."""

    pipeline: QueryPipeline
    add_call: Callable[[str, Conure, ModelRequest, frozenset[str], str], PlaceholderSource]
    """Adds an LLM call: module, LLM, request, variables that it reads, kind of its response."""
    add_opaque: Callable[[str, QueryComponent, Mapping[str, Any]], dict[str, Any]]
    """Returns the output of a module that cannot be read, or raises NotPlanned."""
    is_planning: bool = False
    """Plan calls that the pipeline will make itself; otherwise a program replaces the pipeline.

    A planned call may be streamed. Modules that use the stream are not read.
    """
    sources: dict[str, PlaceholderSource] = field(default_factory=dict)
    """The source of each placeholder."""
    notes: list[str] = field(default_factory=list)
    """Modules that were not read, with the reasons."""
    name_prefix: str = ""
    """Names of the enclosing pipelines, each followed by a dot."""

    def placeholder(self, source: PlaceholderSource) -> str:
        """Return the text that replaces a value."""
        for placeholder, known in self.sources.items():
            if known == source:
                return placeholder
        placeholder = PLACEHOLDER_FORMAT.format(len(self.sources))
        self.sources[placeholder] = source
        return placeholder

    def read(
        self, known_inputs: Mapping[str, Mapping[str, Any]], executed: frozenset[str] = frozenset()
    ) -> dict[str, dict[str, Any]]:
        """Return the outputs of all modules that can be read.

        Args:
            known_inputs: known inputs, by module.
            executed: modules that have run; their outputs are in `known_inputs`.
        """
        graph = self.pipeline.dag
        outputs: dict[str, dict[str, Any]] = {}
        for key in networkx.topological_sort(graph):
            if key in executed:
                continue
            module = self.pipeline.module_dict[key]
            try:
                inputs = self._inputs(
                    key, module, dict(known_inputs.get(key, {})), executed, outputs
                )
                outputs[key] = self._output(key, module, {**inputs, **module.partial_dict})
            except NotPlanned as why:
                if str(why):
                    self.notes.append(f"{self.name_prefix}{self._shown_name(key)}: {why}")
        return outputs

    def _shown_name(self, key: str) -> str:
        """Return the name of a module, or its class if LlamaIndex generated the name."""
        return GENERATED_NAME.sub(type(self.pipeline.module_dict[key]).__name__, key)

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
                raise NotPlanned(f"the edge from {self._shown_name(source)} has a function")
            if source not in outputs:
                raise NotPlanned("")  # the note of the source module states the reason
            value = _output_of(edge["src_key"], outputs[source])
            name = edge["dest_key"] or _only_key(
                module.free_req_input_keys, "it must have one required input"
            )
            if name in inputs:
                raise NotPlanned(f"several modules provide its input {name}")
            inputs[name] = value
        missing = module.free_req_input_keys - inputs.keys()
        if missing:
            raise NotPlanned(f"its inputs {sorted(missing)} are not known yet")
        return ordered_by_links(self.pipeline, key, inputs) if is_join(module) else inputs

    def _output(self, key: str, module: QueryComponent, inputs: dict[str, Any]) -> dict[str, Any]:
        kind = type(module)
        if kind is InputComponent:
            return inputs
        if kind in JOIN_CLASSES and getattr(module, "convert_fn", None) is None:
            return _run_module(module, inputs)
        if _has_stream(inputs):
            raise NotPlanned("an input is a stream, which can be read only once")
        if kind is PromptComponent:
            return self._read_prompt(module, inputs)
        if kind in (LLMChatComponent, LLMCompleteComponent):
            return self._read_llm(key, module, inputs)
        if app_class(module) is QueryPipeline:
            return self._read_nested(key, module, inputs)
        return self.add_opaque(f"{self.name_prefix}{key}", module, inputs)

    def _read_nested(self, key: str, pipeline: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        roots, leaves = pipeline.get_root_keys(), pipeline.get_leaf_keys()
        if len(roots) != 1 or len(leaves) != 1:
            raise NotPlanned("a nested pipeline must have one root and one leaf")
        reading = replace(self, pipeline=pipeline, name_prefix=f"{self.name_prefix}{key}.")
        outputs = reading.read({roots[0]: inputs})
        if leaves[0] not in outputs:
            raise NotPlanned("")  # the note of the module that was not read states the reason
        return outputs[leaves[0]]

    def _read_prompt(self, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(module.llm, Conure | None):
            raise NotPlanned("its prompt is formatted for another LLM")
        prompt = module.prompt
        if module.llm is None and isinstance(prompt, SelectorPromptTemplate):
            prompt = prompt.select(None)
        checked_template(module.llm or Conure.model_construct(output_parser=None), prompt)
        printable = {name: self._printable(value) for name, value in inputs.items()}
        output = _run_module(module, printable)
        if set(self.placeholders(output)) - set(self.placeholders(printable)):
            raise NotPlanned("its template contains characters that are reserved for placeholders")
        return {name: self._as_text(value) for name, value in output.items()}

    def _as_text(self, prompt: Any) -> Any:
        """Return a prompt; it is a text, also if it consists of one placeholder for a response."""
        source = self.sources.get(prompt) if isinstance(prompt, str) else None
        if source is None:
            return prompt
        return self.placeholder(PlaceholderSource("input", "", source.text))

    def _printable(self, value: Any) -> Any:
        """Return a list with placeholders as a placeholder of its printed text."""
        if isinstance(value, dict):
            raise NotPlanned("a dict cannot be the input of a prompt")
        if not (isinstance(value, list) and self.placeholders(value)):
            return value
        texts = [self.text(each) for each in value]
        return self.placeholder(PlaceholderSource("input", "", {"pyrepr": [texts]}))

    def _read_llm(self, key: str, module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        llm = module.llm
        if not isinstance(llm, Conure):
            raise NotPlanned(f"its LLM is a {type(llm).__name__}")
        if module.streaming and not self.is_planning:
            raise NotPlanned("its response is streamed")
        if (name := overridden_method(llm)) is not None:
            if self.is_planning:
                raise NotPlanned(f"its LLM is a {type(llm).__name__}, which overrides {name!r}")
            return self.add_opaque(f"{self.name_prefix}{key}", module, inputs)
        call = self._request(module, inputs)
        if _is_checked(llm, call) and not self.is_planning:
            return self.add_opaque(f"{self.name_prefix}{key}", module, inputs)
        marks = self.placeholders([call.messages, call.prompt])
        if marks:
            read = [PlaceholderInput(mark, self.sources[mark].text) for mark in marks]
            call_with_inputs = with_inputs(call, read)
            assert call_with_inputs is not None  # there are placeholders
            call = call_with_inputs
        reads = frozenset().union(*(self.variables_of(mark) for mark in marks))
        is_chat = type(module) is LLMChatComponent
        kind: Literal["chat", "completion"] = "chat" if is_chat else "completion"
        origin = self.add_call(f"{self.name_prefix}{key}", llm, call, reads, kind)
        if module.streaming:
            raise NotPlanned("")
        return {"output": self.placeholder(origin)}

    def _request(self, module: Any, inputs: dict[str, Any]) -> ModelRequest:
        """Return the request of an LLM component, with placeholders."""
        llm = module.llm
        is_chat = type(module) is LLMChatComponent
        if not is_chat and llm.completion_to_prompt is not default_completion_to_prompt:
            raise NotPlanned("its LLM has a custom completion_to_prompt")
        if not llm.is_chat_model and llm.messages_to_prompt is not messages_to_prompt:
            raise NotPlanned("its LLM has a custom messages_to_prompt")
        if not (is_chat and _are_messages(inputs["messages"])):
            inputs = {name: self._printable(value) for name, value in inputs.items()}
        given = dict(inputs)
        inputs = _unless_rejected(lambda: module.validate_component_inputs(given))
        request: ModelRequest = (
            llm.chat_request(inputs["messages"], {})
            if is_chat
            else llm.completion_request(inputs["prompt"], {}, formatted=True)
        )
        return request

    def placeholders(self, value: Any) -> list[str]:
        """Return the placeholders in a value."""
        return list(dict.fromkeys(_PLACEHOLDER.findall(_flat_text(value))))

    def variables_of(self, placeholder: str) -> frozenset[str]:
        """Return the variables that a placeholder's text reads."""
        return variables(self.sources[placeholder].text)

    def text(self, value: Any) -> Expression:
        """Return an expression for the text of a value with placeholders."""
        if not self.placeholders(value):
            return {"lit": validate_and_convert_stringable(value)}
        if isinstance(value, ChatMessage):
            value = str(value)
        if not isinstance(value, str):
            raise NotPlanned("a nested list cannot be printed on the server")
        pieces: list[Expression] = []
        end = 0
        for found in _PLACEHOLDER.finditer(value):
            if value[end : found.start()]:
                pieces.append(value[end : found.start()])
            pieces.append(self.sources[found.group()].text)
            end = found.end()
        if value[end:]:
            pieces.append(value[end:])
        return pieces[0] if len(pieces) == 1 else {"concat": pieces}


def is_join(module: QueryComponent) -> bool:
    """Return whether a module packs its inputs."""
    return isinstance(module, JOIN_CLASSES)


def is_waiting(pipeline: QueryPipeline, key: str, executed: set[str]) -> bool:
    """Return whether a join still waits for a module that leads to it."""
    return is_join(pipeline.module_dict[key]) and any(
        source not in executed for source, _ in pipeline.dag.in_edges(key)
    )


def ordered_by_links(
    pipeline: QueryPipeline, key: str, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the inputs of a module, inputs from outside of the pipeline first."""
    linked = [edge["dest_key"] for _, _, edge in pipeline.dag.in_edges(key, data=True)]
    names = [*(name for name in inputs if name not in linked), *linked]
    return {name: inputs[name] for name in names if name in inputs}


def _run_module(module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the output of one of LlamaIndex's own modules."""
    return _unless_rejected(lambda: module.run_component(**inputs))


def _unless_rejected(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `make`; if it raises ValueError, the pipeline will raise it later."""
    try:
        return make()
    except ValueError as problem:
        raise NotPlanned(str(problem)) from problem


def _output_of(src_key: str | None, outputs: Mapping[str, Any]) -> Any:
    if src_key is not None:
        if src_key not in outputs:
            raise NotPlanned(f"its source has no output {src_key!r}")
        return outputs[src_key]
    return outputs[_only_key(outputs.keys(), "its source must have one output")]


def _only_key(keys: Any, rule: str) -> str:
    if len(keys) != 1:
        raise NotPlanned(f"{rule}, got {sorted(keys)}")
    return str(next(iter(keys)))


def _has_stream(value: Any) -> bool:
    """Return whether a value is an iterator, or a list or dict that contains one."""
    if isinstance(value, Mapping):
        return any(map(_has_stream, value.values()))
    return isinstance(value, Iterator) or (
        isinstance(value, list | tuple) and any(map(_has_stream, value))
    )


def _is_checked(llm: Conure, call: ModelRequest) -> bool:
    """Return whether the LLM checks the answer: `answer_checks` may raise or change it."""
    return bool(
        call.output.get("constraint") or call.extra.get("tools") or llm.output_parser is not None
    )


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, ChatMessage) for each in value)


def _flat_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, ChatMessage):
        return str(value)
    if isinstance(value, Mapping):
        return "".join(map(_flat_text, value.values()))
    if isinstance(value, list | tuple):
        return "".join(map(_flat_text, value))
    return ""
