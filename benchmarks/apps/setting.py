"""The *paper* setting: its machines as cost models, its baselines, its network.

Costs are fitted to what the paper and its artifact report, and to nothing measured here:

    A100, 13B   a step is 18 ms, 0.15 ms for every call and 1.1 us for every token that they
                hold: within 10 % of figure 10 at 5 requests/s (19.5 ms at 2,048 tokens to 37.5 ms
                at 12,288, taking a call there for 300 tokens), and of the 76 ms a token that the
                map stage of figure 14 takes with 45,000. A prompt is 15 ms and 0.1 ms a token,
                from figure 11's slope and intercept.
    A6000, 7B   from figure 17's ends and figure 19's decoding: 25 ms, 0.2 ms, 0.9 us; 0.15 ms
                for a token of a prompt.

That is one line for all systems of a figure. Where the times of each are there to read, a figure
is simulated with those, which are each system's own:

    figure 15, A100, 7B     a step by the calls in it, in ms:
                                 8     16     32     64
                    read once  21.9   27.0   35.3   52.9
                    paged      24.5   37.5   58.2  111.7
                At 32 and 64 what a token more costs in figure 16 (32: 200 and 800 tokens, as its
                bars say; 64: 200 and 480 tokens, in its full batches). At 8 and 16 the mean request
                of figure 15 (8.08, 10.61 s; 8.95, 14.07 s) less 8 or 16 prompts, by its 331
                tokens. A token of a prompt is 0.137 ms: the 5,107 shared ones take 0.70 s. That
                figure's times at 32 and 64, and without sharing, follow (within 2 %).
    figure 18, A100, 13B    prompts and calls as above; of a step and of a token held, least
                squares through the totals with 4, 8, 12 and 16 files:
                    Parrot                 23.8 ms, 0.22 us   (187.2, 196.4, 207.4, 216.4 s)
                    throughput baseline    21.5 ms, 0.62 us   (237.4, 311.0, 421.8, 529.4 s)
                of the latency baseline, which runs one call at a time, what its total leaves for a
                step beside the tokens held (1.1 us):
                    4, 8, 12 files         21.9, 20.8, 21.1 ms    (553.5, 962.6, 1,492.0 s)
                    16 files               30.0 ms                (2,532.9 s)
                    16 files, run again    20.8 ms                (1,902.6 s, its artifact)

A call that is waited for by itself is strict, and keeps an engine of ours to as many tokens as
leave a step at 40 ms, the paper's own bound.

The network is 218 to 345 ms a round trip, median 236, as the recorded one. A baseline sends
request by request, waits its turn in order of arrival, shares nothing, and reads every
prefix as often as it is there. Its calls are booked with all that they may write, as when its
costs were fitted; ours with the peak of what they come to together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from conure.server.simulation.engine import Cost, Costs
from conure.server.simulation.simulation import Setting

from .tabled import Tabled

A100_13B = Cost(
    prompt_s=0.015, prompt_token_s=1e-4, step_s=0.018, sequence_s=0.15e-3, held_token_s=1.1e-6
)
A6000_7B = Cost(
    prompt_s=0.01, prompt_token_s=1.5e-4, step_s=0.025, sequence_s=0.2e-3, held_token_s=0.9e-6
)

A100_7B_READ_ONCE = Tabled(1.37e-4, {8: 0.0219, 16: 0.0270, 32: 0.0353, 64: 0.0529})
A100_7B_PAGED = Tabled(1.37e-4, {8: 0.0245, 16: 0.0375, 32: 0.0582, 64: 0.1117})
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
"""The longest step beside a call that somebody waits for."""


def strict_tokens(cost: Cost) -> int:
    """Tokens of sixteen calls that leave a step at its bound."""
    return round((STEP_S - cost.step_s - 16 * cost.sequence_s) / cost.held_token_s)


def ours(cost: Costs, seed: int, **changes: object) -> Setting:
    """Whole programs, under our policy."""
    setting = Setting(policy="conure", cost=cost, round_trip_s=_network(seed))
    return replace(setting, **changes)  # type: ignore[arg-type]  # fields of Setting


def baseline(cost: Costs, seed: int, **changes: object) -> Setting:
    """Request by request."""
    setting = ours(
        cost,
        seed,
        policy="fcfs",
        whole_programs=False,
        has_prefix_cache=False,
        reads_shared_once=False,
        books_peaks=False,
    )
    return replace(setting, **changes)  # type: ignore[arg-type]


def _network(seed: int) -> Callable[[], float]:
    draw = random.Random(f"network {seed}")
    return lambda: min(0.218 + draw.expovariate(1 / 0.026), 0.345)
