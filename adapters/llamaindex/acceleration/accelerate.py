"""`accelerate`: a LlamaIndex app whose model calls run before the app makes them.

An accelerated app is the app itself: same class, same parts, same events. When one of LlamaIndex's
own response synthesizers or extractors starts, the calls that it is about to make are planned and
submitted, and its calls are answered from there. A span handler detects the start.

Out of scope: how a part is planned (`synthesizers`, `extractors`).

Invariant: no user code runs that would not run without acceleration. An app that cannot be planned
runs as usual, with its calls in one program.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias, TypeVar, cast

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.extractors import BaseExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.workflow import Workflow
from llama_index_instrumentation import get_dispatcher
from llama_index_instrumentation.span.base import BaseSpan
from llama_index_instrumentation.span_handlers import BaseSpanHandler
from workflows.handler import WorkflowHandler

from ..llm.llm import Conure
from . import extractors, synthesizers
from .plan_builder import NotPlanned, PlanBuilder
from .report import Report
from .scope import ACTIVE_SCOPE, APP_CLASS, Scope, app_class
from .scoped_generators import scoped_result

T = TypeVar("T")

ENTRY_METHODS: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (BaseQueryEngine, ("query", "aquery")),
    (
        BaseChatEngine,
        ("chat", "achat", "stream_chat", "astream_chat"),
    ),
    (BaseSynthesizer, ("synthesize", "asynthesize", "get_response", "aget_response")),
    (BaseExtractor, ("extract", "aextract", "process_nodes", "aprocess_nodes")),
    (IngestionPipeline, ("run", "arun")),
    (Workflow, ("run",)),
)
"""Methods that start a run, by class of app."""

PIPELINE_ENTRY_METHODS = (
    *("run", "arun", "run_multi", "arun_multi"),
    *("run_with_intermediates", "arun_with_intermediates"),
    *("run_multi_with_intermediates", "arun_multi_with_intermediates"),
)

PartPlanner: TypeAlias = Callable[[Any, type[Any], PlanBuilder, dict[str, Any]], list[str]]

PARTS: tuple[tuple[type[Any], tuple[str, ...], str, PartPlanner], ...] = (
    (BaseSynthesizer, ("get_response", "aget_response"), "_llm", synthesizers.plan),
    (BaseExtractor, ("aextract",), "llm", extractors.plan),
)
"""Parts that can be planned: class, methods that make calls, attribute with the LLM, planner."""

_LAST_REPORT = "_conure_last_report"
_SPAN_ID = re.compile(r"(?P<name>.+)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.DOTALL)
"""LlamaIndex's id of a span: `Class.method`, then a UUID."""


def accelerate(app: T) -> T:
    """Return a copy of the app that does the same in less time.

    Args:
        app: a query engine, chat engine, response synthesizer, extractor, ingestion pipeline
            or Workflow whose LLM is `Conure`; on core 0.12 a QueryPipeline. It is not modified;
            the copy shares its parts.

    Raises:
        TypeError: if it is none of these.
    """
    kind = _accelerated_class(app_class(app))
    accelerated = copy.copy(app)
    object.__setattr__(accelerated, "__class__", kind)
    if _has_query_pipelines():
        from ..pipeline.run import accelerate_nested

        accelerate_nested(accelerated, accelerate)
    return accelerated


def explain(app: Any) -> Report:
    """Return the report of the last run of an accelerated app.

    Raises:
        ValueError: if the app has not run, or is not accelerated.
    """
    report = vars(app).get(_LAST_REPORT)
    if report is None:
        raise ValueError(f"this {type(app).__name__} was not accelerated, or did not run yet")
    return cast(Report, report)


def _has_query_pipelines() -> bool:
    """Return whether this is core 0.12."""
    return find_spec("llama_index.core.query_pipeline") is not None


def _accelerated_class(kind: type[Any]) -> type[Any]:
    """Return the class of an accelerated app, for the class of the app.

    Raises:
        TypeError: if no entry methods are known for it.
    """
    if _has_query_pipelines():
        return _accelerated_pipeline_class(kind)
    names = next((names for known, names in ENTRY_METHODS if issubclass(kind, known)), None)
    if names is None:
        raise TypeError(
            "accelerate takes a query engine, chat engine, response synthesizer, extractor, "
            f"ingestion pipeline or Workflow; this is of class {kind.__name__}"
        )
    made = _subclass(kind, names)
    if issubclass(kind, Workflow):
        # Steps that are functions are stored in the class; use those of the app's class.
        del made._step_functions
    return made


def _accelerated_pipeline_class(kind: type[Any]) -> type[Any]:
    """Return the same for core 0.12, which has QueryPipeline but not the parts planned here."""
    from ..pipeline.core012 import QueryPipeline
    from ..pipeline.run import next_module_keys

    if not issubclass(kind, QueryPipeline):
        raise TypeError(
            f"accelerate takes a QueryPipeline on core 0.12, and this is of class {kind.__name__}; "
            "query engines, synthesizers and Workflows need core 0.13 or 0.14"
        )
    made: Any = _subclass(kind, PIPELINE_ENTRY_METHODS)
    untyped: Any = kind
    upstream = untyped.get_next_module_keys

    def get_next_module_keys(self: Any, run_state: Any) -> list[str]:
        return next_module_keys(upstream, self, run_state)

    made.get_next_module_keys = get_next_module_keys
    return cast(type[Any], made)


