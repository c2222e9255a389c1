"""Programs on simulated engines, with the server's own state machine, scheduler and policies.

Real code determines how a program's calls become ready (`runtime.program_state`), their priority
inputs (`graph.objectives`), the prefixes that they share (`prompt_prefix`), and where and when they
run (`scheduling`). Modelled are the engines (`engine`), the client with its round trips, and the
cache, which contains exactly the contexts of the scheduler's reservations.

A program is sent either as a whole, or request by request from a client that has its graph and
sends every call when its inputs are available, each with a round trip.

Invariant: the same submissions always give the same times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from conure.server.program.graph.objectives import PerformanceObjective
from conure.server.program.ir import GenerateNode, Options
from conure.server.runtime.calls.remaining_work import RemainingWork
from conure.server.runtime.node_state import Ready
from conure.server.runtime.program_state import ProgramState
from conure.server.scheduling.policy import Policy, policy_named
from conure.server.scheduling.request import (
    MAX_PREFIXES,
    MIN_PREFIX_TOKENS,
    PriorityInputs,
    PromptPrefix,
    ResourceRequest,
)
from conure.server.scheduling.scheduler import Placement, QueuedCall, Scheduler
from simulation.clock import SimulationClock
from simulation.engine import CostModel, LinearCosts, SimulatedCall, SimulatedEngine
from simulation.stepwise_engine import StepLimits, StepwiseEngine
from simulation.workload_profile import CallShape, WorkloadProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """Engines, and how programs are sent to them."""

    policy: str | Policy
    cost: CostModel
    num_engines: int = 1
    capacity: int = 45_000
    """Tokens of KV memory per engine."""
    max_sequences: int = 256
    latency_tokens: int | None = None
    """Maximum number of tokens that an engine holds while it runs a latency-critical call."""
    whole_programs: bool = True
    """False: the client sends calls one by one."""
    has_prefix_cache: bool = True
    """False: the scheduler knows no prefixes. An engine that runs step by step still finds them."""
    forecasts_peaks: bool = True
    """Whether engines report their steps; otherwise each call reserves its maximum length."""
    reads_shared_once: bool = True
    """Whether attention reads a prefix once for all calls that share it."""
    deduces_objectives: bool = True
    """False: a reader is assumed to wait for every call by itself, as for single requests."""
    has_groups: bool = True
    """False: the calls of a stage are not known to be a task group."""
    has_remaining_work: bool = True
    """False: the engine time of a program's remaining calls does not change its rank."""
    holds_programs: bool = True
    """False: no program is held before it begins."""
    block_size: int = 1
    """Tokens per block of KV memory."""
    steps: StepLimits | None = None
    """Engines simulate every step, with chunks of prompts; None: prompts are prefilled whole."""
    round_trip_s: Callable[[], float] = field(default=lambda: 0.0)
    """Called for every request of a client. Half of the time is spent in each direction."""


class CallTrace(NamedTuple):
    """One call that has run."""

    program: int
    """Index of the program's outcome."""
    request: ResourceRequest
    started_s: float
    ended_s: float


@dataclass(slots=True)
class ProgramOutcome:
    """Times of one program."""

    arrived_s: float
    ended_s: float = float("nan")
    """When the client received the last output."""
    decode_s: float = 0.0
    """Sum of the durations of its calls, from start to end."""
    queued_s: float = 0.0
    num_output: int = 0

    @property
    def took_s(self) -> float:
        """Return the duration from the client's point of view."""
        return self.ended_s - self.arrived_s


