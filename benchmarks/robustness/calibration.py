"""Fit the two free numbers of the cost model to figure 10 of the paper.

The figure gives the mean time per output token of 100 ShareGPT requests on the paper's baseline
engine, by arrival rate and KV capacity. The same requests run on the simulated baseline, and the
share of the data sheet's rates and the time per call are varied until the relative squared error
is smallest. The lengths are drawn, so the fit has a spread: on another draw the same costs are
3.8 % off, which a time per call of about 0.88 ms would correct.

    python -m robustness.calibration        (in the folder `benchmarks`)
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from functools import cache

from apps.programs import AppPlan, single
from apps.setting import A100, LLAMA_13B, baseline, roofline
from apps.workloads import outcomes
from simulation.engine import LinearCosts

CAPACITIES = (2_048, 4_096, 6_144, 8_192, 10_240, 12_288)
FIGURE_10 = {
    5.0: (19.5, 23.9, 26.3, 30.6, 34.0, 37.5),
    10.0: (20.0, 24.2, 28.9, 34.1, 38.4, 42.9),
    15.0: (20.7, 24.6, 30.1, 35.6, 43.8, 49.3),
    20.0: (20.7, 25.3, 31.5, 37.9, 45.0, 51.6),
    25.0: (20.6, 24.8, 32.3, 39.9, 48.1, 54.7),
}
"""Milliseconds per output token by requests per second, one value per capacity."""
NUM_REQUESTS, SEEDS = 100, range(2)


def chat_lengths(draw: random.Random) -> tuple[int, int]:
    """Return the prompt and output tokens of a chat like those of ShareGPT, filtered as in the
    paper.
    """
    while True:
        prompt = round(draw.lognormvariate(4.5, 1.3))
        output = round(draw.lognormvariate(5.2, 0.9))
        if prompt >= 4 and output >= 4 and prompt <= 1_024 and prompt + output <= 2_048:
            return prompt, output


@cache
def _requests(rate: float, seed: int) -> list[tuple[AppPlan, float]]:
    draw = random.Random(f"cal {seed}")
    sent, at_s = [], 0.0
    for user in range(NUM_REQUESTS):
        sent.append((single("", 0, *chat_lengths(draw), user), at_s))
        at_s += draw.expovariate(rate)
    return sent


def token_ms(cost: LinearCosts, rate: float, capacity: int) -> float:
    """Return the mean milliseconds per output token of the simulated baseline."""
    setting = baseline(cost, 0, capacity=capacity, round_trip_s=lambda: 0.0)
    return 1e3 * statistics.fmean(
        found.decode_s / found.num_output
        for seed in SEEDS
        for found in outcomes(setting, _requests(rate, seed))
    )


def residual(cost: LinearCosts, rates: Sequence[float]) -> float:
    """Return the root of the mean squared relative error over a figure's rows."""
    errors = [
        token_ms(cost, rate, capacity) / value - 1
        for rate in rates
        for capacity, value in zip(CAPACITIES, FIGURE_10[rate], strict=True)
    ]
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def minimise(
    function: Callable[[Sequence[float]], float], start: Sequence[float]
) -> tuple[list[float], float]:
    """Return the minimum of a function by a search along its axes, within 0.5 % per axis."""
    best, least = list(start), function(start)
    step = 0.2
    while step > 0.005:
        found = [
            (function(point), point)
            for axis in range(len(best))
            for factor in (1 + step, 1 - step)
            for point in ([x * (factor if i == axis else 1) for i, x in enumerate(best)],)
        ]
        value, point = min(found)
        if value < least:
            best, least = point, value
        else:
            step /= 2
    return best, least


FITS: dict[str, tuple[Sequence[float], Callable[[Sequence[float]], LinearCosts]]] = {
    "figure 10 at 5 requests/s, bytes by data sheet": (
        (5.0,),
        lambda x: roofline(A100, LLAMA_13B, x[0] * 0.9, x[1] * 1e-3),
    ),
    "figure 10 at all rates, bytes by data sheet": (
        tuple(FIGURE_10),
        lambda x: roofline(A100, LLAMA_13B, x[0] * 0.9, x[1] * 1e-3),
    ),
    "figure 10 at 5 requests/s, all cost on tokens": (
        (5.0,),
        lambda x: roofline(A100, LLAMA_13B, x[0] * 0.9, 0.0)._replace(held_token_s=x[1] * 2e-6),
    ),
}


def main() -> None:
    """Print the fits."""
    for name, (rates, make) in FITS.items():

        def error(
            x: Sequence[float],
            make: Callable[[Sequence[float]], LinearCosts] = make,
            rates: Sequence[float] = rates,
        ) -> float:
            return residual(make(x), rates)

        best, least = minimise(error, (1.0, 1.0))
        print(f"{name}: {make(best)}, share {best[0] * 0.9:.3f}, residual {least:.1%}", flush=True)


if __name__ == "__main__":
    main()
