"""An accelerated QueryPipeline: before every step, what can be known is planned.

Knows how core 0.12 runs a pipeline. Kept true: the pipeline runs as LlamaIndex runs it,
except that joins wait.
"""

from __future__ import annotations

from typing import Any

from .call import Call
from .draft import NotPlanned
from .llm import Conure
from .pipeline import Origin, Reading, is_held_back
from .plan import Planned, text_read
from .scope import Scope, current
from .session import Session


def next_module_keys(upstream: Any, pipeline: Any, run_state: Any) -> list[str]:
    """`QueryPipeline.get_next_module_keys`, with joins that wait, and a look ahead.

    Args:
        upstream: the method itself.
        pipeline: that runs.
        run_state: of its run.
    """
    scope = current()
    if scope is not None:
        _look_ahead(scope, pipeline, run_state)
    executed = run_state.executed_modules
    keys: list[str] = upstream(pipeline, run_state)
    return [key for key in keys if not is_held_back(pipeline, key, executed)]


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

    reading = Reading(pipeline, call, opaque)
    reading.read(run_state.all_module_inputs, frozenset(run_state.executed_modules))
    for session, planned in drafts.values():
        session.plan(planned)
    for note in reading.notes:
        scope.note(note)
