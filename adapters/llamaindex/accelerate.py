"""LlamaIndex apps whose calls to the model run before they are asked for.

An accelerated app is the app itself: the same class, the same parts, the same events. It
runs as LlamaIndex runs it; only, whenever one of LlamaIndex's own response synthesizers or
extractors begins its work, the calls that it is going to make are planned and submitted,
and its calls are then answered from there. Knows the entrances of LlamaIndex's apps and the
spans by which it tells what begins. Refuses to know how a part is planned.

Kept true: no code of the user runs that would not run without; an app that cannot be
planned runs as it is, its calls in one program.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
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

from . import extractors, synthesizers
from .draft import Draft, NotPlanned
from .kept import keep
from .llm import Conure
from .report import Report
from .scope import OF, Scope, current, own_kind, running

T = TypeVar("T")

ENTRANCES: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
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
"""Methods by which an app is asked for something."""

PIPELINE_ENTRANCES = (
    *("run", "arun", "run_multi", "arun_multi"),
    *("run_with_intermediates", "arun_with_intermediates"),
    *("run_multi_with_intermediates", "arun_multi_with_intermediates"),
)

Planner: TypeAlias = Callable[[Any, type[Any], Draft, dict[str, Any]], list[str]]

PARTS: tuple[tuple[type[Any], tuple[str, ...], str, Planner], ...] = (
    (BaseSynthesizer, ("get_response", "aget_response"), "_llm", synthesizers.plan),
    (BaseExtractor, ("aextract",), "llm", extractors.plan),
)
"""What can be planned: its class, the methods that are its work, where its LLM is, and how."""

_LAST = "_conure_last_report"


def accelerate(app: T) -> T:
    """An app that does the same, sooner.

    Args:
        app: a query engine, chat engine, response synthesizer, extractor, ingestion pipeline
            or Workflow whose LLM is `Conure`; on core 0.12 a QueryPipeline. It stays as it
            is; the copy shares its parts.

    Raises:
        TypeError: if it is none of these.
    """
    kind = _accelerated(own_kind(app))
    accelerated = copy.copy(app)
    object.__setattr__(accelerated, "__class__", kind)
    if _has_query_pipelines():
        from .pipeline_run import accelerate_nested

        accelerate_nested(accelerated, accelerate)
    return accelerated


def explain(app: Any) -> Report:
    """What the last run of an accelerated app came to, call by call.

    Raises:
        ValueError: if the app has not run, or is not accelerated.
    """
    report = vars(app).get(_LAST)
    if report is None:
        raise ValueError(f"this {type(app).__name__} was not accelerated, or did not run yet")
    return cast(Report, report)


def _has_query_pipelines() -> bool:
    """Whether this is core 0.12."""
    return find_spec("llama_index.core.query_pipeline") is not None


def _accelerated(kind: type[Any]) -> type[Any]:
    """The class of an accelerated app, for the app's own class.

    Raises:
        TypeError: if there are no entrances to such an app.
    """
    if _has_query_pipelines():
        return _accelerated_pipeline(kind)
    names = next((names for known, names in ENTRANCES if issubclass(kind, known)), None)
    if names is None:
        raise TypeError(
            "accelerate takes a query engine, chat engine, response synthesizer, extractor, "
            f"ingestion pipeline or Workflow; this is of class {kind.__name__}"
        )
    made = _kind(kind, names)
    if issubclass(kind, Workflow):
        # Steps that are functions are kept by the class, and those of the app's are meant.
        del made._step_functions
    return made


def _accelerated_pipeline(kind: type[Any]) -> type[Any]:
    """The same for core 0.12, which has QueryPipeline, and other parts than are known here."""
    from .core012 import QueryPipeline
    from .pipeline_run import next_module_keys

    if not issubclass(kind, QueryPipeline):
        raise TypeError(
            f"accelerate takes a QueryPipeline on core 0.12, and this is of class {kind.__name__}; "
            "query engines, synthesizers and Workflows need core 0.13 or 0.14"
        )
    made: Any = _kind(kind, PIPELINE_ENTRANCES)
    of_kind: Any = kind
    upstream = of_kind.get_next_module_keys

    def get_next_module_keys(self: Any, run_state: Any) -> list[str]:
        return next_module_keys(upstream, self, run_state)

    made.get_next_module_keys = get_next_module_keys
    return cast(type[Any], made)


def _kind(kind: type[Any], names: tuple[str, ...]) -> type[Any]:
    """The class of an app, with entrances that begin a run.

    It has the name of the app's own class, which spans, events and Workflows are named after.
    """
    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce_ex__": _reduced,
        OF: kind,
    }
    metaclass: Any = type(kind)
    made: type[Any] = metaclass(kind.__name__, (kind,), body)
    for name in names:
        method = getattr(kind, name, None)
        # Set afterwards: LlamaIndex would give methods that a class is made with a span of
        # their own, beside that of the app's method.
        if method is not None:
            setattr(made, name, _entrance(method))
    return made


def _reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
    """How an accelerated app is copied and pickled: its class is made anew where it goes."""
    kind = getattr(type(self), OF)
    _, _, *state = kind.__reduce_ex__(self, max(protocol, 2))
    return _empty, (kind,), *state


def _empty(kind: type[Any]) -> Any:
    """An accelerated app of a class, before it gets its state."""
    made: Any = _accelerated(kind)
    return made.__new__(made)


def _entrance(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs the app's own one, in a run of its own if there is none yet."""
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def awaited(self: Any, *args: Any, **kwargs: Any) -> Any:
            if current() is not None:
                return await method(self, *args, **kwargs)
            scope = _begin(self)
            try:
                with running(scope):
                    made = await method(self, *args, **kwargs)
            except BaseException:
                scope.finish(is_failed=True)
                raise
            return _end(made, scope)

        return awaited

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current() is not None:
            return method(self, *args, **kwargs)
        scope = _begin(self)
        try:
            with running(scope):
                made = method(self, *args, **kwargs)
        except BaseException:
            scope.finish(is_failed=True)
            raise
        return _end(made, scope)

    return called


