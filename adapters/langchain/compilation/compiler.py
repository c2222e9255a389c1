"""Reads a LangChain chain into a program, from the structure of the chain.

Responsibility: each supported kind of Runnable, applied to a symbolic value. Functions become
client steps. Unsupported Runnables are rejected with their class and position.

Invariants: reading a chain runs no user code; the program returns what the chain would return, or
fails where the chain would fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any, Final, cast

from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableConfig,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableBindingBase, coerce_to_runnable
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.tools import BaseTool

from ..chat.call_options import num_answers_of
from ..chat.model import ChatConure
from .chain_graph import ChainGraph, ChainPosition, unsupported
from .compiled_chain import CompiledChain
from .control_flow import CONTROL, read_control_flow
from .prompts import render
from .traversal import is_opaque, models_of
from .values import (
    VALUE_KINDS,
    AnswerTextValue,
    AnswerValue,
    BranchedValue,
    ClientValue,
    MappedValue,
    PromptTurnsValue,
    Record,
    Turn,
    Value,
)

_TEXT_METHODS: Final[dict[Any, str]] = {str.strip: "strip", str.lower: "lower"}
"""Functions that have an operator on the server."""


def to_program(
    runnable: Any, *, inputs: Iterable[str] | None = None, name: str | None = None
) -> CompiledChain:
    """Compile a chain to a program that runs as a whole on a server.

    Args:
        runnable: a Runnable, or something that LangChain coerces to one (a dict, a function).
        inputs: keys of the input dict. None: the input may be any value.
        name: of the program. None: the chain's own name.

    Raises:
        ProgramError: `to_program.unsupported`, with the class and its position in the chain.
    """
    chain = coerce_to_runnable(runnable)
    graph = ChainGraph(name or getattr(chain, "name", None) or "chain")
    value: Value = ClientValue(graph.root, lambda input_value: input_value)
    if inputs is not None:
        root = value
        value = Record({key: item_of(root, key, ChainPosition("chain", "")) for key in inputs})
    position = ChainPosition("chain", "answer")
    result = ChainCompiler(graph).read(chain, value, position)
    keys = list(value.fields) if isinstance(value, Record) else None
    recipe = (_compile_again, (runnable, keys, name))
    return CompiledChain(graph, result, position, recipe=recipe)


def _compile_again(runnable: Any, inputs: list[str] | None, name: str | None) -> CompiledChain:
    return to_program(runnable, inputs=inputs, name=name)


class ChainCompiler:
    """Reads one chain."""

    def __init__(self, graph: ChainGraph) -> None:
        self.graph = graph

    def read(self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition) -> Value:
        """Return the symbolic output of a Runnable."""
        if is_opaque(runnable) and not isinstance(runnable, BasePromptTemplate):
            return self._read_functions([runnable], value, position)
        if isinstance(runnable, RunnableSequence):
            return self._read_sequence(runnable, value, position)
        if isinstance(runnable, RunnableParallel):
            branches = runnable.steps__.items()
            return Record({key: self.read(r, value, position.branch(key)) for key, r in branches})
        if isinstance(runnable, RunnableAssign):
            return self._read_assign(runnable, value, position)
        if isinstance(runnable, RunnablePick):
            return _read_pick(runnable, value, position)
        if isinstance(runnable, BasePromptTemplate):
            return render(self.graph, runnable, value, position)
        if isinstance(runnable, ChatConure):
            return self._read_model(runnable, {}, value, position)
        return self._read_step(runnable, value, position)

    def _read_step(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        """Read a Runnable that is not a prompt, a model or a composition."""
        if type(runnable) is StrOutputParser:
            return _read_text_parser(runnable, value, position)
        if isinstance(runnable, RunnableLambda) and _itemgetter_key(runnable) is not None:
            return self.item(value, cast(tuple[Any], _itemgetter_key(runnable))[0], position)
        if _is_passthrough(runnable):
            return value
        computed = self._read_operator(runnable, value, position)
        if computed is not None:
            return computed
        if _is_function(runnable):
            return self._read_functions([runnable], value, position)
        if isinstance(runnable, CONTROL):
            return read_control_flow(self, runnable, value, position)
        return self._read_wrapper(runnable, value, position)

    def item(self, value: Value, key: Any, position: ChainPosition) -> Value:
        """Return the item of a value under a key."""
        return item_of(value, key, position)

    def _read_wrapper(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        """Resolve a configurable Runnable or a binding, and read the result."""
        if isinstance(runnable, DynamicRunnable):
            concrete, _ = runnable.prepare(cast(RunnableConfig, dict(position.config)))
            return self.read(concrete, value, position)
        if isinstance(runnable, RunnableBinding):
            return self._read_binding(runnable, value, position)
        raise unsupported(
            position,
            f"{type(runnable).__name__} cannot be part of a program; if it calls no model, wrap it "
            "in a function: RunnableLambda(x.invoke)",
        )

    def _read_sequence(
        self, sequence: RunnableSequence[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        steps = sequence.steps
        last_call = max((i for i, step in enumerate(steps) if _is_model(step)), default=-1)
        hint = position.hint if sequence.name is None else sequence.name
        num_calls = index = 0
        while index < len(steps):
            # The sequence's last call is named after the position; earlier calls are numbered.
            step_hint = hint
            if _is_model(steps[index]) and index != last_call:
                num_calls += 1
                step_hint = f"{hint}_{num_calls}"
            step_position = position.step(index, step_hint)
            functions: list[Runnable[Any, Any]] = []
            computed = self._read_operator(steps[index], value, step_position)
            if computed is None:
                functions = self._consecutive_functions(steps, index)
            if computed is not None:
                value = computed
            elif functions:
                value = self._read_functions(functions, value, step_position)
            else:
                value = self.read(steps[index], value, step_position)
            index += max(1, len(functions))
        return value

    def _consecutive_functions(
        self, steps: list[Runnable[Any, Any]], start: int
    ) -> list[Runnable[Any, Any]]:
        """Return consecutive functions; in one step, values between them need not be JSON."""
        end = start
        while end < len(steps) and _is_function(steps[end]):
            end += 1
        return steps[start:end]

    def _read_operator(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
    ) -> Value | None:
        """Return the output of a built-in function, if the server has an operator for it."""
        is_lambda = isinstance(runnable, RunnableLambda) and not is_opaque(runnable)
        function = getattr(runnable, "func", None) if is_lambda else None
        if isinstance(value, AnswerTextValue) and (name := _TEXT_METHODS.get(function)) is not None:
            text = value.call.text
            return AnswerTextValue(
                self.graph.add_expression(position.hint, lambda: {name: [text()]})
            )
        separator = _separator(function)
        if (
            separator is not None
            and isinstance(value, MappedValue)
            and isinstance(value.value, AnswerTextValue)
        ):
            names = self.graph.exported_variable(value, position)
            joined = {"join": [{"var": names}, separator]}
            return AnswerTextValue(self.graph.add_expression(position.hint, lambda: joined))
        return None

    def _read_functions(
        self, runnables: list[Runnable[Any, Any]], value: Value, position: ChainPosition
    ) -> ClientValue:
        if _holds_prompt(value) and not isinstance(_unbound(runnables[0]), BaseLanguageModel):
            raise unsupported(
                position,
                f"{runnables[0].get_name()} gets a prompt, whose text exists only on the server; "
                "put the function before the prompt or after the model",
            )
        name = _plain_name(runnables[-1])
        return self.graph.add_client_step(name, tuple(runnables), value, position)

    def _read_assign(
        self, runnable: RunnableAssign, value: Value, position: ChainPosition
    ) -> Value:
        assigned = self.read(runnable.mapper, value, position)
        assert isinstance(assigned, Record)
        if isinstance(value, Record):
            return Record({**value.fields, **assigned.fields}, value.rest)
        if isinstance(value, ClientValue):
            return Record(assigned.fields, value.then(_require_dict, step="dict"))
        raise unsupported(
            position, f"RunnablePassthrough.assign requires a dict, got {_described(value)}"
        )

    def _read_binding(
        self, binding: RunnableBinding[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        if binding.config_factories:
            raise unsupported(
                position, "listeners are not called for a chain that runs on a server; remove them"
            )
        config = cast(Mapping[str, Any], binding.config or {})
        hint = config.get("run_name") or position.hint
        step_position = position._replace(hint=str(hint), config={**position.config, **config})
        if is_opaque(binding.bound) and not isinstance(binding.bound, BasePromptTemplate):
            return self._read_functions([binding], value, step_position)
        if isinstance(binding.bound, ChatConure):
            return self._read_model(binding.bound, binding.kwargs, value, step_position)
        if isinstance(binding.bound, RunnableBinding) and binding.kwargs:
            inner = binding.bound
            merged = inner.model_copy(update={"kwargs": {**inner.kwargs, **binding.kwargs}})
            return self.read(merged, value, step_position)
        if binding.kwargs and not _is_function(binding.bound):
            names = ", ".join(binding.kwargs)
            kind = type(binding.bound).__name__
            raise unsupported(
                position, f"{kind} does not use the arguments that are bound to it: {names}"
            )
        if binding.kwargs:
            return self._read_functions([binding], value, step_position)
        return self.read(binding.bound, value, step_position)

    def _read_model(
        self, model: ChatConure, kwargs: Mapping[str, Any], value: Value, position: ChainPosition
    ) -> AnswerValue:
        prompt = self._prompt(value, position)
        try:
            model.sampling(kwargs)
            num_answers = num_answers_of(model.n, kwargs)
        except ValueError as problem:
            raise unsupported(position, str(problem)) from problem
        if num_answers > 1:
            raise unsupported(
                position,
                f"n={num_answers} requests several answers, but a chain uses only the first; "
                "remove n, or run several calls in parallel",
            )

        def node(node_id: str, variable: str, form: str) -> Any:
            return model.node(node_id, variable, prompt.wire(), kwargs, form=form)

        call = self.graph.add_call(position.hint, node)
        # With tools, the answer is more than its text.
        call.is_message = bool(kwargs.get("tools"))
        return AnswerValue(call)

    def _prompt(self, value: Value, position: ChainPosition) -> PromptTurnsValue:
        """Return the prompt that a chat model makes of a value."""
        if isinstance(value, PromptTurnsValue):
            return value
        if isinstance(value, ClientValue):
            return PromptTurnsValue(({"splice": self.graph.view_variable(value, "messages")},))
        if isinstance(value, AnswerTextValue):
            return PromptTurnsValue((Turn("user", (value.call.segment,)),))
        if isinstance(value, BranchedValue):
            lists = self.graph.map_bodies(
                value, lambda each: self._prompt(each, position).expression
            )
            return PromptTurnsValue(({"splice": value.outputs.export(lists)},))
        raise unsupported(
            position, f"a chat model requires a prompt, text or messages, got {_described(value)}"
        )


def _is_model(runnable: Runnable[Any, Any]) -> bool:
    return isinstance(_unbound(runnable), ChatConure)


def _unbound(runnable: Runnable[Any, Any]) -> Runnable[Any, Any]:
    while isinstance(runnable, RunnableBindingBase):
        runnable = runnable.bound
    return runnable


def _is_passthrough(runnable: Runnable[Any, Any]) -> bool:
    return (
        isinstance(runnable, RunnablePassthrough)
        and runnable.func is None
        and runnable.afunc is None
    )


def _is_function(runnable: Runnable[Any, Any]) -> bool:
    """Return whether a Runnable is user code or a parser, which the server cannot run."""
    if is_opaque(runnable):
        return not isinstance(runnable, BasePromptTemplate)
    if isinstance(runnable, RunnableLambda):
        return _itemgetter_key(runnable) is None
    if isinstance(runnable, RunnablePassthrough):
        return not _is_passthrough(runnable)
    if isinstance(runnable, BaseOutputParser):
        return type(runnable) is not StrOutputParser
    if isinstance(runnable, CONTROL):  # user code only
        return next(models_of(runnable), None) is None
    if isinstance(runnable, BaseLanguageModel):  # of another provider
        return not isinstance(runnable, ChatConure)
    return isinstance(runnable, RunnableGenerator | BaseRetriever | BaseTool)


def _separator(function: Any) -> str | None:
    """Return the separator if a function is a string's `join`."""
    owner = getattr(function, "__self__", None)
    is_join = isinstance(owner, str) and getattr(function, "__name__", "") == "join"
    return str(owner) if is_join else None


