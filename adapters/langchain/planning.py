"""What a chain will ask for, known before it runs: its plan.

The walk of `to_program` is taken leniently. What has a place in a program becomes part of
it. What has none (user code, parsers, retrievers, other models, branches) becomes an
*awaited* value: the chain itself will make it, when it gets there, and then the plan goes
on behind it. So no code of the user runs for a plan, neither early nor twice.

Some of what is awaited holds chains of its own (the arms of a branch, the body of `.map()`,
what fallbacks and retries stand around). Which of them run, and on what, is known when the
chain enters them: then they get plans of their own (`tailor`).

Knows Runnables and calls. Refuses to know servers and how a chain runs. Kept true: every
call of a plan will be made by the chain, unless something before it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.globals import get_llm_cache
from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig

from conure.server.program.errors import ProgramError
from conure.server.program.expression import input_expression, variables
from conure.server.program.ir import Json

from .chat import ChatConure
from .control import CONTROL
from .graph import Graph, Place, unsupported
from .plan import Awaited, Plan, PlannedCall
from .values import Answer, Local, Source, Value
from .walk import Walk


def plan_of(
    chain: Runnable[Any, Any], *, server: object, prefix: str, config: RunnableConfig | None
) -> Plan:
    """The plan of a chain.

    Args:
        chain: any Runnable.
        server: `server_of` the models that count; others are left to the chain.
        prefix: of all its names.
        config: the chain runs with; it decides what is configurable.
    """
    # A callable without a name makes a Runnable without the attribute.
    graph = Graph(getattr(chain, "name", None) or "chain", prefix=prefix)
    walk = _PlanWalk(graph, server)
    place = Place("chain", "answer", {"configurable": (config or {}).get("configurable", {})})
    walk.read(chain, Local(graph.root, lambda given: given), place)
    for call in walk.calls.values():
        call.call.is_message = True
    nodes = graph.write([])["nodes"]
    calls = tuple(
        PlannedCall(place, answer.call.variable, node, frozenset(_reads(node)))
        for (place, answer), node in zip(walk.calls.items(), nodes, strict=True)
    )
    return Plan(calls, walk.awaited, graph.root, walk.has_parts)


def server_of(model: ChatConure) -> object:
    """Names the server that a model's calls go to."""
    return model._client().server


class _PlanWalk(Walk):
    """A walk that goes on behind what has no place in a program."""

    def __init__(self, graph: Graph, server: object) -> None:
        super().__init__(graph)
        self.calls: dict[str, Answer] = {}
        self.awaited: dict[str, Awaited] = {}
        self.has_parts = False
        self._server = server

    def read(self, runnable: Runnable[Any, Any], value: Value, place: Place) -> Value:
        """What a Runnable makes of a value; awaited where the server cannot make it."""
        if isinstance(runnable, CONTROL):
            self.has_parts = True
            return self._await(runnable, place, "planned when the chain gets there")
        if isinstance(runnable, BasePromptTemplate) and not _is_inert(runnable):
            return self._await(runnable, place, "runs code of the app when it is formatted")
        try:
            return super().read(runnable, value, place)
        except ProgramError as problem:
            return self._await(runnable, place, problem.message.removeprefix(f"{place.path}: "))

    def _run_of_functions(
        self, steps: list[Runnable[Any, Any]], start: int
    ) -> list[Runnable[Any, Any]]:
        return []  # nothing of them travels but what a call needs, so there is nothing to join

    def _computed(self, runnable: Runnable[Any, Any], value: Value, place: Place) -> Value | None:
        return None  # the chain does it itself, and a plan is of calls

    def _functions(self, runnables: list[Runnable[Any, Any]], value: Value, place: Place) -> Local:
        why = "code of the app, a parser, or another provider's model"
        return self._await(runnables[0], place, why)

    def _binding(self, binding: RunnableBinding[Any, Any], value: Value, place: Place) -> Value:
        if binding.config_factories:  # listeners: the chain itself still runs, so they hear it
            binding = binding.model_copy(update={"config_factories": []})
        return super()._binding(binding, value, place)

    def _call(
        self, model: ChatConure, kwargs: Mapping[str, Any], value: Value, place: Place
    ) -> Answer:
        if server_of(model) != self._server:
            raise unsupported(place, "another server's model")
        if model.cache or (model.cache is None and get_llm_cache() is not None):
            raise unsupported(place, "LangChain's cache may know the answer")
        if model.rate_limiter is not None:
            raise unsupported(place, "its rate limiter decides when it runs")
        answer = super()._call(model, kwargs, value, place)
        self.calls[place.path] = answer
        return answer

    def _await(self, runnable: Runnable[Any, Any], place: Place, why: str) -> Local:
        what = type(runnable).__name__
        source = Source(f"{place.hint}_{runnable.get_name()}")
        self.awaited[place.path] = Awaited(place.path, what, why, source)
        return Local(source, lambda made: made)


def _is_inert(template: Any) -> bool:
    """Whether formatting a template runs no code of the app, so that it may be done twice."""
    if not type(template).__module__.startswith("langchain_core."):
        return isinstance(template, BaseMessage)
    if getattr(template, "example_selector", None) is not None:
        return False
    if any(map(callable, getattr(template, "partial_variables", {}).values())):
        return False
    prompt = getattr(template, "prompt", None) or getattr(template, "example_prompt", None)
    parts = [*(prompt if isinstance(prompt, list) else [prompt])]
    parts += getattr(template, "messages", [])
    return all(part is None or _is_inert(part) for part in parts)


def _reads(node: dict[str, Json]) -> Iterator[str]:
    for message in node["messages"]:
        if "splice" in message:
            yield message["splice"]
        elif isinstance(message.get("content"), list):
            for segment in message["content"]:
                if "input" in segment:
                    yield from variables(input_expression(segment["input"]))
