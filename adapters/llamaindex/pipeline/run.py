"""Acceleration of a QueryPipeline: before every step, plans the calls whose inputs are known.

Invariants: the pipeline runs as in LlamaIndex, with one exception, joins: a join waits until every
module that leads to it has run or cannot run any more. It packs its inputs in the order of the
links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from ...speculation.planned_call import PlannedCall
from ..acceleration.plan_builder import NotPlanned
from ..acceleration.planned_run import PlannedRun
from ..acceleration.prompt_inputs import planned_call, text_read
from ..acceleration.scope import Scope, active_scope
from ..llm.llm import Conure
from ..llm.model_request import ModelRequest
from .core012 import QueryPipeline
from .reader import (
    PipelineReader,
    PlaceholderSource,
    is_join,
    is_waiting,
    ordered_by_links,
)


def accelerate_nested(pipeline: Any, accelerate: Callable[[Any], Any]) -> None:
    """Accelerate the nested pipelines of a pipeline, so that their joins wait."""
    pipeline.module_dict = {
        key: accelerate(module) if isinstance(module, QueryPipeline) else module
        for key, module in pipeline.module_dict.items()
    }


def next_module_keys(upstream: Any, pipeline: Any, run_state: Any) -> list[str]:
    """`QueryPipeline.get_next_module_keys` with waiting joins and planning.

    Args:
        upstream: the original method.
        pipeline: the running pipeline.
        run_state: state of the run.
    """
    scope = active_scope()
    # Nested pipelines are planned with the outermost one.
    if scope is not None and scope.app is pipeline:
        _plan_ahead(scope, pipeline, run_state)
    keys: list[str] = upstream(pipeline, run_state)
    waiting = [key for key in keys if is_waiting(pipeline, key, run_state.executed_modules)]
    ready = [key for key in keys if key not in waiting]
    inputs: dict[str, dict[str, Any]] = run_state.all_module_inputs
    if not ready:  # the remaining modules before a join are in a branch that was not taken
        ready = [key for key in pipeline.dag if key in waiting and inputs[key]][:1]
    for key in ready:
        if is_join(pipeline.module_dict[key]):
            inputs[key] = ordered_by_links(pipeline, key, inputs[key])
    return ready


def _plan_ahead(scope: Scope, pipeline: Any, run_state: Any) -> None:
    origins: dict[str, PlaceholderSource] = vars(run_state).setdefault("_conure_origins", {})
    new_calls: dict[PlannedRun, list[PlannedCall]] = defaultdict(list)

    def call(
        key: str, llm: Conure, call: ModelRequest, reads: frozenset[str], kind: Any
    ) -> PlaceholderSource:
        if key not in origins:
            session = scope.run_on(llm.connection())
            variable = session.fresh("call")
            origins[key] = PlaceholderSource(kind, variable, text_read(variable))
            planned = planned_call(variable, call, reads, place=key)
            new_calls[session].append(planned)
        return origins[key]

    def opaque(key: str, module: Any, inputs: Any) -> dict[str, Any]:
        raise NotPlanned(f"a {type(module).__name__} runs here")

    reading = PipelineReader(pipeline, call, opaque, is_planning=True)
    if reading.placeholders(run_state.all_module_inputs):
        scope.note("an input contains characters that are reserved for placeholders")
        return
    try:
        reading.read(run_state.all_module_inputs, frozenset(run_state.executed_modules))
    except Exception as problem:  # a real error occurs again in the pipeline itself
        scope.note(f"{type(problem).__name__}: {problem}")
    for session, planned_calls in new_calls.items():
        session.plan(planned_calls)
    for note in reading.notes:
        scope.note(note)