def _holds_prompt(value: Value) -> bool:
    if isinstance(value, BranchedValue):
        return any(map(_holds_prompt, value.values))
    return isinstance(value, PromptTurnsValue)


def _itemgetter_key(runnable: RunnableLambda[Any, Any]) -> tuple[Any] | None:
    """Return the key of an `itemgetter` with one key."""
    function = getattr(runnable, "func", None)
    if not isinstance(function, itemgetter):
        return None
    keys = cast(tuple[Any, ...], function.__reduce__()[1])
    return (keys[0],) if len(keys) == 1 else None


def item_of(value: Value, key: Any, position: ChainPosition) -> Value:
    """Return the item of a value under a key.

    Raises:
        ProgramError: if the value has no such item.
    """
    if isinstance(value, BranchedValue):
        return value.each(lambda each: item_of(each, key, position))
    if isinstance(value, ClientValue):
        hint = str(key) if isinstance(key, str) else f"item_{key}"
        return value.then(lambda input_value: input_value[key], hint, ("item", key))
    if isinstance(value, Record):
        if key in value.fields:
            return value.fields[key]
        if value.rest is not None:
            return item_of(value.rest, key, position)
        raise unsupported(
            position, f"the input has no item {key!r}; its items are: {value.names()}"
        )
    raise unsupported(position, f"itemgetter({key!r}) requires a dict, got {_described(value)}")