def _begin(app: Any) -> Scope:
    scope = Scope(app)
    object.__setattr__(app, _LAST, scope.report)
    root = get_dispatcher()
    if not any(isinstance(handler, Watch) for handler in root.span_handlers):
        root.add_span_handler(Watch())
    return scope


def _end(made: Any, scope: Scope) -> Any:
    """The app has returned; its run ends with it, or with what goes on after it."""
    if isinstance(made, WorkflowHandler):
        scope.going_on = asyncio.ensure_future(_until_done(made, scope))
        return made
    made, is_kept = keep(made, scope)
    if not is_kept:
        scope.finish()
    return made


async def _until_done(handler: WorkflowHandler, scope: Scope) -> None:
    """End the run with its Workflow. How that ended is told to whoever awaits the handler."""
    is_failed = True
    try:
        with contextlib.suppress(Exception):
            await handler.stop_event_result()
            is_failed = False
    finally:
        scope.finish(is_failed=is_failed)


class Watch(BaseSpanHandler[BaseSpan]):
    """Hears which part of an app begins, and has it planned; keeps no spans itself.

    It stands among LlamaIndex's span handlers from the first accelerated run on, and does
    nothing where none is running.
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
        scope = current()
        if scope is not None:
            name = id_.rsplit("-", 5)[0]
            scope.entered(id_, name, parent_span_id)
            for kind, methods, llm, plan in PARTS:
                if isinstance(instance, kind) and name.rpartition(".")[2] in methods:
                    _plan(scope, instance, getattr(instance, llm), plan, bound_args, name)
        return None

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> None:
        """Nothing was kept."""

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> None:
        """Nothing was kept."""


def _plan(
    scope: Scope,
    part: Any,
    llm: Any,
    plan: Planner,
    bound_args: inspect.BoundArguments,
    name: str,
) -> None:
    """Plan what a part of an app is going to ask for."""
    if not isinstance(llm, Conure):
        scope.note(f"{name}: its LLM is a {type(llm).__name__}")
        return
    arguments = dict(bound_args.arguments)
    arguments |= arguments.pop("response_kwargs", {}) | arguments.pop("kwargs", {})
    what = list(arguments.get("text_chunks", ()))
    if what and scope.is_expected(part, what):
        return
    try:
        session = scope.session(llm.connection())
        draft = Draft(llm, name, session.fresh)
        inner = plan(part, own_kind(part), draft, arguments)
        if inner:
            scope.expect(part, inner)
        if draft.calls and not session.is_planned(draft.calls[0].call):
            session.plan(draft.calls)
    except Exception as problem:
        # LlamaIndex would drop it without a word. What is an error will show as one when the
        # app itself gets there.
        kind = "" if isinstance(problem, NotPlanned) else f"{type(problem).__name__}: "
        scope.note(f"{name}: {kind}{problem}")
