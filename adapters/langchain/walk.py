"""A LangChain chain, read into a program by its structure.

Knows every kind of Runnable that has a place in a program and what it does to a value
that does not exist yet. Runs none of them: functions become client steps, which run when
their inputs are there. Refuses, by class and place, what has no place in a program.

Kept true: no code of the user runs while a chain is read; a program that comes out gives
what the chain would give, or fails where the chain would fail.
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

from .chat import ChatConure
from .compiled import Compiled
from .control import CONTROL, decided
from .graph import Graph, Place, unsupported
from .prompts import render
from .settings import num_answers_of
from .structure import models_of
from .values import (
    KINDS,
    Answer,
    Either,
    Local,
    Many,
    Record,
    Rendered,
    Text,
    Turn,
    Value,
)

_TEXT_METHODS: Final[dict[Any, str]] = {str.strip: "strip", str.lower: "lower"}
"""Functions that the server has as well."""


def to_program(
    runnable: Any, *, inputs: Iterable[str] | None = None, name: str | None = None
) -> Compiled:
    """Read a chain into a program that runs whole on a server.

    Args:
        runnable: a Runnable, or what LangChain takes for one (a dict, a function).
        inputs: keys of the dict that the chain is called with. None: anything.
        name: of the program. None: the chain's own name.

    Raises:
        ProgramError: `to_program.unsupported`, with the class and its place in the chain.
    """
    chain = coerce_to_runnable(runnable)
    graph = Graph(name or getattr(chain, "name", None) or "chain")
    value: Value = Local(graph.root, lambda given: given)
    if inputs is not None:
        root = value
        value = Record({key: item_of(root, key, Place("chain", "")) for key in inputs})
    place = Place("chain", "answer")
    result = Walk(graph).read(chain, value, place)
    return Compiled(graph, result, place)


class Walk:
    """One reading of one chain."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def read(self, runnable: Runnable[Any, Any], value: Value, place: Place) -> Value:
        """What a Runnable makes of a value."""
        if isinstance(runnable, RunnableSequence):
            return self._sequence(runnable, value, place)
        if isinstance(runnable, RunnableParallel):
            branches = runnable.steps__.items()
            return Record({key: self.read(r, value, place.branch(key)) for key, r in branches})
        if isinstance(runnable, RunnableAssign):
            return self._assign(runnable, value, place)
        if isinstance(runnable, RunnablePick):
            return _pick(runnable, value, place)
        if isinstance(runnable, BasePromptTemplate):
            return render(self.graph, runnable, value, place)
        if isinstance(runnable, ChatConure):
            return self._call(runnable, {}, value, place)
        return self._step(runnable, value, place)

    def _step(self, runnable: Runnable[Any, Any], value: Value, place: Place) -> Value:
        """What is no prompt, no model and no composition of others."""
        if type(runnable) is StrOutputParser:
            return _text(runnable, value, place)
        if isinstance(runnable, RunnableLambda) and _key(runnable) is not None:
            return self.item(value, cast(tuple[Any], _key(runnable))[0], place)
        if _is_passthrough(runnable):
            return value
        computed = self._computed(runnable, value, place)
        if computed is not None:
            return computed
        if _is_function(runnable):
            return self._functions([runnable], value, place)
        if isinstance(runnable, CONTROL):
            return decided(self, runnable, value, place)
        return self._wrapped(runnable, value, place)

    def item(self, value: Value, key: Any, place: Place) -> Value:
        """What stands under a key of a value."""
        return item_of(value, key, place)

    def _wrapped(self, runnable: Runnable[Any, Any], value: Value, place: Place) -> Value:
        """What stands around a Runnable and is resolved before anything runs."""
        if isinstance(runnable, DynamicRunnable):
            concrete, _ = runnable.prepare(cast(RunnableConfig, dict(place.config)))
            return self.read(concrete, value, place)
        if isinstance(runnable, RunnableBinding):
            return self._binding(runnable, value, place)
        raise unsupported(
            place,
            f"{type(runnable).__name__} has no place in a program; if it calls no model, wrap it "
            "in a function: RunnableLambda(x.invoke)",
        )

    def _sequence(self, sequence: RunnableSequence[Any, Any], value: Value, place: Place) -> Value:
        steps = sequence.steps
        last_call = max((i for i, step in enumerate(steps) if _is_model(step)), default=-1)
        hint = place.hint if sequence.name is None else sequence.name
        num_calls = index = 0
        while index < len(steps):
            # The sequence's last call is named after the place; those before are counted.
            here = hint
            if _is_model(steps[index]) and index != last_call:
                num_calls += 1
                here = f"{hint}_{num_calls}"
            at = place.step(index, here)
            functions: list[Runnable[Any, Any]] = []
            computed = self._computed(steps[index], value, at)
            if computed is None:
                functions = self._run_of_functions(steps, index)
            if computed is not None:
                value = computed
            elif functions:
                value = self._functions(functions, value, at)
            else:
                value = self.read(steps[index], value, at)
            index += max(1, len(functions))
        return value

    def _run_of_functions(
        self, steps: list[Runnable[Any, Any]], start: int
    ) -> list[Runnable[Any, Any]]:
        """Functions that follow one another: one step, so what passes between need not be JSON."""
        end = start
        while end < len(steps) and _is_function(steps[end]):
            end += 1
        return steps[start:end]

    def _computed(self, runnable: Runnable[Any, Any], value: Value, place: Place) -> Value | None:
        """What a function of Python's own makes of what is on the server, if that has it too."""
        function = getattr(runnable, "func", None) if isinstance(runnable, RunnableLambda) else None
        if isinstance(value, Text) and (name := _TEXT_METHODS.get(function)) is not None:
            text = value.call.text
            return Text(self.graph.computed(place.hint, lambda: {name: [text()]}))
        separator = _separator(function)
        if separator is not None and isinstance(value, Many) and isinstance(value.value, Text):
            names = self.graph.given(value, place)
            joined = {"join": [{"var": names}, separator]}
            return Text(self.graph.computed(place.hint, lambda: joined))
        return None

    def _functions(self, runnables: list[Runnable[Any, Any]], value: Value, place: Place) -> Local:
        if _holds_prompt(value) and not isinstance(runnables[0], BaseLanguageModel):
            raise unsupported(
                place,
                f"{runnables[0].get_name()} gets a prompt, whose text exists only on the server; "
                "put the function before the prompt or behind the model",
            )
        name = _plain_name(runnables[-1])
        return self.graph.client_step(name, tuple(runnables), value, place)

    def _assign(self, runnable: RunnableAssign, value: Value, place: Place) -> Value:
        made = self.read(runnable.mapper, value, place)
        assert isinstance(made, Record)
        if isinstance(value, Record):
            return Record({**value.fields, **made.fields}, value.rest)
        if isinstance(value, Local):
            return Record(made.fields, value.then(_a_dict, step="dict"))
        raise unsupported(place, f"RunnablePassthrough.assign needs a dict, not {_called(value)}")

    def _binding(self, binding: RunnableBinding[Any, Any], value: Value, place: Place) -> Value:
        if binding.config_factories:
            raise unsupported(place, "listeners hear nothing of a chain that runs on a server")
        config = cast(Mapping[str, Any], binding.config or {})
        hint = config.get("run_name") or place.hint
        at = place._replace(hint=str(hint), config={**place.config, **config})
        if isinstance(binding.bound, ChatConure):
            return self._call(binding.bound, binding.kwargs, value, at)
        if isinstance(binding.bound, RunnableBinding) and binding.kwargs:
            inner = binding.bound
            merged = inner.model_copy(update={"kwargs": {**inner.kwargs, **binding.kwargs}})
            return self.read(merged, value, at)
        if binding.kwargs and not _is_function(binding.bound):
            names = ", ".join(binding.kwargs)
            kind = type(binding.bound).__name__
            raise unsupported(
                place, f"{kind} is bound to arguments ({names}) that it has no use for"
            )
        if binding.kwargs:
            return self._functions([binding], value, at)
        return self.read(binding.bound, value, at)

    def _call(
        self, model: ChatConure, kwargs: Mapping[str, Any], value: Value, place: Place
    ) -> Answer:
        prompt = self._prompt(value, place)
        try:
            model.sampling(kwargs)
            num_answers = num_answers_of(model.n, kwargs)
        except ValueError as problem:
            raise unsupported(place, str(problem)) from problem
        if num_answers > 1:
            raise unsupported(
                place,
                f"n={num_answers} answers, of which a chain goes on with the first; leave out n, "
                "or put several calls side by side",
            )

        def node(node_id: str, variable: str, form: str) -> Any:
            return model.node(node_id, variable, prompt.wire(), kwargs, form=form)

        call = self.graph.call(place.hint, node)
        # Under tools the text is not all that the model may say.
        call.is_message = bool(kwargs.get("tools"))
        return Answer(call)

    def _prompt(self, value: Value, place: Place) -> Rendered:
        """What a chat model is told where it gets a value."""
        if isinstance(value, Rendered):
            return value
        if isinstance(value, Local):
            return Rendered(({"splice": self.graph.view(value, "messages")},))
        if isinstance(value, Text):
            return Rendered((Turn("user", (value.call.segment,)),))
        if isinstance(value, Either):
            lists = self.graph.each(value, lambda each: self._prompt(each, place).expression)
            return Rendered(({"splice": value.exit.give(lists)},))
        raise unsupported(
            place, f"a chat model takes a prompt, text or messages, not {_called(value)}"
        )


