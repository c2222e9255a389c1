"""The timers of a program, on an event loop whose time is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from conure.server.program.status import Problem
from conure.server.runtime.clock import SteadyClock
from conure.server.runtime.timers import LEASE_S, Timers

from ..inprocess import client
from .test_program_state import execute


class SimulatedLoop:
    """Runs timers when `advance` passes their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def call_later(self, delay: float, callback: Callable[..., None], *args: Any) -> Any:
        self._calls.append((self.now + delay, callback, args))
        return None  # these tests cancel no timer

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [call for call in self._calls if call[0] <= end]:
            call = min(due, key=lambda each: each[0])
            self._calls.remove(call)
            self.now = call[0]
            call[1](*call[2])
        self.now = end


class IdleProgram:
    """The timers of a program without work, with recorded inputs and effects."""

    def __init__(
        self,
        *nodes: dict[str, Any],
        jobs: dict[str, Any] | None = None,
        idle_s: float | None = None,
        **options: Any,
    ) -> None:
        self.has_reader = False
        self.num_changes = 0
        self.ends: list[tuple[str, str]] = []
        self.missed: list[tuple[str, float]] = []
        self.failed: list[tuple[str, str]] = []
        self.state = execute([*nodes], jobs=jobs, is_open=True, **options)
        clock = SteadyClock()
        self.state.created_at = clock.now()
        self.timers = Timers(
            self.state,
            clock,
            idle_s=idle_s,
            fail=lambda node, error: self.failed.append((node, str(error))),
            stop=self._stop,
            close=lambda: False,
            miss=lambda output, deadline_s: self.missed.append((output, deadline_s)),
            has_reader=lambda: self.has_reader,
            num_changes=lambda: self.num_changes,
        )
        self.timers.start()

    def _stop(self, phase: str, problem: Problem) -> None:
        self.ends.append((phase, problem.code))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> SimulatedLoop:
    found = SimulatedLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: found)
    return found


def test_an_unused_program_ends_after_its_idle_timeout(loop: SimulatedLoop) -> None:
    program = IdleProgram(idle_timeout_s=10)
    loop.advance(9)
    assert program.ends == []
    loop.advance(2)
    assert program.ends == [("cancelled", "program.idle")]


@pytest.mark.parametrize("use", ["request", "reader", "text"])
def test_use_renews_the_idle_timeout(use: str, loop: SimulatedLoop) -> None:
    program = IdleProgram(idle_timeout_s=10)
    for _ in range(5):
        loop.advance(7)
        if use == "request":
            program.timers.renew_leases()
        elif use == "reader":
            program.has_reader = True
            loop.advance(3)
            program.has_reader = False
        else:
            program.num_changes += 1
    assert program.ends == []
    loop.advance(13)
    assert program.ends == [("cancelled", "program.idle")]


def test_a_program_without_idle_timeout_stays(loop: SimulatedLoop) -> None:
    program = IdleProgram()
    loop.advance(1e6)
    assert program.ends == []


def test_an_idle_timeout_of_the_program_replaces_that_of_the_server(loop: SimulatedLoop) -> None:
    program, patient = IdleProgram(idle_s=10), IdleProgram(idle_s=10, idle_timeout_s=3600)
    loop.advance(13)
    assert program.ends == [("cancelled", "program.idle")]
    assert patient.ends == []


def test_an_attached_program_needs_a_reader(loop: SimulatedLoop) -> None:
    program = IdleProgram(detach=False, idle_timeout_s=3600)
    loop.advance(LEASE_S + 1)
    assert program.ends == [("cancelled", "program.lease_lost")]


def test_each_deadline_of_an_output_expires_once(loop: SimulatedLoop) -> None:
    program = IdleProgram()
    program.state.graph.deadlines |= {"soon": 5, "later": 50}
    for _ in range(3):
        program.timers.start_objectives()
    loop.advance(6)
    assert program.missed == [("soon", 5)]
    loop.advance(50)
    assert program.missed == [("soon", 5), ("later", 50)]


def test_a_timeout_of_a_job_starts_with_its_first_node(loop: SimulatedLoop) -> None:
    nodes = [
        {"id": f"n{i}", "op": "client", "name": "f", "output": f"v{i}", "job": "inner"}
        for i in range(2)
    ]
    jobs = {"outer": {"timeout_s": 10}, "inner": {"parent": "outer", "timeout_s": 4}}
    program = IdleProgram(*nodes, jobs=jobs)
    loop.advance(100)
    assert program.failed == []
    first, second = (program.state.nodes[f"n{i}"].node for i in range(2))
    program.timers.start_node(first)
    loop.advance(3)
    program.timers.start_node(second)
    loop.advance(2)
    assert program.failed == [(f"n{i}", "job inner took longer than 4 s") for i in range(2)]
    loop.advance(6)
    assert program.failed[2:] == [(f"n{i}", "job outer took longer than 10 s") for i in range(2)]


def test_all_jobs_count_for_the_timeout_of_main(loop: SimulatedLoop) -> None:
    node = {"id": "n", "op": "client", "name": "f", "output": "v", "job": "inner"}
    program = IdleProgram(node, jobs={"main": {"timeout_s": 4}, "inner": {}})
    program.timers.start_node(program.state.nodes["n"].node)
    loop.advance(5)
    assert program.failed == [("n", "job main took longer than 4 s")]


def test_a_node_that_starts_after_the_time_of_its_job_fails(
    loop: SimulatedLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SteadyClock, "now", lambda _: loop.now)
    nodes = [client(f"n{i}", f"v{i}", job="j") for i in range(2)]
    program = IdleProgram(*nodes, jobs={"j": {"timeout_s": 4}})
    program.timers.start_node(program.state.nodes["n0"].node)
    loop.advance(5)
    program.failed.clear()
    program.timers.start_node(program.state.nodes["n1"].node)
    loop.advance(0)
    assert ("n1", "job j took longer than 4 s") in program.failed
