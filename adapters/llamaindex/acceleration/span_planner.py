"""The span handler that plans a part of an app when the part starts.

Responsibility: which parts can be planned, by class and method.
Out of scope: how a part is planned (`synthesizers`, `extractors`, `postprocessors`,
`path_extractors`, `indices`).
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.extractors import BaseExtractor
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span.base import BaseSpan
from llama_index_instrumentation.span_handlers import BaseSpanHandler

from ..llm.llm import Conure
from . import extractors, indices, path_extractors, postprocessors, synthesizers
from .plan_builder import NotPlanned, PlanBuilder, check_llm
from .scope import Scope, active_scope, app_class
from .scoped_generators import scope_chat_stream, scoped_result

PartPlanner: TypeAlias = Callable[[Any, type[Any], PlanBuilder, dict[str, Any]], list[str]]


class PlannablePart(NamedTuple):
    """A kind of part whose calls can be planned."""

    kind: type[Any]
    methods: tuple[str, ...]
    """Methods that make the calls."""
    llm: str
    """Attribute with the LLM."""
    plan: PartPlanner


PARTS: tuple[PlannablePart, ...] = (
    PlannablePart(BaseSynthesizer, ("get_response", "aget_response"), "_llm", synthesizers.plan),
    PlannablePart(BaseExtractor, ("aextract",), "llm", extractors.plan),
    PlannablePart(LLMRerank, ("_postprocess_nodes",), "llm", postprocessors.plan),
    *(
        PlannablePart(kind, methods, "_llm", indices.plan)
        for kind, methods in indices.METHODS.items()
    ),
    *(
        PlannablePart(kind, ("__call__", "acall"), "llm", path_extractors.plan)
        for kind in path_extractors.PLANNERS
    ),
)

_HANDLERS_LOCK = threading.Lock()
"""Held while the handler is added, once per process."""
_STREAMED = (StreamingResponse, AsyncStreamingResponse, StreamingAgentChatResponse)
"""Responses whose calls LlamaIndex may make when the app reads them, after the span."""
_STREAM_READERS = ("write_response_to_history", "awrite_response_to_history")
_SPAN_ID = re.compile(r"(?P<name>.+)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.DOTALL)
"""LlamaIndex's id of a span: `Class.method`, then a UUID."""


class PlanningSpanHandler(BaseSpanHandler[BaseSpan]):
    """Plans a part of an app when its span starts; keeps no spans.

    The first run adds it to LlamaIndex's span handlers, where it stays. Without an active run it
    does nothing.
    """

    @classmethod
    def class_name(cls) -> str:
        return "ConureWatch"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> BaseSpan | None:
        scope = active_scope()
        if scope is not None:
            name = _span_name(id_)
            scope.enter(id_, name, parent_span_id)
            method = name.rpartition(".")[2]
            if isinstance(instance, StreamingAgentChatResponse) and method in _STREAM_READERS:
                scope_chat_stream(instance, scope)
            elif instance is not None:
                plan_part(scope, instance, method, bound_args.arguments, name)
        return None

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> None:
        """Let the stream of a response hold the run. No span is kept."""
        if isinstance(result, _STREAMED) and (scope := active_scope()) is not None:
            scoped_result(result, scope)  # replaces the stream in the response

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no span is kept."""


def begin(app: Any = None) -> Scope:
    """Return a new run; its parts are planned from now on."""
    root = get_dispatcher()
    with _HANDLERS_LOCK:
        if not any(isinstance(handler, PlanningSpanHandler) for handler in root.span_handlers):
            indices.watch_methods(plan_method)
            root.add_span_handler(PlanningSpanHandler())
    return Scope(app)


def plan_part(
    scope: Scope, instance: Any, method: str, arguments: Mapping[str, Any], name: str
) -> None:
    """Plan the calls that a part of an app is about to make, if it is one that can be planned.

    Args:
        scope: the run.
        instance: the part.
        method: its method, which has not run yet.
        arguments: arguments of the method.
        name: of part and method, for reports.
    """
    for part in PARTS:
        if isinstance(instance, part.kind) and method in part.methods:
            llm = getattr(instance, part.llm, None)
            if isinstance(llm, Conure):
                _plan(scope, instance, llm, part.plan, arguments, name)
            elif llm is not None:
                scope.note(f"{name}: its LLM is a {type(llm).__name__}")
            else:
                scope.note(f"{name}: it has no attribute {part.llm!r} with an LLM")


def plan_method(instance: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Plan a part whose method, which has not run yet, has no span; nothing outside of a run."""
    scope = active_scope()
    if scope is None:
        return
    try:
        given = inspect.signature(method).bind(instance, *args, **kwargs)
    except TypeError:  # wrong arguments: the method raises
        return
    name = f"{type(instance).__name__}.{method.__name__}"
    plan_part(scope, instance, method.__name__, given.arguments, name)


def _plan(
    scope: Scope,
    instance: Any,
    llm: Conure,
    plan: PartPlanner,
    bound_arguments: Mapping[str, Any],
    name: str,
) -> None:
    try:
        check_llm(llm)
        arguments = _checked_arguments(bound_arguments)
        texts = list(arguments.get("text_chunks", ()))
        if texts and scope.is_expected(instance, texts):
            return
        run = scope.run_on(llm.connection())
        builder = PlanBuilder(llm, name, run.fresh)
        texts_of_base_class = plan(instance, app_class(instance), builder, arguments)
        if texts_of_base_class:
            scope.expect(instance, texts_of_base_class)
        if builder.calls and not run.is_planned(builder.calls[0]):
            run.plan(builder.calls)
    except Exception as problem:
        # LlamaIndex would ignore it silently. A real error occurs again in the app itself.
        kind = "" if isinstance(problem, NotPlanned) else f"{type(problem).__name__}: "
        scope.note(f"{name}: {kind}{problem}")


def _checked_arguments(bound_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a method by name.

    Raises:
        NotPlanned: if one is an iterator; the app could not read it after the planner.
    """
    arguments = dict(bound_arguments)
    arguments |= arguments.pop("response_kwargs", {}) | arguments.pop("kwargs", {})
    for name, value in arguments.items():
        if isinstance(value, Iterator):
            raise NotPlanned(f"its argument {name!r} is an iterator, which can be read only once")
    return arguments


def _span_name(span_id: str) -> str:
    """Return the class and method of a span; handlers receive them in the id only."""
    match = _SPAN_ID.fullmatch(span_id)
    return span_id if match is None else match["name"]