def _subclass(kind: type[Any], names: tuple[str, ...]) -> type[Any]:
    """Return a subclass whose entry methods start a run.

    It has the name of the app's class, because spans, events and Workflows are named after it.
    """
    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce_ex__": _reduce,
        APP_CLASS: kind,
    }
    metaclass: Any = type(kind)
    made: type[Any] = metaclass(kind.__name__, (kind,), body)
    for name in names:
        method = getattr(kind, name, None)
        # LlamaIndex wraps the methods in a class body in spans. Set after the class is made, a
        # method gets no span besides that of the app's method.
        if method is not None:
            setattr(made, name, _entry_method(method))
    return made


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Copy or pickle an accelerated app; its class is created again on the other side."""
    kind = getattr(type(self), APP_CLASS)
    _, _, *state = kind.__reduce_ex__(self, max(protocol, 2))
    return _new, (kind,), *state


def _new(kind: type[Any]) -> Any:
    """Return an accelerated app without state."""
    made: Any = _accelerated_class(kind)
    return made.__new__(made)


def _entry_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that runs the app's method, in a new run if none is active."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(self: Any, *args: Any, **kwargs: Any) -> Any:
            if ACTIVE_SCOPE.get() is not None:
                return await method(self, *args, **kwargs)
            scope = _begin(self)
            try:
                with ACTIVE_SCOPE.activate(scope):
                    result = await method(self, *args, **kwargs)
            except BaseException:
                scope.finish(is_failed=True)
                raise
            return _end(result, scope)

        return awaited

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ACTIVE_SCOPE.get() is not None:
            return method(self, *args, **kwargs)
        scope = _begin(self)
        try:
            with ACTIVE_SCOPE.activate(scope):
                result = method(self, *args, **kwargs)
        except BaseException:
            scope.finish(is_failed=True)
            raise
        return _end(result, scope)

    return called


def _begin(app: Any) -> Scope:
    scope = Scope(app)
    object.__setattr__(app, _LAST_REPORT, scope.report)
    root = get_dispatcher()
    if not any(isinstance(handler, PlanningSpanHandler) for handler in root.span_handlers):
        root.add_span_handler(PlanningSpanHandler())
    return scope


def _end(result: Any, scope: Scope) -> Any:
    """End the run, or let it end with the stream or Workflow that the app returned."""
    if isinstance(result, WorkflowHandler):
        scope.ending = asyncio.ensure_future(_end_with_workflow(result, scope))
        return result
    result, has_stream = scoped_result(result, scope)
    if not has_stream:
        scope.finish()
    return result


async def _end_with_workflow(handler: WorkflowHandler, scope: Scope) -> None:
    """End the run when its Workflow ends. The caller gets its result from the handler."""
    is_failed = True
    try:
        with contextlib.suppress(Exception):
            await handler.stop_event_result()
            is_failed = False
    finally:
        scope.finish(is_failed=is_failed)


class PlanningSpanHandler(BaseSpanHandler[BaseSpan]):
    """Plans a part of an app when its span starts; keeps no spans.

    The first accelerated run adds it to LlamaIndex's span handlers, where it stays. Without an
    active run it does nothing.
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
        scope = ACTIVE_SCOPE.get()
        if scope is not None:
            name = _span_name(id_)
            scope.enter(id_, name, parent_span_id)
            for kind, methods, llm, plan in PARTS:
                if isinstance(instance, kind) and name.rpartition(".")[2] in methods:
                    _plan(scope, instance, getattr(instance, llm), plan, bound_args, name)
        return None

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no span is kept."""

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no span is kept."""


def _span_name(span_id: str) -> str:
    """Return the class and method of a span; handlers receive them in the id only."""
    match = _SPAN_ID.fullmatch(span_id)
    return span_id if match is None else match["name"]


def _plan(
    scope: Scope,
    part: Any,
    llm: Any,
    plan: PartPlanner,
    bound_args: inspect.BoundArguments,
    name: str,
) -> None:
    """Plan the calls that a part of an app is about to make."""
    if not isinstance(llm, Conure):
        scope.note(f"{name}: its LLM is a {type(llm).__name__}")
        return
    arguments = dict(bound_args.arguments)
    arguments |= arguments.pop("response_kwargs", {}) | arguments.pop("kwargs", {})
    texts = list(arguments.get("text_chunks", ()))
    if texts and scope.is_expected(part, texts):
        return
    try:
        run = scope.run_on(llm.connection())
        builder = PlanBuilder(llm, name, run.fresh)
        texts_of_base_class = plan(part, app_class(part), builder, arguments)
        if texts_of_base_class:
            scope.expect(part, texts_of_base_class)
        if builder.calls and not run.is_planned(builder.calls[0]):
            run.plan(builder.calls)
    except Exception as problem:
        # LlamaIndex would ignore it silently. A real error occurs again in the app itself.
        kind = "" if isinstance(problem, NotPlanned) else f"{type(problem).__name__}: "
        scope.note(f"{name}: {kind}{problem}")