def _is_model(runnable: Runnable[Any, Any]) -> bool:
    while isinstance(runnable, RunnableBindingBase):
        runnable = runnable.bound
    return isinstance(runnable, ChatConure)


def _is_passthrough(runnable: Runnable[Any, Any]) -> bool:
    return (
        isinstance(runnable, RunnablePassthrough)
        and runnable.func is None
        and runnable.afunc is None
    )


def _is_function(runnable: Runnable[Any, Any]) -> bool:
    """Whether this is the user's own code (or a parser): nothing that the server could do."""
    if isinstance(runnable, RunnableLambda):
        return _key(runnable) is None
    if isinstance(runnable, RunnablePassthrough):
        return not _is_passthrough(runnable)
    if isinstance(runnable, BaseOutputParser):
        return type(runnable) is not StrOutputParser
    if isinstance(runnable, CONTROL):  # around code of the user alone
        return next(models_of(runnable), None) is None
    if isinstance(runnable, BaseLanguageModel):  # of another provider
        return not isinstance(runnable, ChatConure)
    return isinstance(runnable, RunnableGenerator | BaseRetriever | BaseTool)


def _separator(function: Any) -> str | None:
    """The text whose `join` a function is."""
    owner = getattr(function, "__self__", None)
    is_join = isinstance(owner, str) and getattr(function, "__name__", "") == "join"
    return str(owner) if is_join else None


