"""Both ways of sending an application to one simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from apps.programs import AppPlan, single
from apps.scaled_workloads import ScheduledProgram
from conure.server.scheduling.policy import Policy
from simulation.engine import LinearCosts
from simulation.simulation import Simulation, SimulationConfig
from simulation.stepwise_engine import StepLimits
from simulation.workload_profile import Boundary, WorkloadProfile

BLOCK = 16


class SimulatedMachine(NamedTuple):
    """An engine, and the server in front of it."""

    cost: LinearCosts
    num_blocks: int
    join_s: float = 1.5e-3
    """From the start of a call until the engine can run it."""
    request_s: float = 2e-3
    """From an answer until the engine's server has the next request of the client. The first
    request has it, too; a whole program does not, which favours it by this time."""


class RunResult(NamedTuple):
    """Programs that have ended."""

    took_s: list[float]
    num_steps: int
    peak_tokens: int
    """The most tokens that running calls might have needed at once."""


def whole(
    sent: Sequence[ScheduledProgram],
    machine: SimulatedMachine,
    policy: str | Policy = "conure",
    delays: Sequence[float] = (),
) -> RunResult:
    """Run whole programs.

    Args:
        sent: the programs; equal times are kept apart by `arrival_s`.
        machine: the engine.
        policy: policy of the scheduler.
        delays: for each program, how much later than its client it arrives. Its duration includes
            the delay.
    """
    simulation = _simulation(machine, policy)
    late = delays or [0.0] * len(sent)
    outcomes = [
        simulation.submit(each.plan.blueprint, arrival_s(sent, number) + late[number])
        for number, each in enumerate(sent)
    ]
    simulation.run()
    took_s = [outcome.ended_s - each.at_s for outcome, each in zip(outcomes, sent, strict=True)]
    return _run(simulation, took_s)


def requests(sent: Sequence[ScheduledProgram], machine: SimulatedMachine) -> RunResult:
    """Run every call as a request of its own, sent when the answers that it reads have arrived."""
    simulation = _simulation(machine, "conure", has_prefix_cache=False)
    clients = [_Client(simulation, each.plan, str(i), machine) for i, each in enumerate(sent)]
    for number, client in enumerate(clients):
        simulation.clock.at(arrival_s(sent, number), client.send_ready)
    simulation.run()
    took_s = [client.ended_s - each.at_s for client, each in zip(clients, sent, strict=True)]
    return _run(simulation, took_s)


def arrival_s(sent: Sequence[ScheduledProgram], number: int) -> float:
    """Return when a program is sent: no two at the same time."""
    return sent[number].at_s + number * 1e-7


class _Client:
    """An application that sends its own calls."""

    def __init__(
        self, simulation: Simulation, plan: AppPlan, salt: str, machine: SimulatedMachine
    ) -> None:
        self.ended_s = 0.0
        self._simulation = simulation
        self._profile = plan.blueprint
        self._salt = salt.encode()
        self._machine = machine
        self._waits_for = {
            node["id"]: {part["input"] for part in node["prompt"] if "input" in part}
            | set(node.get("after", ()))
            for node in plan.nodes
        }
        self._unsent = dict.fromkeys(self._waits_for)
        self._answered: set[str] = set()

    def send_ready(self) -> None:
        """Send the calls whose inputs are known."""
        for node in [n for n in self._unsent if self._waits_for[n] <= self._answered]:
            del self._unsent[node]
            at_s = self._simulation.clock.now + self._machine.request_s
            self._simulation.submit(self._request(node), at_s, self._when_answered(node))

    def _when_answered(self, node: str) -> Callable[[], None]:
        def answered() -> None:
            self._answered.add(node)
            self.ended_s = self._simulation.clock.now
            self.send_ready()

        return answered

    def _request(self, node: str) -> WorkloadProfile:
        """Return one call as a program. The engine finds its prefixes, the scheduler does not."""
        shape = self._profile.calls[node]
        known = _single(shape.num_prompt, shape.num_output)
        boundaries = tuple(
            Boundary(digest if is_constant else digest + self._salt, num_tokens, is_constant=True)
            for digest, num_tokens, is_constant in shape.boundaries
        )
        (call,) = known.calls.values()
        return known._replace(calls={"out": call._replace(boundaries=boundaries)})


@cache
def _single(num_prompt: int, num_output: int) -> WorkloadProfile:
    return single("", 0, num_prompt, num_output, 0).blueprint


def _simulation(
    machine: SimulatedMachine, policy: str | Policy, *, has_prefix_cache: bool = True
) -> Simulation:
    cost = machine.cost
    simulation = Simulation(
        SimulationConfig(
            policy=policy,
            cost=cost,
            capacity=machine.num_blocks * BLOCK,
            block_size=BLOCK,
            max_sequences=StepLimits().num_sequences,
            has_prefix_cache=has_prefix_cache,
            steps=StepLimits(join_s=machine.join_s),
        )
    )
    # A server has learned these before.
    pace = simulation.scheduler.service_time
    pace.bare_step_s = cost.step_s + 4 * cost.sequence_s
    pace.step_s = 2 * pace.bare_step_s
    return simulation


def _run(simulation: Simulation, took_s: list[float]) -> RunResult:
    changes = [(call.started_s, call.request.num_tokens) for call in simulation.calls]
    changes += [(call.ended_s, -call.request.num_tokens) for call in simulation.calls]
    held = peak = 0
    for _, num_tokens in sorted(changes):
        held += num_tokens
        peak = max(peak, held)
    return RunResult(took_s, sum(e.num_steps for e in simulation.engines.values()), peak)