class Simulation:
    """One simulation of one configuration."""

    def __init__(self, setting: SimulationConfig) -> None:
        self.setting = setting
        self.clock = SimulationClock()
        self.outcomes: list[ProgramOutcome] = []
        self.calls: list[CallTrace] = []
        """Every call that has ended."""
        self.scheduler = Scheduler(
            policy_named(setting.policy) if isinstance(setting.policy, str) else setting.policy,
            latency_tokens=setting.latency_tokens,
            defer=self.clock.defer,
        )
        pace = self.scheduler.service_time  # The other averages are learned during the run.
        pace.prompt_token_s = setting.cost.prompt_token_s
        pace.held_token_s = setting.cost.held_token_s
        pace.tokens_per_char = 1.0  # Texts have lengths in tokens.
        self.shortest_step_s = setting.cost.steps_s(1, 1, 0)
        self.engines = {
            name: self._engine(name) for name in (f"engine-{i}" for i in range(setting.num_engines))
        }
        for name, engine in self.engines.items():
            self.scheduler.add_engine(
                name,
                capacity=setting.capacity,
                max_sequences=setting.max_sequences,
                steps=engine.steps_now if setting.forecasts_peaks else None,
                block_size=setting.block_size,
            )

    def _engine(self, name: str) -> SimulatedEngine | StepwiseEngine:
        setting = self.setting
        if setting.steps is None:
            shared = {"reads_shared_once": setting.reads_shared_once}
            return SimulatedEngine(name, self.clock, setting.cost, **shared)
        assert isinstance(setting.cost, LinearCosts), "steps need linear costs"
        return StepwiseEngine(name, self.clock, setting.cost, setting.steps)

    def submit(
        self, profile: WorkloadProfile, at_s: float, then: Callable[[], None] | None = None
    ) -> ProgramOutcome:
        """Let a client send a program at a time; `then` is called when the client has the
        result.
        """
        outcome = ProgramOutcome(at_s)
        run = _ProgramRun(self, profile, outcome, len(self.outcomes), then)
        self.outcomes.append(outcome)
        self.clock.at(at_s, run.begin)
        return outcome

    def run(self) -> None:
        """Run until no event is left: every program has ended."""
        self.clock.run()
        assert self.scheduler.num_waiting == 0, "calls that no engine takes"


