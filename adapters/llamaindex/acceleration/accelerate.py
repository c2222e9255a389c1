"""`accelerate`: a LlamaIndex app whose model calls run before the app makes them.

An accelerated app is a copy whose class is a subclass with the same name; it has the same parts
and emits the same events. When one of LlamaIndex's own response synthesizers, extractors or
rerankers starts, the calls that it is about to make are planned and submitted, and its calls are
answered from there. `conure_run` does the same for all apps and calls of a `with` block.

Out of scope: which parts are planned (`span_planner`).

Invariant: no user code runs that would not run without acceleration. An app that cannot be planned
runs as usual, with its calls in one program.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Generator
from importlib.util import find_spec
from typing import Any, TypeVar, cast

from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.extractors import BaseExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.workflow import Workflow
from workflows.handler import WorkflowHandler

from . import path_extractors
from .report import Report
from .scope import ACTIVE_SCOPE, APP_CLASS, Scope, active_scope, app_class
from .scoped_generators import scoped_result
from .span_planner import begin, plan_method

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
    *((kind, ("__call__", "acall")) for kind in path_extractors.PLANNERS),
)
"""Methods that start a run, by class of app."""

PIPELINE_ENTRY_METHODS = (
    *("run", "arun", "run_multi", "arun_multi"),
    *("run_with_intermediates", "arun_with_intermediates"),
    *("run_multi_with_intermediates", "arun_multi_with_intermediates"),
)

_LAST_REPORT = "_conure_last_report"


def accelerate(app: T) -> T:
    """Return a copy of the app that does the same in less time.

    Args:
        app: a query engine, chat engine, response synthesizer, extractor (also of graph paths),
            ingestion pipeline or Workflow whose LLM is `Conure`; on core 0.12 also a
            QueryPipeline. It is not modified; the copy shares its parts.

    Raises:
        TypeError: if it is none of these.
    """
    kind = _accelerated_class(app_class(app))
    accelerated = copy.copy(app)
    object.__setattr__(accelerated, "__class__", kind)
    if _is_query_pipeline(kind):
        from ..pipeline.run import accelerate_nested

        accelerate_nested(accelerated, accelerate)
    elif isinstance(accelerated, IngestionPipeline):
        # A path extractor has no span in which it could be planned.
        accelerated.transformations = [
            accelerate(each) if app_class(each) in path_extractors.PLANNERS else each
            for each in accelerated.transformations
        ]
    return accelerated


@contextlib.contextmanager
def conure_run() -> Generator[Report, None, None]:
    """Run the calls of a `with` block as one run, for scripts, index building and evaluators.

    Parts of LlamaIndex that start in the block are planned as in an accelerated app, and all calls
    of the block, its tasks and its threads go into one program. The run ends with the block.
    A stream that is open then can still be read to its end. Calls made after the block are not part
    of the run, except those that a streamed response of a query engine, a chat engine or a
    synthesizer makes. A block inside a run belongs to that run.

    Yields:
        The report of the run, which grows until the run ends.
    """
    outer = active_scope()
    if outer is not None:
        yield outer.report
        return
    scope = begin()
    try:
        with ACTIVE_SCOPE.activate(scope):
            yield scope.report
    except BaseException:
        scope.release(has_failed=True)
        raise
    scope.release()


def explain(app: Any) -> Report:
    """Return the report of the last run that an accelerated app began.

    For runs at the same time, start each in a `conure_run` block, which yields its report.

    Raises:
        ValueError: if the app has not run, or is not accelerated.
    """
    report = vars(app).get(_LAST_REPORT)
    if report is None:
        raise ValueError(
            f"this {type(app).__name__} was not accelerated, did not run yet, or ran in a "
            "`conure_run` block, which yields the report"
        )
    return cast(Report, report)


def _is_query_pipeline(kind: type[Any]) -> bool:
    """Return whether an app is a QueryPipeline, which only core 0.12 has."""
    if find_spec("llama_index.core.query_pipeline") is None:
        return False
    from ..pipeline.core012 import QueryPipeline

    return issubclass(kind, QueryPipeline)


def _accelerated_class(kind: type[Any]) -> type[Any]:
    """Return the class of an accelerated app, for the class of the app.

    Raises:
        TypeError: if no entry methods are known for it.
    """
    if _is_query_pipeline(kind):
        return _accelerated_pipeline_class(kind)
    names = next((names for known, names in ENTRY_METHODS if issubclass(kind, known)), None)
    if names is None:
        raise TypeError(
            "accelerate takes a query engine, chat engine, response synthesizer, extractor, "
            f"ingestion pipeline or Workflow; this is of class {kind.__name__}; run other code in "
            "a `with conure_run():` block"
        )
    made = _subclass(kind, names)
    if issubclass(kind, Workflow):
        # Steps that are functions are stored in the class; use those of the app's class.
        del made._step_functions
    return made


def _accelerated_pipeline_class(kind: type[Any]) -> type[Any]:
    """Return the class of an accelerated QueryPipeline."""
    from ..pipeline.run import next_module_keys

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
    """Copy or pickle an accelerated app; its class is created again when it is loaded."""
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
            if active_scope() is not None:
                _plan_without_span(self, method, args, kwargs)
                return await method(self, *args, **kwargs)
            scope = _begin(self)
            try:
                with ACTIVE_SCOPE.activate(scope):
                    _plan_without_span(self, method, args, kwargs)
                    result = await method(self, *args, **kwargs)
            except BaseException:
                scope.release(has_failed=True)
                raise
            return _end(result, scope)

        return awaited

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active_scope() is not None:
            return method(self, *args, **kwargs)
        scope = _begin(self)
        try:
            with ACTIVE_SCOPE.activate(scope):
                result = method(self, *args, **kwargs)
        except BaseException:
            scope.release(has_failed=True)
            raise
        return _end(result, scope)

    return called


def _plan_without_span(app: Any, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Plan an app whose method has no span, which is that of a path extractor."""
    if app_class(app) in path_extractors.PLANNERS:
        plan_method(app, method, args, kwargs)


def _begin(app: Any) -> Scope:
    scope = begin(app)
    object.__setattr__(app, _LAST_REPORT, scope.report)
    return scope


def _end(result: Any, scope: Scope) -> Any:
    """End the run, or let it end with the stream or Workflow that the app returned."""
    if isinstance(result, WorkflowHandler):
        scope.ending = asyncio.ensure_future(_end_with_workflow(result, scope))
        return result
    try:
        return scoped_result(result, scope)
    finally:
        scope.release()


async def _end_with_workflow(handler: WorkflowHandler, scope: Scope) -> None:
    """End the run when its Workflow ends. The caller gets its result from the handler."""
    has_failed = True
    try:
        with contextlib.suppress(Exception):
            await _workflow_end(handler)
            has_failed = False
    finally:
        scope.release(has_failed=has_failed)


async def _workflow_end(handler: Any) -> None:
    """Wait for the end of a Workflow without taking its result.

    Raises:
        Exception: why it failed.
    """
    if isinstance(handler, asyncio.Future):  # llama-index-workflows 1
        await asyncio.wait([handler])
        handler.result()
    else:
        await handler.stop_event_result()
