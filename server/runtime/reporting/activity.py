"""What the engines hold now, and which calls wait: the body of `GET /v1/activity`.

The lists are bounded; next to each list is the number of all its entries. Only programs of one
tenant are named; the contexts and calls of others are counted.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from ...engines.protocol import EMBEDDINGS_OWNER, Engine
from ..calls.pins import OWNER
from ..calls.prefix_registry import RetainedContext
from ..calls.program_calls import ProgramCalls
from ..program_run import ProgramRun
from ..services import RuntimeServices
from .kv_tree import KvBranch, kv_tree

MAX_PROGRAMS = 50
"""Programs that are listed for an engine, those with the most contexts."""
MAX_NODES = 50
"""Nodes that are listed for a program or a prefix."""
MAX_WAITING = 50
"""Waiting calls that are listed, those that start first."""
MAX_CACHED = 50
"""Cached prefixes that are listed, those that are evicted first."""


class RetainedPrefix(Struct, frozen=True, kw_only=True):
    """The beginning of a prompt whose KV is held for calls that have not started."""

    tokens: int
    generated_tokens: int
    """Tokens of it that the model generated."""
    readers: list[str]
    """Nodes that will start from it."""
    num_readers: int


class ProgramHolding(Struct, frozen=True, kw_only=True):
    """What one program holds on an engine."""

    program: str
    name: str
    contexts: int
    running: list[str]
    """Nodes whose calls run on the engine."""
    num_running: int
    retained: list[RetainedPrefix]
    num_retained: int
    """Prefixes that the program keeps for later calls."""


class EngineActivity(Struct, frozen=True, kw_only=True):
    """One engine as the scheduler sees it. Token counts refer to the KV cache."""

    id: str
    model: str
    block_size: int
    """Tokens per block."""
    num_blocks: int
    context_len: int
    max_sequences: int
    """Calls that it decodes at once."""
    calls: int
    """Calls on the engine."""
    reserved_tokens: int
    """What these calls hold if all reach their maximum length at once."""
    peak_tokens: int
    """What they will hold together at most, as forecast."""
    shared_tokens: int
    """Prompt tokens that several of these calls read and that are held once."""
    saved_tokens: int
    """Additional tokens that these calls would hold without sharing."""
    tree: list[KvBranch]
    """The prompts of running calls as a tree, each branch before those that it contains."""
    evicted_next: list[int]
    """Tokens of cached prefixes, in the order in which they are evicted."""
    num_cached_prefixes: int
    programs: list[ProgramHolding]
    num_programs: int
    """Programs with a context on the engine; embeddings and pins are none."""


class CallInQueue(Struct, frozen=True, kw_only=True):
    """A call that waits for an engine."""

    program: str
    node: str
    prompt_tokens: int
    output_tokens: int
    """Maximum number of output tokens."""
    why: str


class ServerActivity(Struct, frozen=True, kw_only=True):
    """The engines and the queue at one moment."""

    engines: list[EngineActivity]
    waiting: list[CallInQueue]
    """Calls in the order in which they start."""
    num_waiting: int
    num_programs: int
    """Programs that have not ended."""


def server_activity(
    services: RuntimeServices, find_run: Callable[[str], ProgramRun | None], *, num_programs: int
) -> ServerActivity:
    """Return the activity of a server.

    Args:
        services: the server's components.
        find_run: returns a live program by id; None if there is none that may be named.
        num_programs: programs that have not ended.
    """
    scheduler = services.scheduler
    waiting = []
    for request in scheduler.first_waiting(MAX_WAITING):
        run = find_run(request.program)
        state = None if run is None else run.state.nodes.get(request.node)
        if state is not None:
            waiting.append(
                CallInQueue(
                    program=request.program,
                    node=request.node,
                    prompt_tokens=request.num_prompt,
                    output_tokens=request.num_output,
                    why=state.why,
                )
            )
    return ServerActivity(
        engines=[
            _engine_activity(engine, services, find_run) for engine in services.engines.values()
        ],
        waiting=waiting,
        num_waiting=scheduler.num_waiting,
        num_programs=num_programs,
    )


def _engine_activity(
    engine: Engine, services: RuntimeServices, find_run: Callable[[str], ProgramRun | None]
) -> EngineActivity:
    limits = engine.hello.limits
    reservations = services.scheduler.reservations(engine.name)
    assert reservations is not None, "the scheduler has no record of a running engine"
    shared = [each for each in reservations.active_prefixes.values() if len(each.readers) > 1]
    owners = engine.num_contexts_by_owner
    of_programs = [each for each in owners.items() if each[0] not in (OWNER, EMBEDDINGS_OWNER)]
    programs: list[ProgramHolding] = []
    for program, num_contexts in sorted(of_programs, key=lambda owner: -owner[1]):
        run = find_run(program) if len(programs) < MAX_PROGRAMS else None
        if run is not None:
            programs.append(_holding(run, engine.name, num_contexts))
    return EngineActivity(
        id=engine.name,
        model=engine.hello.model,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        context_len=limits.context_len,
        max_sequences=limits.max_sequences,
        calls=reservations.num_calls,
        reserved_tokens=reservations.reserved_tokens,
        peak_tokens=reservations.peak,
        shared_tokens=sum(each.num_tokens for each in shared),
        saved_tokens=sum(each.num_tokens * (len(each.readers) - 1) for each in shared),
        tree=kv_tree(reservations, lambda program: find_run(program) is not None),
        evicted_next=list(reservations.cached_prefixes.values())[:MAX_CACHED],
        num_cached_prefixes=len(reservations.cached_prefixes),
        programs=programs,
        num_programs=len(of_programs),
    )


def _holding(run: ProgramRun, engine: str, num_contexts: int) -> ProgramHolding:
    calls = run.context.executor(ProgramCalls)
    running, retained = calls.running_on(engine), calls.retained_on(engine)
    return ProgramHolding(
        program=run.state.id,
        name=run.state.name,
        contexts=num_contexts,
        running=running[:MAX_NODES],
        num_running=len(running),
        retained=[_retained(context, readers) for context, readers in retained[:MAX_NODES]],
        num_retained=len(retained),
    )


def _retained(context: RetainedContext, readers: list[str]) -> RetainedPrefix:
    return RetainedPrefix(
        tokens=len(context.ids),
        generated_tokens=max(0, len(context.ids) - context.num_prompt),
        readers=readers[:MAX_NODES],
        num_readers=len(readers),
    )
