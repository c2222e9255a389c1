"""Print tables: random mixes by hold margin, and the best order that a search found.

    python -m pressure mixes [--mixes N] [--first SEED]
    python -m pressure best WORKLOAD --blocks N [--seeds N] [--trials N]

Run it in `benchmarks`. A hold margin is a value of `policy.HOLD_MARGIN`. `--cost` takes the seconds
per prompt token, per step and per row of a step.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence

from apps.scaled_workloads import SCALED, workload
from conure.server.scheduling import policy
from simulation.engine import LinearCosts

from .mixes import POOLS, Gain, blocks_of, gain, random_mix
from .search import bound_s, search
from .sides import SimulatedMachine, requests, whole

MARGINS = (1.0, 1.5, 2.0, 3.0, 4.0, math.inf)


def mixes(cost: LinearCosts, seeds: Sequence[int]) -> None:
    """Print a line for each hold margin and pool."""
    found: dict[tuple[float, int], list[Gain]] = {}
    for seed in seeds:
        sent = random_mix(seed)
        for pool in POOLS:
            machine = SimulatedMachine(cost, blocks_of(sent, cost, pool))
            for margin in MARGINS:
                policy.HOLD_MARGIN = margin
                found.setdefault((margin, pool), []).append(gain(sent, machine))
    print("| margin | pool | mean of all | least | slowest kind | least |")
    print("|--:|--:|--:|--:|--:|--:|")
    for (margin, pool), gains in sorted(found.items(), key=lambda each: (each[0][0], -each[0][1])):
        columns = [[each.mean for each in gains], [each.slowest_kind for each in gains]]
        texts = [f"{value:.2f}" for c in columns for value in (_mean(c), min(c))]
        print(f"| {margin:g} | {pool} % | {' | '.join(texts)} |")


def _mean(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios)


def best(name: str, machine: SimulatedMachine, num_seeds: int, num_trials: int) -> None:
    """Print the times of requests, our policy and the best order found, and a lower bound."""
    print("| seed | requests | whole | ratio | best found | ratio | lower bound | max of each |")
    print("|--:|--:|--:|--:|--:|--:|--:|---|")
    for seed in range(1, num_seeds + 1):
        sent = workload(name, seed)
        sides = [
            requests(sent, machine).took_s,
            whole(sent, machine).took_s,
            search(sent, machine, num_trials),
        ]
        before, ours, found = map(statistics.fmean, sides)
        texts = [f"{seed}", f"{before:.3f}", f"{ours:.3f}", f"{before / ours:.2f}"]
        texts += [f"{found:.3f}", f"{before / found:.2f}", f"{bound_s(sent, machine):.3f}"]
        texts.append(" / ".join(f"{max(each):.2f}" for each in sides))
        print(f"| {' | '.join(texts)} |", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cost", type=float, nargs=3, default=[65e-6, 1.8e-3, 1e-4])
    commands = parser.add_subparsers(dest="command", required=True)
    random_mixes = commands.add_parser("mixes")
    random_mixes.add_argument("--mixes", type=int, default=24)
    random_mixes.add_argument("--first", type=int, default=0)
    one = commands.add_parser("best")
    one.add_argument("workload", choices=tuple(SCALED))
    one.add_argument("--blocks", type=int, required=True)
    one.add_argument("--seeds", type=int, default=3)
    one.add_argument("--trials", type=int, default=4_000)
    options = parser.parse_args(arguments)
    prompt_token_s, step_s, row_s = options.cost
    cost = LinearCosts(0.0, prompt_token_s, step_s, row_s, 0.0)
    if options.command == "mixes":
        mixes(cost, range(options.first, options.first + options.mixes))
    else:
        best(
            options.workload, SimulatedMachine(cost, options.blocks), options.seeds, options.trials
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
