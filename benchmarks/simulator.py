"""Speed of the simulator, and the effect of policies on one load on many engines.

Map-reduce programs of ten calls and single chats, five to one in calls, arrive at random times.
Their number is chosen so that the engines have about the requested load.

    python benchmarks/simulator.py [--calls N] [--engines N] [--load X] [--policy NAME]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time

from apps.programs import map_reduce, single
from apps.setting import A100_13B, latency_tokens, ours
from conure.server.scheduling.policy import POLICIES
from simulation.simulation import Simulation

GC_THRESHOLDS = (200_000, 20, 100)
"""Collect rarely: there are many live objects, and collections took half of the time."""
NUM_CHUNKS = 9
SECONDS_PER_CALL = 0.20
"""Approximate engine time per call, when it shares the engine with others."""


def main() -> None:
    """Run the simulation and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--engines", type=int, default=1_000)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--policy", choices=tuple(POLICIES), action="append")
    arguments = parser.parse_args()
    during_s = arguments.calls * SECONDS_PER_CALL / arguments.engines / arguments.load
    print(f"{arguments.calls} calls on {arguments.engines} engines within {during_s:.0f} s")
    for policy in arguments.policy or ["conure"]:
        draw = random.Random(0)
        setting = ours(
            A100_13B,
            0,
            policy=policy,
            num_engines=arguments.engines,
            latency_tokens=latency_tokens(A100_13B),
        )
        began = time.process_time()  # Processor time excludes other processes on the machine.
        simulation = Simulation(setting)
        batches, chats, num_calls = [], [], 0
        while num_calls < arguments.calls:
            at_s = draw.random() * during_s
            program = map_reduce(NUM_CHUNKS, 1_024, 50, draw.randrange(1_000))
            batches.append(simulation.submit(program.blueprint, at_s))
            for _ in range(2):
                chat = single(f"app {draw.randrange(50)}", 800, 200, 150, 0)
                chats.append(simulation.submit(chat.blueprint, draw.random() * during_s))
            num_calls += NUM_CHUNKS + 3
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        simulation.run()
        took_s = time.process_time() - began
        busy = sum(engine.busy_s for engine in simulation.engines.values())
        print(
            f"{policy:<15} {took_s:.0f} s of a core, {took_s / num_calls * 1e6:.0f} us a call; "
            f"engines busy {busy / arguments.engines / simulation.clock.now:.0%}; median and "
            f"p99 of map-reduce {_middle_and_end([b.took_s for b in batches])}, "
            f"of chats {_middle_and_end([c.took_s for c in chats])}",
            flush=True,
        )


def _middle_and_end(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} {statistics.quantiles(seconds, n=100)[98]:.1f} s"


if __name__ == "__main__":
    main()
