"""The *paper* setting: its machines as cost models, its baselines, its network.

Costs are fitted to what the paper and its artifact report, and to nothing measured here:

    A100, 13B   a step is 18 ms, 0.15 ms for every call and 1.1 us for every token that they
                hold: within 10 % of figure 10 at 5 requests/s (19.5 ms at 2,048 tokens to 37.5 ms
                at 12,288, taking a call there for 300 tokens), and of the 76 ms a token that the
                map stage of figure 14 takes with 45,000. A prompt is 15 ms and 0.1 ms a token,
                from figure 11's slope and intercept.
    A100, 7B    from figure 15: 18.3 ms, 0.52 ms, 0.11 us (a shared prefix is read again from
                the cache of the chip, hence so cheap).
    A6000, 7B   from figure 17's ends and figure 19's decoding: 25 ms, 0.2 ms, 0.9 us; 0.15 ms
                for a token of a prompt.

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

from conure.server.simulation.engine import Cost
from conure.server.simulation.simulation import Setting

A100_13B = Cost(
    prompt_s=0.015, prompt_token_s=1e-4, step_s=0.018, sequence_s=0.15e-3, held_token_s=1.1e-6
)
A100_7B = Cost(
    prompt_s=0.01, prompt_token_s=6e-5, step_s=0.0183, sequence_s=0.52e-3, held_token_s=0.11e-6
)
A6000_7B = Cost(
    prompt_s=0.01, prompt_token_s=1.5e-4, step_s=0.025, sequence_s=0.2e-3, held_token_s=0.9e-6
)


STEP_S = 0.040
"""The longest step beside a call that somebody waits for."""


def strict_tokens(cost: Cost) -> int:
    """Tokens of sixteen calls that leave a step at its bound."""
    return round((STEP_S - cost.step_s - 16 * cost.sequence_s) / cost.held_token_s)


def ours(cost: Cost, seed: int, **changes: object) -> Setting:
    """Whole programs, under our policy."""
    setting = Setting(policy="conure", cost=cost, round_trip_s=_network(seed))
    return replace(setting, **changes)  # type: ignore[arg-type]  # fields of Setting


def baseline(cost: Cost, seed: int, **changes: object) -> Setting:
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
