"""Tests of the time that requests take outside the engines, with clocks of the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from conure.server.runtime.reporting.request_times import (
    MIN_REQUESTS,
    CallCounts,
    RequestTimeMeter,
    RequestTimes,
)


class Server:
    """A meter, its clocks, and the calls of all programs."""

    def __init__(self) -> None:
        self.now = self.busy = 0.0
        self.num_running = self.num_ended = 0
        self.meter = RequestTimeMeter(self.count, now=lambda: self.now, busy=lambda: self.busy)

    def count(self) -> CallCounts:
        return CallCounts(self.num_running, self.num_ended)

    def run(
        self,
        total_s: float = 10.0,
        busy_s: float = 2.0,
        engine_s: float = 7.0,
        beside: Callable[[], object] = lambda: None,
    ) -> None:
        """Answer a request; `beside` is called meanwhile."""
        with self.meter.measure() as timer:
            beside()
            self.now += total_s
            self.busy += busy_s
            self.num_ended += 1
            timer.engine_s = engine_s

    def run_some(self, number: int = MIN_REQUESTS) -> RequestTimes:
        """Answer ordinary requests; return the times."""
        for _ in range(number):
            self.run()
        return self.meter.times


@pytest.fixture
def server() -> Server:
    return Server()


def test_times_are_zero_before_enough_requests(server: Server) -> None:
    assert server.run_some(MIN_REQUESTS - 1) == RequestTimes(0.0, 0.0)
    assert server.run_some(1) == (2.0, 1.0)


def test_slow_requests_do_not_count_more_than_others(server: Server) -> None:
    server.run_some()
    for _ in range(3):
        server.run(total_s=1000.0, busy_s=500.0)
    assert server.meter.times == (2.0, 1.0)


def test_times_follow_the_speed_of_the_server(server: Server) -> None:
    server.run_some(100)
    for _ in range(100):
        server.run(total_s=13.0, busy_s=3.0)
    assert server.meter.times == (3.0, 3.0)


@pytest.mark.parametrize("busy_s", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("engine_s", [0.0, 0.8, 1.2])
def test_times_add_up_to_no_more_than_the_request(
    server: Server, busy_s: float, engine_s: float
) -> None:
    for _ in range(MIN_REQUESTS):
        server.run(total_s=1.0, busy_s=busy_s, engine_s=engine_s)
    times = server.meter.times
    assert min(times) >= 0
    assert times.busy_s <= busy_s
    assert sum(times) == pytest.approx(max(0.0, 1.0 - engine_s))


def test_the_time_begins_again_when_the_body_has_arrived(server: Server) -> None:
    for _ in range(MIN_REQUESTS):
        with server.meter.measure() as timer:
            server.now += 100.0
            server.busy += 10.0
            timer.begin()
            server.now += 10.0
            server.busy += 2.0
            server.num_ended += 1
            timer.engine_s = 7.0
    assert server.meter.times == pytest.approx((2.0, 1.0))


def test_a_request_beside_another_does_not_count(server: Server) -> None:
    for _ in range(MIN_REQUESTS):
        server.run(beside=server.run)
    assert server.meter.times == RequestTimes()
    assert server.run_some() == (2.0, 1.0)


def test_a_request_beside_a_call_on_an_engine_does_not_count(server: Server) -> None:
    def start() -> None:
        server.num_running = 1

    def end() -> None:
        server.num_running = 0
        server.num_ended += 1

    def run_briefly() -> None:
        start()
        end()

    for beside in (start, end, run_briefly):
        for _ in range(MIN_REQUESTS):
            server.run(beside=beside)
    assert server.meter.times == RequestTimes()


def test_requests_without_an_answer_or_with_several_calls_do_not_count(server: Server) -> None:
    for _ in range(MIN_REQUESTS):
        with pytest.raises(ValueError, match="failed"), server.meter.measure() as timer:
            server.num_ended += 1
            timer.engine_s = 0.0
            raise ValueError("failed")
        with server.meter.measure():
            server.num_ended += 1
        with server.meter.measure() as timer:
            server.num_ended += 2
            timer.engine_s = 0.0
    assert server.meter.times == RequestTimes()
    assert server.run_some() == (2.0, 1.0)
