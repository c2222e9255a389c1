"""What a decision of the scheduler costs, by engines and by calls that wait.

Fills every engine, lets the queue stand, and then ends one running call after another: each
end makes room, for which the scheduler chooses a call and an engine, and each brings a new
call into the queue; the prompt of every call is filled a few steps after it was started. Timed is
all of it, the books included, and divided by the times that an engine was looked for, whether
or not one was found. Rounds of all sizes alternate, and
processor time is what counts, so that what else the machine does meets them alike.

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

from conure.server.scheduling.demand import Demand, Prefix
from conure.server.scheduling.policy import POLICIES
from conure.server.scheduling.scheduler import Placement, Scheduler, Ticket

SIZES = [(1, 1_000), (10, 1_000), (100, 1_000), (1_000, 1_000), (1_000, 10_000), (1_000, 100_000)]
"""Engines and calls that wait."""
CAPACITY, STRICT_TOKENS, MAX_SEQUENCES = 64_000, 12_000, 128
GROUP_SIZE, NUM_SYSTEM_PROMPTS = 8, 200
STEPS_PER_END = 2
"""That an engine makes between two ends of its calls: most stop before they have written all that
they may, so that few are late and a forecast has all of them to look at."""
ENDS_PER_PROMPT = 3
"""Of an engine, from when a call is started until its prompt is filled."""


class Stand:
    """A scheduler with full engines and a queue of a certain length."""

    def __init__(self, policy: str, num_engines: int, num_waiting: int) -> None:
        self._random = random.Random(num_engines)
        self._tickets: dict[int, Ticket] = {}
        self._running: list[int] = []
        self._filling: deque[tuple[int, Ticket]] = deque()
        """Calls whose prompts are not filled yet, and when they will be, by ends."""
        self._num_engines = num_engines
        self._num_calls = 0
        self._num_ends = 0
        self.scheduler = Scheduler(
            POLICIES[policy], strict_tokens=STRICT_TOKENS, defer=lambda _: None
        )
        for i in range(num_engines):
            self.scheduler.engine_arrived(
                f"engine-{i}",
                capacity=CAPACITY,
                max_sequences=MAX_SEQUENCES,
                steps=lambda: STEPS_PER_END * self._num_ends // num_engines,
            )
        while self.scheduler.num_waiting < num_waiting:
            for _ in range(num_waiting - self.scheduler.num_waiting):
                self._submit()
            self.scheduler.run()
            self._fill_prompts()

    def end_calls(self, num_ends: int) -> tuple[float, int]:
        """End so many calls, each followed by a turn; seconds and decisions of all."""
        scheduler, draw = self.scheduler, self._random
        before = scheduler.num_decisions
        took_s = 0.0
        for _ in range(num_ends):
            place = draw.randrange(len(self._running))
            self._running[place], self._running[-1] = self._running[-1], self._running[place]
            ended = self._tickets.pop(self._running.pop())
            self._num_ends += 1
            began = time.thread_time()
            self._fill_prompts(self._num_ends)
            scheduler.withdraw(ended)
            self._submit()
            scheduler.run()
            took_s += time.thread_time() - began
        return took_s, scheduler.num_decisions - before

    def _fill_prompts(self, num_ends: float = math.inf) -> None:
        """Of the calls that are due when so many have ended."""
        while self._filling and self._filling[0][0] <= num_ends:
            self.scheduler.filled(self._filling.popleft()[1])

    def _submit(self) -> None:
        """One call more: one of eight over a document, or a chat with a known system prompt."""
        i = self._num_calls
        self._num_calls += 1
        draw = self._random
        program = i // GROUP_SIZE
        is_strict = program % 5 == 0
        prefixes: tuple[Prefix, ...]
        if is_strict:
            system = draw.randrange(NUM_SYSTEM_PROMPTS)
            prefixes = (Prefix(b"s%d" % system, 1_000, True), Prefix(b"u%d" % i, 1_200, True))
        else:
            prefixes = tuple(Prefix(b"%d-%d" % (program, n), 300 * n) for n in range(1, 5))
        demand = Demand(
            program=f"p{program}",
            num_prompt=1_200 + draw.randrange(800),
            num_output=50 + draw.randrange(400),
            prefixes=prefixes,
            group=None if is_strict else "g",
            is_strict=is_strict,
        )
        ticket = Ticket(demand, i + 1_000 * draw.random(), partial(self._started, i))
        self._tickets[i] = ticket
        self.scheduler.submit(ticket)

    def _started(self, i: int, _: Placement) -> None:
        self._running.append(i)
        filled_at = self._num_ends + ENDS_PER_PROMPT * self._num_engines
        self._filling.append((filled_at, self._tickets[i]))


def main() -> None:
    """Print a line per policy and size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", choices=tuple(POLICIES), action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ends", type=int, default=1_000)
    arguments = parser.parse_args()
    print("us of all work, by decisions (median, min, max) and by calls that ended (median)")
    print(
        f"{'policy':<15}{'engines':>8}{'waiting':>9}{'decision':>10}{'min':>7}{'max':>7}{'end':>8}"
    )
    for policy in arguments.policy or POLICIES:
        stands = [(size, Stand(policy, *size)) for size in SIZES]
        gc.collect()
        gc.freeze()  # the queue is the server's, and is not what a collection would look through
        rounds: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for _ in range(arguments.rounds):
            for size, stand in stands:
                took_s, num_decisions = stand.end_calls(arguments.ends)
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
