"""Programs on simulated engines: the server's own state machine, queue and policies.

What is real: how a program's calls become ready (`runs.execution`), what each is worth
(`program.objective`), which prefixes it shares (`program.rope`), which call runs where and
when (`scheduling`). What is a model: engines (`engine`), the client and its round trips, and
the cache, which holds what the scheduler's books say.

A program comes either whole, or request by request from a client that knows its graph
and sends every call when the answers that it needs are there, each over a round trip.

Kept true: the same submissions give the same times, always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ..program.ir import Generate, Options
from ..runs.execution import Execution, Ready
from ..scheduling.demand import MAX_PREFIXES, MIN_PREFIX_TOKENS, Demand, Prefix, Standing
from ..scheduling.policy import policy_named
from ..scheduling.scheduler import Placement, Scheduler, Ticket
from .blueprint import Blueprint, CallShape
from .clock import Clock
from .engine import Costs, SimulatedEngine, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Engines, and how programs reach them."""

    policy: str
    cost: Costs
    num_engines: int = 1
    capacity: int = 45_000
    """Tokens of an engine."""
    max_sequences: int = 256
    strict_tokens: int | None = None
    """Tokens that an engine may hold while somebody waits for one of its calls by itself."""
    whole_programs: bool = True
    """False: calls are sent one by one by their client."""
    has_prefix_cache: bool = True
    """False: nothing is shared, every prompt is filled whole."""
    books_peaks: bool = True
    """Whether engines tell their steps; else a call is booked with all it may write."""
    reads_shared_once: bool = True
    """Whether attention reads a prefix once for all that share it."""
    round_trip_s: Callable[[], float] = field(default=lambda: 0.0)
    """Drawn for every request of a client, half of it on each way."""


@dataclass(slots=True)
class Outcome:
    """What became of one program."""

    came_s: float
    ended_s: float = float("nan")
    """When its client had the last output."""
    decode_s: float = 0.0
    """From first to last tokens of its calls, summed."""
    queued_s: float = 0.0
    num_output: int = 0

    @property
    def took_s(self) -> float:
        """As its client saw it."""
        return self.ended_s - self.came_s


