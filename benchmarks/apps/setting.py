"""The *paper* setting: its machines as cost models, its baselines, its network.

Costs are fitted to figures of the paper and its artifact only:

    A100, 13B   A step takes 18 ms, plus 0.15 ms per call and 1.1 us per token held. This is
                within 10 % of figure 10 at 5 requests/s (19.5 ms at 2,048 tokens to 37.5 ms at
                12,288, with 300 tokens per call), and of the 76 ms per token of the map stage
                in figure 14 with 45,000 tokens. A prompt takes 15 ms plus 0.1 ms per token
                (intercept and slope of figure 11).
    A6000, 7B   From the end points of figure 17 and the decoding of figure 19: 25 ms, 0.2 ms,
                0.9 us; 0.15 ms per prompt token.

This is one cost model for all systems of a figure. Where the paper reports the times of each
system, the figure is simulated with each system's own times:

    figure 15, A100, 7B     Step time by the number of calls, in ms:
                                 8     16     32     64
                    read once  21.9   27.0   35.3   52.9
                    paged      24.5   37.5   58.2  111.7
                At 32 and 64 calls: the marginal cost of a token in figure 16 (32: 200 and 800
                tokens, from its bars; 64: 200 and 480 tokens, in its full batches). At 8 and 16
                calls: the mean request of figure 15 (8.08, 10.61 s; 8.95, 14.07 s) minus 8 or
                16 prompts, divided by its 331 tokens. A prompt token takes 0.137 ms: the 5,107
                shared ones take 0.70 s. The figure's times at 32 and 64 calls and without
                sharing follow within 2 %.
    figure 18, A100, 13B    Prompts and calls as above. Step time and time per held token are a
                least-squares fit to the totals with 4, 8, 12 and 16 files:
                    Parrot                 23.8 ms, 0.22 us   (187.2, 196.4, 207.4, 216.4 s)
                    throughput baseline    21.5 ms, 0.62 us   (237.4, 311.0, 421.8, 529.4 s)
                The latency baseline runs one call at a time. Its step time is the rest of its
                total after the held tokens (1.1 us):
                    4, 8, 12 files         21.9, 20.8, 21.1 ms    (553.5, 962.6, 1,492.0 s)
                    16 files               30.0 ms                (2,532.9 s)
                    16 files, run again    20.8 ms                (1,902.6 s, its artifact)

A latency-critical call limits our engine to the tokens that keep a step within 40 ms, the
paper's own limit.

A round trip takes 218 to 345 ms, median 236, as recorded. A baseline sends request by request,
queues in order of arrival, shares nothing, and reads every prefix once per request. Its
reservations are maximum lengths, as when its costs were fitted; ours are forecast peaks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from apps.tabulated_cost import TabulatedCost
from simulation.engine import CostModel, LinearCosts
from simulation.simulation import SimulationConfig

A100_13B = LinearCosts(
    prompt_s=0.015, prompt_token_s=1e-4, step_s=0.018, sequence_s=0.15e-3, held_token_s=1.1e-6
)
A6000_7B = LinearCosts(
    prompt_s=0.01, prompt_token_s=1.5e-4, step_s=0.025, sequence_s=0.2e-3, held_token_s=0.9e-6
)

A100_7B_READ_ONCE = TabulatedCost(1.37e-4, {8: 0.0219, 16: 0.0270, 32: 0.0353, 64: 0.0529})
A100_7B_PAGED = TabulatedCost(1.37e-4, {8: 0.0245, 16: 0.0375, 32: 0.0582, 64: 0.1117})
"""Figure 15, with and without a kernel that reads a shared prefix once."""

CODING_OURS = A100_13B._replace(step_s=0.0238, held_token_s=0.22e-6)
CODING_THROUGHPUT = A100_13B._replace(step_s=0.0215, held_token_s=0.62e-6)
CODING_LATENCY = {
    num_files: A100_13B._replace(step_s=step_s)
    for num_files, step_s in {4: 0.0219, 8: 0.0208, 12: 0.0211, 16: 0.0300}.items()
}
CODING_LATENCY_AGAIN = A100_13B._replace(step_s=0.0208)
"""Figure 18. The second run is with 16 files."""

STEP_S = 0.040
"""The longest step while a latency-critical call runs."""


def latency_tokens(cost: LinearCosts) -> int:
    """Return the tokens of sixteen calls that keep a step within its limit."""
    return round((STEP_S - cost.step_s - 16 * cost.sequence_s) / cost.held_token_s)


def ours(cost: CostModel, seed: int, **changes: object) -> SimulationConfig:
    """Whole programs under the policy `conure`."""
    setting = SimulationConfig(policy="conure", cost=cost, round_trip_s=_network(seed))
    return replace(setting, **changes)  # type: ignore[arg-type]  # fields of SimulationConfig


def baseline(cost: CostModel, seed: int, **changes: object) -> SimulationConfig:
    """Request by request."""
    setting = ours(
        cost,
        seed,
        policy="fcfs",
        whole_programs=False,
        has_prefix_cache=False,
        reads_shared_once=False,
        forecasts_peaks=False,
    )
    return replace(setting, **changes)  # type: ignore[arg-type]


def _network(seed: int) -> Callable[[], float]:
    draw = random.Random(f"network {seed}")
    return lambda: min(0.218 + draw.expovariate(1 / 0.026), 0.345)
