"""An accelerated QueryPipeline: before every step, what can be known is planned.

Knows how core 0.12 runs a pipeline. Kept true: the pipeline runs as LlamaIndex runs it,
except that joins wait for all that leads to them and may still come, and pack it in the
order of the links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .call import Call
from .core012 import QueryPipeline
from .draft import NotPlanned
from .llm import Conure
from .pipeline import Origin, Reading, in_order_of_links, is_held_back, is_join
from .plan import Planned, text_read
from .scope import Scope, current
from .session import Session


def accelerate_nested(pipeline: Any, accelerate: Callable[[Any], Any]) -> None:
    """Have joins wait in the pipelines, too, that an accelerated pipeline is made of."""
    pipeline.module_dict = {
        key: accelerate(module) if isinstance(module, QueryPipeline) else module
        for key, module in pipeline.module_dict.items()
    }


def next_module_keys(upstream: Any, pipeline: Any, run_state: Any) -> list[str]:
    """`QueryPipeline.get_next_module_keys`, with joins that wait, and a look ahead.

    Args:
        upstream: the method itself.
        pipeline: that runs.
        run_state: of its run.
    """
    scope = current()
    # Pipelines within the one that was asked are looked at with it.
    if scope is not None and scope.app is pipeline:
        _look_ahead(scope, pipeline, run_state)
    keys: list[str] = upstream(pipeline, run_state)
    waiting = [key for key in keys if is_held_back(pipeline, key, run_state.executed_modules)]
    ready = [key for key in keys if key not in waiting]
    inputs: dict[str, dict[str, Any]] = run_state.all_module_inputs
    if not ready:  # what still leads to a join is a branch that was not taken
        ready = [key for key in pipeline.dag if key in waiting and inputs[key]][:1]
    for key in ready:
        if is_join(pipeline.module_dict[key]):
            inputs[key] = in_order_of_links(pipeline, key, inputs[key])
    return ready


def _look_ahead(scope: Scope, pipeline: Any, run_state: Any) -> None:
    origins: dict[str, Origin] = vars(run_state).setdefault("_conure_origins", {})
    drafts: dict[int, tuple[Session, list[Planned]]] = {}

    def call(key: str, llm: Conure, call: Call, reads: frozenset[str], kind: Any) -> Origin:
        if key not in origins:
            session = scope.session(llm.connection())
            variable = session.fresh("call")
            origins[key] = Origin(kind, variable, text_read(variable))
            planned = Planned(variable, call, reads, place=key)
            drafts.setdefault(id(session), (session, []))[1].append(planned)
        return origins[key]

    def opaque(key: str, module: Any, inputs: Any) -> dict[str, Any]:
        raise NotPlanned(f"a {type(module).__name__} runs here")

    reading = Reading(pipeline, call, opaque, streams=True)
    reading.read(run_state.all_module_inputs, frozenset(run_state.executed_modules))
    for session, planned in drafts.values():
        session.plan(planned)
    for note in reading.notes:
        scope.note(note)