class Simulation:
    """One run of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.clock = Clock()
        self.outcomes: list[Outcome] = []
        self.scheduler = Scheduler(
            policy_named(setting.policy),
            strict_tokens=setting.strict_tokens,
            defer=self.clock.defer,
        )
        pace = self.scheduler.pace  # of the rest, the server learns as it goes
        pace.prompt_token_s = setting.cost.prompt_token_s
        pace.held_token_s = setting.cost.held_token_s
        self.engines = {
            name: SimulatedEngine(
                name, self.clock, setting.cost, reads_shared_once=setting.reads_shared_once
            )
            for name in (f"engine-{i}" for i in range(setting.num_engines))
        }
        for name, engine in self.engines.items():
            self.scheduler.engine_arrived(
                name,
                capacity=setting.capacity,
                max_sequences=setting.max_sequences,
                steps=engine.steps_now if setting.books_peaks else None,
            )

    def submit(
        self, blueprint: Blueprint, at_s: float, then: Callable[[], None] | None = None
    ) -> Outcome:
        """Let a client send a program at a time; `then` is called when it has the answer."""
        outcome = Outcome(at_s)
        run = _ProgramRun(self, blueprint, outcome, len(self.outcomes), then)
        self.outcomes.append(outcome)
        self.clock.at(at_s, run.begin)
        return outcome

    def run(self) -> None:
        """Let everything happen; every program has ended then."""
        self.clock.run()
        assert self.scheduler.num_waiting == 0, "calls that no engine takes"


class _ProgramRun:
    """One program on its way."""

    def __init__(
        self,
        simulation: Simulation,
        blueprint: Blueprint,
        outcome: Outcome,
        number: int,
        then: Callable[[], None] | None,
    ) -> None:
        self._simulation = simulation
        self._setting = simulation.setting
        self._clock = simulation.clock
        self._blueprint = blueprint
        self._outcome = outcome
        self._name = f"p{number}"
        self._salt = self._name.encode()
        self._then = then
        self._attained_s = 0.0
        self._execution = Execution(
            self._name,
            "",
            blueprint.graph,
            dict.fromkeys(blueprint.graph.given | blueprint.graph.inputs, ""),
            Options(),
            name="",
            is_open=False,
            created_at=outcome.came_s,
        )

    def begin(self) -> None:
        """The client sends the program, or its first requests."""
        if self._setting.whole_programs:
            self._clock.after(self._setting.round_trip_s() / 2, self._start)
        else:
            self._start()

    def _start(self) -> None:
        self._advance(self._execution.start())

    def _advance(self, ready: list[Ready]) -> None:
        work = list(ready)
        while work:
            node_id, slot = work.pop()
            if isinstance(self._execution.graph.nodes[node_id], Generate):
                self._request(node_id)
            else:
                work += self._resolve(node_id, slot)
        if self._execution.is_complete:
            self._end()

    def _resolve(self, node_id: str, slot: int) -> list[Ready]:
        execution = self._execution
        ready: list[Ready] = []
        for variable in execution.graph.slots[node_id][slot].writes:
            ready += execution.commit(variable, "")
        return ready + execution.finish_slot(node_id, slot, at=self._clock.now)

    def _end(self) -> None:
        if self._setting.whole_programs:
            self._clock.after(self._setting.round_trip_s() / 2, self._answered)
        else:
            self._answered()

    def _answered(self) -> None:
        self._outcome.ended_s = self._clock.now
        if self._then is not None:
            self._then()

    # --- one call -------------------------------------------------------------------------

    def _request(self, node_id: str) -> None:
        """A call can run: it is in the queue at once, or half a round trip later."""
        if self._setting.whole_programs:
            self._queue(node_id, 0.0)
            return
        half_s = self._setting.round_trip_s() / 2
        self._clock.after(half_s, partial(self._queue, node_id, half_s))

    def _queue(self, node_id: str, answer_s: float) -> None:
        call = self._blueprint.calls[node_id]
        now = self._clock.now
        performance = call.performance
        is_waited = performance.kind == "latency"
        standing = Standing(
            came_s=now,
            began_s=self._outcome.came_s,
            kind=performance.kind,
            depth=performance.depth,
            total_s=self._blueprint.total_s,
            priority=call.priority,
            attained_s=self._attained_s,
        )
        demand = Demand(
            program=self._name,
            num_prompt=call.num_prompt,
            num_output=call.num_output,
            prefixes=self._prefixes(call) if self._setting.has_prefix_cache else (),
            group=performance.group,
            is_strict=is_waited and performance.group is None,
            is_waited=is_waited,
        )
        scheduler = self._simulation.scheduler
        rank = scheduler.policy.rank(standing).at_s
        ticket = Ticket(demand, rank, lambda placement: self._placed(placement, ticket, finish))
        finish = partial(self._finished, node_id, now, answer_s)
        scheduler.submit(ticket)

    def _prefixes(self, call: CallShape) -> tuple[Prefix, ...]:
        """As `prefixes_of` names them, by symbols: a value is named by its program."""
        far: list[Prefix] = []
        for digest, num_tokens, is_constant in call.boundaries:
            if num_tokens >= (far[-1].num_tokens if far else 0) + MIN_PREFIX_TOKENS:
                key = digest if is_constant else digest + self._salt
                far.append(Prefix(key, num_tokens, stays=True))
        half = MAX_PREFIXES // 2
        return tuple(far if len(far) <= MAX_PREFIXES else far[:half] + far[-half:])

    def _placed(
        self, placement: Placement, ticket: Ticket, finished: Callable[[Ticket, float], None]
    ) -> None:
        began_s = self._clock.now
        scheduler = self._simulation.scheduler
        work = Work(
            ticket.demand,
            ticket.num_filling,
            ticket.demand.num_output,
            ticket.rank,
            filled=lambda: scheduler.filled(ticket),
            finished=lambda: finished(ticket, began_s),
        )
        self._simulation.engines[placement.engine].start(work)

    def _finished(
        self, node_id: str, came_s: float, answer_s: float, ticket: Ticket, began_s: float
    ) -> None:
        now = self._clock.now
        self._simulation.scheduler.withdraw(ticket)
        self._attained_s += now - began_s
        self._outcome.queued_s += began_s - came_s
        self._outcome.decode_s += now - began_s
        self._outcome.num_output += ticket.demand.num_output
        if answer_s:
            self._clock.after(answer_s, partial(self._answer, node_id))
        else:
            self._answer(node_id)

    def _answer(self, node_id: str) -> None:
        self._advance(self._resolve(node_id, 0))
