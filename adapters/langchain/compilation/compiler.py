"""Compiles a LangChain chain to a program, from the structure of the chain.

The compiler follows the chain's data: each Runnable gets the symbolic value of the Runnable before
it, adds nodes to the graph, and returns a symbolic value.

Responsibility: each supported kind of Runnable. Functions become client steps. Unsupported
Runnables are rejected with their class and position.

Invariants: compiling a chain runs no user code; the program returns what the chain would return, or
fails where the chain would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from itertools import takewhile
from operator import itemgetter
from typing import Any, Final, TypeVar, cast

from langchain_core.caches import BaseCache
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
from langchain_core.runnables.config import (
    ensure_config,
    merge_configs,
    var_child_runnable_config,
)
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.tools import BaseTool

from ..chat.call_options import num_answers_of
from ..chat.model import ChatConure
from .chain_graph import ChainGraph, ChainPosition, prompt_expression, unsupported
from .compiled_chain import CompiledChain
from .control_flow import CONTROL, compile_control_flow
from .prompts import render
from .traversal import (
    chosen_fields,
    configurable_ids,
    is_opaque,
    is_other_model,
    models_of,
    with_arguments,
)
from .value_steps import compile_pick, compile_text_parser, described, item_of
from .values import (
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

T = TypeVar("T")

_TEXT_OPERATORS: Final = ((str.strip, "strip"), (str.lower, "lower"))
"""Functions of text, and the operators that compute the same on the server."""

_CONFIG_OF_ONE_RUN: Final = ("run_id", "run_name")


def to_program(
    runnable: Any, *, inputs: Iterable[str] | None = None, name: str | None = None
) -> CompiledChain:
    """Compile a chain to a program that runs as a whole on a server.

    Args:
        runnable: a Runnable, or something that LangChain coerces to one (a dict, a function).
        inputs: keys of the input dict. None: the input may be any value.
        name: name of the program. None: the chain's own name.

    Raises:
        ProgramError: `to_program.unsupported`, with the class and its position in the chain.
    """
    chain = coerce_to_runnable(runnable)
    graph = ChainGraph(name or getattr(chain, "name", None) or "chain")
    value: Value = ClientValue(graph.root, lambda input_value: input_value)
    if inputs is not None:
        root = value
        value = Record({key: item_of(root, key, ChainPosition("chain", "")) for key in inputs})
    configurable = ensure_config().get("configurable", {})
    fields = chosen_fields(configurable, set(configurable_ids(chain)))
    position = ChainPosition("chain", "answer", {"configurable": fields} if fields else {})
    compiler = ChainCompiler(graph)
    result = outside_of_runs(lambda: compiler.compile(chain, value, position))
    keys = list(value.fields) if isinstance(value, Record) else None
    reduced = (_recompile, (runnable, keys, name))
    return CompiledChain(graph, result, position, reduced=reduced)


def outside_of_runs(function: Callable[[], T]) -> T:
    """Call a function in a context without a run of LangChain.

    LangChain adds the config of such a run, with its callbacks, to every config that it merges.
    """
    context = copy_context()
    context.run(var_child_runnable_config.set, None)
    return context.run(function)


def _recompile(runnable: Any, inputs: list[str] | None, name: str | None) -> CompiledChain:
    return to_program(runnable, inputs=inputs, name=name)


class ChainCompiler:
    """Compiles one chain."""

    def __init__(self, graph: ChainGraph) -> None:
        self.graph = graph
        self._first_model: tuple[ChatConure, str] | None = None
        """The first model of the program, and its path."""

    def compile(self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition) -> Value:
        """Add a Runnable to the graph, and return its symbolic output."""
        if is_opaque(runnable) and not isinstance(runnable, BasePromptTemplate):
            return self._compile_functions([runnable], value, position)
        if isinstance(runnable, RunnableSequence):
            return self._compile_sequence(runnable, value, position)
        if isinstance(runnable, RunnableParallel):
            branches = runnable.steps__.items()
            return Record(
                {key: self.compile(r, value, position.branch(key)) for key, r in branches}
            )
        if isinstance(runnable, RunnableAssign):
            return self._compile_assign(runnable, value, position)
        if isinstance(runnable, RunnablePick):
            return compile_pick(runnable, value, position)
        if isinstance(runnable, BasePromptTemplate):
            return render(self.graph, runnable, value, position)
        if isinstance(runnable, ChatConure):
            return self._compile_model(runnable, {}, value, position)
        return self._compile_step(runnable, value, position)

    def _compile_step(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        """Compile a Runnable that is not a prompt, a model or a composition."""
        if type(runnable) is StrOutputParser:
            return compile_text_parser(runnable, value, position)
        if isinstance(runnable, RunnableLambda) and (key := _itemgetter_key(runnable)) is not None:
            return item_of(value, key[0], position)
        if _is_passthrough(runnable):
            return value
        computed = self._compile_operator(runnable, value, position)
        if computed is not None:
            return computed
        if _is_function(runnable):
            return self._compile_functions([runnable], value, position)
        if isinstance(runnable, CONTROL):
            return compile_control_flow(self, runnable, value, position)
        return self._compile_wrapper(runnable, value, position)

    def _compile_wrapper(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        """Resolve a configurable Runnable or a binding, and compile the result."""
        if isinstance(runnable, DynamicRunnable):
            concrete, position = _prepared(runnable, position)
            return self.compile(concrete, value, position)
        if isinstance(runnable, RunnableBinding):
            return self._compile_binding(runnable, value, position)
        raise unsupported(position, _refusal(runnable))

    def _compile_sequence(
        self, sequence: RunnableSequence[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        steps = sequence.steps
        hints = _step_hints(steps, position.hint if sequence.name is None else sequence.name)
        index = 0
        while index < len(steps):
            step_position = position.step(index, hints[index])
            computed = self._compile_operator(steps[index], value, step_position)
            functions = [] if computed is not None else self._joined_functions(steps[index:])
            if computed is not None:
                value = computed
            elif functions:
                value = self._compile_functions(functions, value, step_position)
            else:
                value = self.compile(steps[index], value, step_position)
            index += max(1, len(functions))
        return value

    def _joined_functions(self, steps: Sequence[Runnable[Any, Any]]) -> list[Runnable[Any, Any]]:
        """Return the leading functions of some steps.

        They become one client step, so that the values between them need not be JSON.
        """
        return list(takewhile(_is_function, steps))

    def _compile_operator(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
    ) -> Value | None:
        """Return the output of a built-in function, if the server has an operator for it."""
        is_lambda = isinstance(runnable, RunnableLambda) and not is_opaque(runnable)
        function = getattr(runnable, "func", None) if is_lambda else None
        operator = next((name for known, name in _TEXT_OPERATORS if known is function), None)
        if isinstance(value, AnswerTextValue) and operator is not None:
            text = value.call.text
            return AnswerTextValue(
                self.graph.add_expression(position.hint, lambda: {operator: [text()]})
            )
        separator = _separator(function)
        if (
            separator is not None
            and isinstance(value, MappedValue)
            and isinstance(value.value, AnswerTextValue)
        ):
            texts = self.graph.exported_variable(value, position, is_printed=True)
            joined = {"join": [{"var": texts}, separator]}
            return AnswerTextValue(self.graph.add_expression(position.hint, lambda: joined))
        return None

    def _compile_functions(
        self, runnables: list[Runnable[Any, Any]], value: Value, position: ChainPosition
    ) -> ClientValue:
        """Compile consecutive functions to one client step."""
        if _holds_prompt(value) and not isinstance(_unbound(runnables[0]), BaseLanguageModel):
            raise unsupported(
                position,
                f"{runnables[0].get_name()} gets a prompt, whose text exists only on the server; "
                "put the function before the prompt or after the model",
            )
        name = _plain_name(runnables[-1])
        if position.config:
            config = cast(RunnableConfig, dict(position.config))
            runnables = [RunnableBinding(bound=each, config=config) for each in runnables]
        return self.graph.add_client_step(name, tuple(runnables), value, position)

    def _compile_assign(
        self, runnable: RunnableAssign, value: Value, position: ChainPosition
    ) -> Value:
        assigned = self.compile(runnable.mapper, value, position)
        assert isinstance(assigned, Record)
        if isinstance(value, Record):
            return Record({**value.fields, **assigned.fields}, value.rest)
        if isinstance(value, ClientValue):
            return Record(assigned.fields, value.then(_require_dict, step="dict"))
        raise unsupported(
            position, f"RunnablePassthrough.assign requires a dict, got {described(value)}"
        )

    def _compile_binding(
        self, binding: RunnableBinding[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        if binding.config_factories:
            raise unsupported(
                position, "listeners are not called for a chain that runs on a server; remove them"
            )
        bound, position = binding.bound, _named_by(binding, position)
        step_position = position._replace(config=merged_config(binding, position))
        if is_opaque(bound) and not isinstance(bound, BasePromptTemplate):
            return self._compile_functions([binding], value, position)
        if isinstance(bound, ChatConure):
            return self._compile_model(bound, binding.kwargs, value, step_position)
        if not binding.kwargs:
            return self.compile(bound, value, step_position)
        if isinstance(bound, DynamicRunnable):
            concrete, step_position = _prepared(bound, step_position)
            merged = binding.model_copy(update={"bound": concrete, "config": {}})
            return self._compile_binding(merged, value, step_position)
        if isinstance(bound, RunnableBinding):  # the outer arguments win, as in LangChain
            merged = bound.model_copy(update={"kwargs": {**bound.kwargs, **binding.kwargs}})
            return self.compile(merged, value, step_position)
        if _is_function(bound):
            return self._compile_functions([binding], value, position)
        passed_on = with_arguments(bound, binding.kwargs)
        if passed_on is not None:
            return self.compile(passed_on, value, step_position)
        names = ", ".join(binding.kwargs)
        raise unsupported(
            position,
            f"{type(bound).__name__} does not use the arguments that are bound to it: {names}",
        )

    def _compile_model(
        self, model: ChatConure, kwargs: Mapping[str, Any], value: Value, position: ChainPosition
    ) -> AnswerValue:
        self._check_model(model, position)
        prompt = self._prompt(value, position)
        try:
            model.node("", "", [], kwargs)  # checks the arguments
            num_answers = num_answers_of(model.n, kwargs)
        except ValueError as problem:
            raise unsupported(position, str(problem)) from problem
        if num_answers > 1:
            raise unsupported(
                position,
                f"n={num_answers} requests several answers, but a chain uses only the first; "
                "remove n, or run several calls in parallel",
            )

        limits = self._limits_of(model)

        def node(node_id: str, variable: str, form: str) -> Any:
            return {**model.node(node_id, variable, prompt.wire(), kwargs, form=form), **limits}

        call = self.graph.add_call(position.hint, node)
        # With tools, the answer is more than its text.
        call.is_message = bool(kwargs.get("tools"))
        call.arguments = kwargs
        return AnswerValue(call)

    def _check_model(self, model: ChatConure, position: ChainPosition) -> None:
        """Refuse a model whose calls a program cannot make as LangChain does."""
        if position.config.get("callbacks") or model.callbacks:
            raise unsupported(
                position,
                "callbacks of a model are not called for a chain that runs on a server; remove "
                "them",
            )
        if model.cache is True or isinstance(model.cache, BaseCache):
            raise unsupported(
                position,
                "a program does not read LangChain's cache; remove `cache` from the model",
            )
        if model.rate_limiter is not None:
            raise unsupported(
                position,
                "the server decides when a call runs; remove `rate_limiter` from the model",
            )
        if self._first_model is None:
            self._first_model = (model, position.path)
        first, path = self._first_model
        is_same = (model.client, model.base_url) == (first.client, first.base_url)
        if not is_same and model.connection().server != first.connection().server:
            raise unsupported(
                position,
                f"a model of another server than that of {path}; a program runs on one server",
            )

    def _limits_of(self, model: ChatConure) -> dict[str, float]:
        """Return the fields of a node that limit the time of its call."""
        return {} if model.timeout is None else {"timeout_s": model.timeout}

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
                value, lambda each: prompt_expression(self._prompt(each, position), position)
            )
            return PromptTurnsValue(({"splice": value.outputs.export(lists)},))
        raise unsupported(
            position, f"a chat model requires a prompt, text or messages, got {described(value)}"
        )


def _step_hints(steps: Sequence[Runnable[Any, Any]], hint: str) -> list[str]:
    """Return the hints of a sequence's steps: the hint itself; numbered for all calls but the last.

    The last call often computes the result of the sequence, so its name has no number.
    """
    hints = [hint] * len(steps)
    calls = [index for index, step in enumerate(steps) if _is_model(step)]
    for number, index in enumerate(calls[:-1], 1):
        hints[index] = f"{hint}_{number}"
    return hints


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


def _named_by(binding: RunnableBinding[Any, Any], position: ChainPosition) -> ChainPosition:
    """Return a position with the name of its run, if a binding gives one."""
    return position._replace(hint=str((binding.config or {}).get("run_name") or position.hint))


def merged_config(binding: RunnableBinding[Any, Any], position: ChainPosition) -> Mapping[str, Any]:
    """Return the config of what is bound. As in LangChain, the config around the binding wins."""
    outer = cast(RunnableConfig, dict(position.config))
    merged = {**merge_configs(binding.config or {}, outer)}
    merged.pop("run_name", None)  # is not passed on
    return {key: value for key, value in merged.items() if value}


def _prepared(
    runnable: DynamicRunnable[Any, Any], position: ChainPosition
) -> tuple[Runnable[Any, Any], ChainPosition]:
    """Return what a configurable Runnable runs, and a position with the config passed to it."""
    concrete, config = runnable.prepare(cast(RunnableConfig, dict(position.config)))
    passed = {
        key: value for key, value in config.items() if value and key not in _CONFIG_OF_ONE_RUN
    }
    return concrete, position._replace(config=passed)


def _refusal(runnable: Runnable[Any, Any]) -> str:
    """Return why a Runnable of an unknown class cannot be compiled, and what to do."""
    name = type(runnable).__name__
    modules = {kind.__module__.partition(".")[0] for kind in type(runnable).__mro__}
    if "langgraph" in modules:
        return f"{name} chooses its calls while it runs; the chains in its nodes can be compiled"
    return (
        f"{name} cannot be part of a program; if it calls no model, wrap it in a function: "
        "RunnableLambda(x.invoke)"
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
    if isinstance(runnable, CONTROL):  # without a model it is user code only
        return next(models_of(runnable), None) is None
    return is_other_model(runnable) or isinstance(
        runnable, RunnableGenerator | BaseRetriever | BaseTool
    )


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
    """Return the key of an `itemgetter` with one key, in a tuple because the key may be None."""
    function = getattr(runnable, "func", None)
    if not isinstance(function, itemgetter):
        return None
    keys = cast(tuple[Any, ...], function.__reduce__()[1])
    return (keys[0],) if len(keys) == 1 else None


def _require_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        # The same message as LangChain's.
        raise ValueError("The input to RunnablePassthrough.assign() must be a dict.")
    return value


def _plain_name(runnable: Runnable[Any, Any]) -> str:
    name = runnable.get_name()
    return "function" if name in ("RunnableLambda", "<lambda>", "lambda") else name