class _ProgramRun:
    """One running program."""

    def __init__(
        self,
        simulation: Simulation,
        profile: WorkloadProfile,
        outcome: ProgramOutcome,
        number: int,
        then: Callable[[], None] | None,
    ) -> None:
        self._simulation = simulation
        self._setting = simulation.setting
        self._clock = simulation.clock
        self._profile = profile
        self._outcome = outcome
        self._number = number
        self._name = f"p{number}"
        self._salt = self._name.encode()
        self._then = then
        self._attained_s = 0.0
        self._has_begun = False
        self._work = RemainingWork()
        for node_id, shape in profile.calls.items():
            self._work.add_call(node_id, shape.size)
        self._execution = ProgramState(
            self._name,
            "",
            profile.graph,
            dict.fromkeys(profile.graph.provided_inputs | profile.graph.inputs, ""),
            Options(),
            name="",
            is_open=False,
            created_at=outcome.arrived_s,
        )

    def begin(self) -> None:
        """Send the program, or its first requests."""
        if self._setting.whole_programs:
            self._clock.after(self._setting.round_trip_s() / 2, self._start)
        else:
            self._start()

    def _start(self) -> None:
        self._handle_ready(self._execution.start())

    def _handle_ready(self, ready: list[Ready]) -> None:
        work = list(ready)
        while work:
            node_id, slot = work.pop()
            if isinstance(self._execution.graph.nodes[node_id], GenerateNode):
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
            self._clock.after(self._setting.round_trip_s() / 2, self._client_received)
        else:
            self._client_received()

    def _client_received(self) -> None:
        self._outcome.ended_s = self._clock.now
        if self._then is not None:
            self._then()

    # --- one call -------------------------------------------------------------------------

    def _request(self, node_id: str) -> None:
        """Queue a call that is ready, after half a round trip if the client sends it."""
        if self._setting.whole_programs:
            self._queue(node_id, 0.0)
            return
        half_s = self._setting.round_trip_s() / 2
        self._clock.after(half_s, partial(self._queue, node_id, half_s))

    def _queue(self, node_id: str, delay_s: float) -> None:
        """Queue a call whose answer reaches the program after a delay."""
        shape = self._profile.calls[node_id]
        performance = shape.performance
        if not self._setting.deduces_objectives:
            performance = PerformanceObjective("latency", None, 0)
        prefixes = self._prefixes(shape)
        scheduler = self._simulation.scheduler
        finish = partial(self._finished, node_id, self._clock.now, delay_s)
        call = QueuedCall(
            self._resource_request(shape, performance, prefixes),
            scheduler.policy.rank(self._priority_inputs(shape, performance)).at_s,
            lambda placement: self._placed(placement, call, prefixes, finish),
            on_wait=lambda _: self._watch(call),
        )
        scheduler.submit(call)

    def _priority_inputs(
        self, shape: CallShape, performance: PerformanceObjective
    ) -> PriorityInputs:
        latest_s = shape.latest_start_s
        return PriorityInputs(
            arrived_at_s=self._clock.now,
            program_started_at_s=self._outcome.arrived_s,
            kind=performance.kind,
            depth=performance.depth,
            total_s=self._profile.total_s,
            remaining_work_s=self._remaining_work_s(),
            priority=shape.priority,
            latest_start_s=None if latest_s is None else self._outcome.arrived_s + latest_s,
            attained_s=self._attained_s,
        )

    def _resource_request(
        self,
        shape: CallShape,
        performance: PerformanceObjective,
        prefixes: tuple[PromptPrefix, ...],
    ) -> ResourceRequest:
        is_latency_sensitive = performance.kind == "latency"
        return ResourceRequest(
            program=self._name,
            num_prompt=shape.num_prompt,
            num_output=shape.num_output,
            prefixes=prefixes if self._setting.has_prefix_cache else (),
            group=performance.group if self._setting.has_groups else None,
            is_latency_critical=is_latency_sensitive and performance.group is None,
            is_latency_sensitive=is_latency_sensitive,
            opens_program=self._setting.holds_programs
            and not self._has_begun
            and self._execution.num_open_calls > 1,
            num_remaining_steps=shape.num_remaining_steps,
        )

    def _watch(self, call: QueuedCall) -> None:
        """Report the progress of the engine that is reserved for a call about once per step."""
        engine = call.reserved_engine
        if engine is not None:
            self._simulation.scheduler.engine_advanced(engine)
            self._clock.after(self._simulation.shortest_step_s, partial(self._watch, call))

    def _remaining_work_s(self) -> float:
        if not self._setting.has_remaining_work:
            return 0.0
        return self._work.seconds(self._simulation.scheduler.service_time)

    def _prefixes(self, call: CallShape) -> tuple[PromptPrefix, ...]:
        """Return prefixes as `hash_prefixes` does, with symbolic values that are named by their
        program.
        """
        spaced: list[PromptPrefix] = []
        for digest, num_tokens, is_constant in call.boundaries:
            if num_tokens >= (spaced[-1].num_tokens if spaced else 0) + MIN_PREFIX_TOKENS:
                key = digest if is_constant else digest + self._salt
                spaced.append(PromptPrefix(key, num_tokens, is_expected=True))
        half = MAX_PREFIXES // 2
        return tuple(spaced if len(spaced) <= MAX_PREFIXES else spaced[:half] + spaced[-half:])

    def _placed(
        self,
        placement: Placement,
        call: QueuedCall,
        boundaries: tuple[PromptPrefix, ...],
        finished: Callable[[QueuedCall, float], None],
    ) -> None:
        self._has_begun = True
        started_s = self._clock.now
        scheduler = self._simulation.scheduler
        work = SimulatedCall(
            call.request,
            call.num_prefilling_tokens,
            call.request.num_output,
            call.rank,
            on_prefilled=lambda: scheduler.prefill_done(call),
            on_finished=lambda: finished(call, started_s),
            boundaries=boundaries,
        )
        self._simulation.engines[placement.engine].start(work)

    def _finished(
        self,
        node_id: str,
        arrived_s: float,
        delay_s: float,
        call: QueuedCall,
        started_s: float,
    ) -> None:
        now = self._clock.now
        self._work.remove(node_id)
        self._simulation.scheduler.release(call)
        self._simulation.calls.append(CallTrace(self._number, call.request, started_s, now))
        self._attained_s += now - started_s
        self._outcome.queued_s += started_s - arrived_s
        self._outcome.decode_s += now - started_s
        self._outcome.num_output += call.request.num_output
        if delay_s:
            self._clock.after(delay_s, partial(self._answer, node_id))
        else:
            self._answer(node_id)

    def _answer(self, node_id: str) -> None:
        self._handle_ready(self._resolve(node_id, 0))
