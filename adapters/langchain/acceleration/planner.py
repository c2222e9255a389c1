"""Plans of chains: the calls that are known before a chain runs.

`planner` compiles a chain as `to_program` does, but accepts every part. A part that has no
equivalent in a program (user code, parsers, retrievers, other models, branches) becomes an
*awaited* value: the chain computes the value when it reaches the part, and the plan continues after
the part. No user code runs for a plan.

Some awaited parts contain chains: the arms of a branch, the body of `.map()`, the targets of
fallbacks and retries. Which of them run, and on which input, is known when the chain enters them;
they then get their own plans (`probes`).

Invariant: the chain makes every call of its plan, unless an earlier step raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from langchain_core.globals import get_llm_cache
from langchain_core.messages import BaseMessage
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableConfig,
    RunnableParallel,
)
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.configurable import RunnableConfigurableAlternatives

from conure.server.program.errors import ProgramError
from conure.server.program.expressions.evaluate import input_expression, variables
from conure.server.program.ir import Json

from ...speculation.planned_call import PlannedCall
from ..chat.answer_cache import cache_of
from ..chat.model import ChatConure
from ..compilation.chain_graph import ChainGraph, ChainPosition, UnsupportedPartError, unsupported
from ..compilation.compiler import ChainCompiler, merged_config, outside_of_runs
from ..compilation.control_flow import CONTROL
from ..compilation.traversal import is_opaque, is_other_model
from ..compilation.values import AnswerValue, ClientValue, Record, Source, Value
from .plan import AwaitedValue, ChainPlan

_MADE_BY_FACTORY: Final = "a function of the app makes it"
_PARTS_OF_TEMPLATES: Final = ("prompt", "example_prompt", "prefix", "suffix", "messages")
"""Fields of LangChain's templates that contain texts, messages or other templates."""


def plan_of(
    chain: Runnable[Any, Any], *, identity: object, prefix: str, config: RunnableConfig | None
) -> ChainPlan:
    """Return the plan of a chain.

    Args:
        chain: any Runnable.
        identity: models with this identity (`identity_of`) are planned, others are awaited.
        prefix: prefix of all names in the plan.
        config: decides the values of configurable fields. None: their defaults.
    """
    return outside_of_runs(lambda: _plan_of(chain, identity, prefix, config))


def _plan_of(
    chain: Runnable[Any, Any], identity: object, prefix: str, config: RunnableConfig | None
) -> ChainPlan:
    # A Runnable made from a callable without `__name__` has no attribute `name`.
    graph = ChainGraph(getattr(chain, "name", None) or "chain", prefix=prefix)
    compiler = _PlanningCompiler(graph, identity)
    position = ChainPosition(
        "chain", "answer", {"configurable": (config or {}).get("configurable", {})}
    )
    compiler.compile(chain, ClientValue(graph.root, lambda given: given), position)
    for answer in compiler.calls.values():
        answer.call.is_message = True
    nodes = graph.build([])["nodes"]
    calls = tuple(
        PlannedCall(place, answer.call.variable, node, frozenset(_reads(node)))
        for (place, answer), node in zip(compiler.calls.items(), nodes, strict=True)
    )
    # If the only call of a chain reads everything that the chain computes before it, running ahead
    # gains nothing: the call is sent when the chain reaches it.
    is_direct = len(calls) == 1 and not compiler.may_grow and compiler.reads_all(calls[0])
    return ChainPlan(
        calls,
        compiler.awaited,
        graph.root,
        compiler.may_grow,
        is_direct,
        names=frozenset(graph.names),
        models=tuple((model, dict(vars(model))) for model in compiler.models),
        has_cache=get_llm_cache() is not None,
    )


def identity_of(model: ChatConure) -> object:
    """Return an identifier of the server that a model's calls go to, and of their sender."""
    return model.connection().identity


