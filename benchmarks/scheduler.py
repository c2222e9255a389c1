"""Cost of a scheduling decision, by the number of engines and of waiting calls.

Fills every engine and keeps the queue at its length. Then running calls end one after another: each
end frees room, for which the scheduler chooses a call and an engine, and each end is followed by a
new call. Three in ten calls have a deadline. A prompt is prefilled a few steps after its start. The
time includes ranks and reservations and is divided by the number of decisions, whether or not an
engine was found. Rounds of all sizes alternate, and processor time is measured, so that other load
on the machine affects all sizes alike.

    python benchmarks/scheduler.py [--policy NAME] [--rounds N] [--ends N]
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
from collections import deque
from functools import partial

from conure.server.scheduling.policy import POLICIES
from conure.server.scheduling.request import PriorityInputs, PromptPrefix, ResourceRequest
from conure.server.scheduling.scheduler import Placement, QueuedCall, Scheduler

SIZES = [(1, 1_000), (10, 1_000), (100, 1_000), (1_000, 1_000), (1_000, 10_000), (1_000, 100_000)]
"""Numbers of engines and waiting calls."""
CAPACITY, LATENCY_TOKENS, MAX_SEQUENCES = 64_000, 12_000, 128
GROUP_SIZE, NUM_SYSTEM_PROMPTS = 8, 200
DEADLINE_SHARE = 0.3
"""Share of calls with a deadline."""
STEPS_PER_END = 2
"""Steps of an engine between two ends of its calls. Most calls stop before their maximum length, so
that few are overdue and a forecast covers all of them."""
ENDS_PER_PROMPT = 3
"""Ends of an engine's calls between the start of a call and the end of its prefill."""


class SchedulerBenchmark:
    """A scheduler with full engines and a queue of constant length."""

    def __init__(self, policy: str, num_engines: int, num_waiting: int) -> None:
        self._random = random.Random(num_engines)
        self._calls: dict[int, QueuedCall] = {}
        self._running: list[int] = []
        self._prefilling: deque[tuple[int, QueuedCall]] = deque()
        """Calls that are being prefilled, and the number of ends after which that is done."""
        self._num_engines = num_engines
        self._num_calls = 0
        self._num_ends = 0
        self.scheduler = Scheduler(
            POLICIES[policy], latency_tokens=LATENCY_TOKENS, defer=lambda _: None
        )
        for i in range(num_engines):
            self.scheduler.add_engine(
                f"engine-{i}",
                capacity=CAPACITY,
                max_sequences=MAX_SEQUENCES,
                steps=lambda: STEPS_PER_END * self._num_ends // num_engines,
            )
        while self.scheduler.num_waiting < num_waiting:
            for _ in range(num_waiting - self.scheduler.num_waiting):
                self._submit()
            self.scheduler.run_round()
            self._fill_prompts()

    def measure_ends(self, num_ends: int) -> tuple[float, int]:
        """End calls, each followed by a scheduling round; return the time in seconds and the number
        of decisions.
        """
        scheduler, draw = self.scheduler, self._random
        before = scheduler.num_decisions
        took_s = 0.0
        for _ in range(num_ends):
            index = draw.randrange(len(self._running))
            self._running[index], self._running[-1] = self._running[-1], self._running[index]
            ended = self._calls.pop(self._running.pop())
            self._num_ends += 1
            began = time.thread_time()
            self._fill_prompts(self._num_ends)
            scheduler.release(ended)
            self._submit()
            scheduler.run_round()
            took_s += time.thread_time() - began
        return took_s, scheduler.num_decisions - before

    def _fill_prompts(self, num_ends: float = math.inf) -> None:
        """Finish the prefills that are due after `num_ends` ends."""
        while self._prefilling and self._prefilling[0][0] <= num_ends:
            self.scheduler.prefill_done(self._prefilling.popleft()[1])

    def _submit(self) -> None:
        """Submit one more call: one of eight over a document, or a chat with a known system
        prompt.
        """
        i = self._num_calls
        self._num_calls += 1
        draw = self._random
        program = i // GROUP_SIZE
        is_latency_critical = program % 5 == 0
        prefixes: tuple[PromptPrefix, ...]
        if is_latency_critical:
            system = draw.randrange(NUM_SYSTEM_PROMPTS)
            prefixes = (
                PromptPrefix(b"s%d" % system, 1_000, True),
                PromptPrefix(b"u%d" % i, 1_200, True),
            )
        else:
            prefixes = tuple(PromptPrefix(b"%d-%d" % (program, n), 300 * n) for n in range(1, 5))
        request = ResourceRequest(
            program=f"p{program}",
            num_prompt=1_200 + draw.randrange(800),
            num_output=50 + draw.randrange(400),
            prefixes=prefixes,
            group=None if is_latency_critical else "g",
            is_latency_critical=is_latency_critical,
        )
        rank = self.scheduler.policy.rank(self._priority(i, is_latency_critical))
        call = QueuedCall(request, rank.at_s, partial(self._started, i))
        self._calls[i] = call
        self.scheduler.submit(call)

    def _priority(self, i: int, is_latency_critical: bool) -> PriorityInputs:
        """Return the inputs of a call's rank; three in ten have a deadline."""
        draw = self._random
        at_s = i + 1_000 * draw.random()
        has_deadline = draw.random() < DEADLINE_SHARE
        return PriorityInputs(
            arrived_at_s=at_s,
            program_started_at_s=at_s - 100 * draw.random(),
            kind="latency" if is_latency_critical else "throughput",
            depth=draw.randrange(8),
            total_s=100 * draw.random(),
            latest_start_s=at_s + 200 * draw.random() if has_deadline else None,
        )

    def _started(self, i: int, _: Placement) -> None:
        self._running.append(i)
        filled_at = self._num_ends + ENDS_PER_PROMPT * self._num_engines
        self._prefilling.append((filled_at, self._calls[i]))


def main() -> None:
    """Print one line per policy and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", choices=tuple(POLICIES), action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ends", type=int, default=1_000)
    arguments = parser.parse_args()
    print("us per decision (median, min, max) and per ended call (median)")
    print(
        f"{'policy':<15}{'engines':>8}{'waiting':>9}{'decision':>10}{'min':>7}{'max':>7}{'end':>8}"
    )
    for policy in arguments.policy or POLICIES:
        benchmarks = [(size, SchedulerBenchmark(policy, *size)) for size in SIZES]
        gc.collect()
        gc.freeze()  # Exclude the queue from garbage collections.
        rounds: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for _ in range(arguments.rounds):
            for size, benchmark in benchmarks:
                took_s, num_decisions = benchmark.measure_ends(arguments.ends)
                costs = (took_s / num_decisions * 1e6, took_s / arguments.ends * 1e6)
                rounds.setdefault(size, []).append(costs)
        for (num_engines, num_waiting), each in rounds.items():
            cost = [decision for decision, _ in each]
            print(
                f"{policy:<15}{num_engines:>8}{num_waiting:>9}"
                f"{statistics.median(cost):>10.1f}{min(cost):>7.1f}{max(cost):>7.1f}"
                f"{statistics.median([end for _, end in each]):>8.1f}"
            )


if __name__ == "__main__":
    main()