def _read_pick(runnable: RunnablePick, value: Value, position: ChainPosition) -> Value:
    if isinstance(value, BranchedValue):
        return value.each(lambda each: _read_pick(runnable, each, position))
    if isinstance(value, ClientValue):
        hint = runnable.keys if isinstance(runnable.keys, str) else ""
        return value.then(runnable.invoke, hint, ("pick", str(runnable.keys)))
    if not isinstance(value, Record):
        raise unsupported(position, f"RunnablePick requires a dict, got {_described(value)}")
    if isinstance(runnable.keys, str):
        return item_of(value, runnable.keys, position)
    return Record({key: item_of(value, key, position) for key in runnable.keys})


def _read_text_parser(parser: StrOutputParser, value: Value, position: ChainPosition) -> Value:
    if isinstance(value, BranchedValue):
        return value.each(lambda each: _read_text_parser(parser, each, position))
    if isinstance(value, AnswerValue):
        return AnswerTextValue(value.call)
    if isinstance(value, AnswerTextValue):
        return value
    if isinstance(value, ClientValue):
        return value.then(parser.invoke, step="text")
    raise unsupported(
        position, f"StrOutputParser requires a message or text, got {_described(value)}"
    )


def _require_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        # The same message as LangChain's.
        raise ValueError("The input to RunnablePassthrough.assign() must be a dict.")
    return value


def _described(value: Value) -> str:
    return VALUE_KINDS[type(value)]


def _plain_name(runnable: Runnable[Any, Any]) -> str:
    name = runnable.get_name()
    return "function" if name in ("RunnableLambda", "<lambda>", "lambda") else name