class _PlanningCompiler(ChainCompiler):
    """A compiler that continues after parts that have no equivalent in a program."""

    def __init__(self, graph: ChainGraph, identity: object) -> None:
        super().__init__(graph)
        self.calls: dict[str, AnswerValue] = {}
        self.awaited: dict[str, AwaitedValue] = {}
        self.models: list[ChatConure] = []
        self.may_grow = False
        """Whether parts of the chain are planned later."""
        self._identity = identity
        self._num_parallel = 0
        """Number of enclosing parts with parallel branches."""
        self._unread: list[Source] = []
        """Awaited values that no later awaited value is computed from."""
        self._before_call: list[Source] | None = None
        """`_unread` when the first call was compiled; None if that call is in a parallel branch."""

    def reads_all(self, call: PlannedCall) -> bool:
        """Return whether the first call reads everything that the chain computes before it."""
        return self._before_call is not None and all(
            any(view.variable in call.reads for view in source.views)
            for source in self._before_call
        )

    def compile(self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition) -> Value:
        """Return the symbolic output of a Runnable; awaited where the server cannot compute it."""
        mapper = runnable.mapper if isinstance(runnable, RunnableAssign) else runnable
        has_branches = isinstance(mapper, RunnableParallel) and len(mapper.steps__) > 1
        self._num_parallel += has_branches
        try:
            return self._compile_part(runnable, value, position)
        finally:
            self._num_parallel -= has_branches

    def _compile_part(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        if is_other_model(runnable):
            self.may_grow |= is_opaque(runnable)  # its methods may call accelerated parts
            return self._await(
                runnable,
                value,
                position,
                "its calls do not reach Conure: use ChatConure as the model",
            )
        if is_opaque(runnable) and not isinstance(runnable, BasePromptTemplate):
            self.may_grow = True
            return self._await(
                runnable, value, position, "its class overrides methods of LangChain"
            )
        if isinstance(runnable, CONTROL):
            self.may_grow = True
            return self._await(runnable, value, position, "planned when the chain gets there")
        if isinstance(runnable, BasePromptTemplate) and not _is_inert(runnable):
            return self._await(
                runnable, value, position, "runs code of the app when it is formatted"
            )
        try:
            return super().compile(runnable, value, position)
        except ProgramError as problem:
            why = problem.message
            if isinstance(problem, UnsupportedPartError) and problem.path == position.path:
                why = problem.reason
            return self._await(runnable, value, position, why)
        except Exception as problem:  # the chain itself raises the error when it gets there
            return self._await(runnable, value, position, f"{type(problem).__name__}: {problem}")

    def _joined_functions(self, steps: Sequence[Runnable[Any, Any]]) -> list[Runnable[Any, Any]]:
        return []  # functions are awaited one by one

    def _compile_operator(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
    ) -> Value | None:
        return None  # the chain computes it; a plan contains calls only

    def _compile_wrapper(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        if _is_made_by_factory(runnable, position.config):
            return self._await(runnable, value, position, _MADE_BY_FACTORY)
        return super()._compile_wrapper(runnable, value, position)

    def _compile_functions(
        self, runnables: list[Runnable[Any, Any]], value: Value, position: ChainPosition
    ) -> ClientValue:
        why = "code of the app, a parser, or another provider's model"
        return self._await(runnables[0], value, position, why)

    def _compile_binding(
        self, binding: RunnableBinding[Any, Any], value: Value, position: ChainPosition
    ) -> Value:
        config = merged_config(binding, position)
        if binding.kwargs and _is_made_by_factory(binding.bound, config):
            return self._await(binding, value, position, _MADE_BY_FACTORY)
        if binding.config_factories:  # listeners: the chain still calls them itself
            binding = binding.model_copy(update={"config_factories": []})
        return super()._compile_binding(binding, value, position)

    def _compile_model(
        self, model: ChatConure, kwargs: Mapping[str, Any], value: Value, position: ChainPosition
    ) -> AnswerValue:
        self.models.append(model)
        answer = super()._compile_model(model, kwargs, value, position)
        if not self.calls and not self._num_parallel:
            self._before_call = list(self._unread)
        self.calls[position.path] = answer
        return answer

    def _check_model(self, model: ChatConure, position: ChainPosition) -> None:
        if identity_of(model) != self._identity:
            raise unsupported(position, "a model of another server, or with other headers")
        if model.cache is True or cache_of(model.cache) is not None:
            raise unsupported(position, "LangChain's cache may have the answer")
        if model.rate_limiter is not None:
            raise unsupported(position, "its rate limiter decides when it runs")

    def _limits_of(self, model: ChatConure) -> dict[str, float]:
        return {}  # the time of a call begins when the chain makes it

    def _await(
        self, runnable: Runnable[Any, Any], value: Value, position: ChainPosition, why: str
    ) -> ClientValue:
        what = type(runnable).__name__
        read = _sources_of(value)
        self._unread = [each for each in self._unread if not any(each is one for one in read)]
        source = Source(f"{position.hint}_{runnable.get_name()}")
        self._unread.append(source)
        self.awaited[position.path] = AwaitedValue(position.path, what, why, source)
        return ClientValue(source, lambda made: made)


def _is_made_by_factory(runnable: Any, config: Mapping[str, Any]) -> bool:
    """Return whether a function makes the alternative that the config chooses."""
    while isinstance(runnable, RunnableConfigurableAlternatives):
        chosen = merge_configs(runnable.config, cast(RunnableConfig, dict(config)))
        which = chosen.get("configurable", {}).get(runnable.which.id, runnable.default_key)
        runnable = runnable.alternatives.get(which, runnable.default)
        if not isinstance(runnable, Runnable):
            return True
    return False


def _sources_of(value: Value) -> list[Source]:
    """Return the client values that a value is computed from."""
    if isinstance(value, ClientValue):
        return [value.source]
    if isinstance(value, Record):
        parts: list[Value] = [*value.fields.values(), *([value.rest] if value.rest else [])]
        return [source for part in parts for source in _sources_of(part)]
    return []


def _is_inert(template: Any) -> bool:
    """Return whether formatting a template runs no user code, so that it may happen twice."""
    if isinstance(template, BaseMessage):  # may have extra fields of any name
        return True
    if not type(template).__module__.startswith("langchain_core."):
        return False
    if getattr(template, "example_selector", None) is not None:
        return False
    if any(map(callable, getattr(template, "partial_variables", {}).values())):
        return False
    fields = [getattr(template, name, None) for name in _PARTS_OF_TEMPLATES]
    parts = [part for each in fields for part in (each if isinstance(each, list) else [each])]
    return all(_is_inert(part) for part in parts if part is not None and not isinstance(part, str))


def _reads(node: dict[str, Json]) -> Iterator[str]:
    for message in node["messages"]:
        if "splice" in message:
            yield message["splice"]
        elif isinstance(message.get("content"), list):
            for segment in message["content"]:
                if "input" in segment:
                    yield from variables(input_expression(segment["input"]))