def _holds_prompt(value: Value) -> bool:
    if isinstance(value, Either):
        return any(map(_holds_prompt, value.values))
    return isinstance(value, Rendered)


def _key(runnable: RunnableLambda[Any, Any]) -> tuple[Any] | None:
    """The key of an `itemgetter` with one key."""
    function = getattr(runnable, "func", None)
    if not isinstance(function, itemgetter):
        return None
    keys = cast(tuple[Any, ...], function.__reduce__()[1])
    return (keys[0],) if len(keys) == 1 else None


def item_of(value: Value, key: Any, place: Place) -> Value:
    """What stands under a key of a value.

    Raises:
        ProgramError: if nothing does.
    """
    if isinstance(value, Either):
        return value.each(lambda each: item_of(each, key, place))
    if isinstance(value, Local):
        hint = str(key) if isinstance(key, str) else f"item_{key}"
        return value.then(lambda given: given[key], hint, ("item", key))
    if isinstance(value, Record):
        if key in value.fields:
            return value.fields[key]
        if value.rest is not None:
            return item_of(value.rest, key, place)
        raise unsupported(place, f"there is no {key!r} in what comes before: {value.names()}")
    raise unsupported(place, f"itemgetter({key!r}) gets {_called(value)}")


def _pick(runnable: RunnablePick, value: Value, place: Place) -> Value:
    if isinstance(value, Either):
        return value.each(lambda each: _pick(runnable, each, place))
    if isinstance(value, Local):
        hint = runnable.keys if isinstance(runnable.keys, str) else ""
        return value.then(runnable.invoke, hint, ("pick", str(runnable.keys)))
    if not isinstance(value, Record):
        raise unsupported(place, f"RunnablePick needs a dict, not {_called(value)}")
    if isinstance(runnable.keys, str):
        return item_of(value, runnable.keys, place)
    return Record({key: item_of(value, key, place) for key in runnable.keys})


def _text(parser: StrOutputParser, value: Value, place: Place) -> Value:
    if isinstance(value, Either):
        return value.each(lambda each: _text(parser, each, place))
    if isinstance(value, Answer):
        return Text(value.call)
    if isinstance(value, Text):
        return value
    if isinstance(value, Local):
        return value.then(parser.invoke, step="text")
    raise unsupported(place, f"StrOutputParser takes a message or text, not {_called(value)}")


def _a_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        # LangChain's own words.
        raise ValueError("The input to RunnablePassthrough.assign() must be a dict.")
    return value


def _called(value: Value) -> str:
    return KINDS[type(value)]


def _plain_name(runnable: Runnable[Any, Any]) -> str:
    name = runnable.get_name()
    return "function" if name in ("RunnableLambda", "<lambda>", "lambda") else name
