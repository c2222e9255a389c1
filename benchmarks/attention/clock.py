"""Times calls on a CPU or a CUDA device, one contender beside the other.

A *pass* is one call per layer, each layer with keys and values of its own: together they are
larger than any cache, as in a model, so that no call finds its data warm. All contenders of a
row take turns for a number of rounds; a sample is the time of one pass divided by its layers.

On CUDA a pass is captured once as a graph and replayed between two events, so that neither
Python nor launches are in the figure, only what the device does. A pass that cannot be captured
is launched as it is, and its timing says so.

Knows callables, no attention.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .rows import Rates

WARM_UP_PASSES = 3
SAMPLE_S = 2e-3
"""What a sample on a GPU takes at least: launching its first graph takes some 5 us."""
FEW_ROUNDS = 3
BEATEN = 8
"""Who takes so many times as long as the fastest has only `FEW_ROUNDS` samples."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call, over the rounds."""

    median_s: float
    min_s: float
    max_s: float
    samples_s: tuple[float, ...]
    is_graph: bool
    """Replayed from a captured graph; otherwise launches are in the figure."""

    @classmethod
    def of(cls, samples_s: list[float], *, is_graph: bool) -> Timing:
        """Sum up the samples of one contender."""
        middle = statistics.median(samples_s)
        return cls(middle, min(samples_s), max(samples_s), tuple(samples_s), is_graph)


def take_turns(
    passes: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    layers: int,
    rounds: int,
    timer: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every pass once a round, in turn.

    Args:
        passes: A pass of each contender, by name.
        device: Where they run.
        layers: Calls of a pass.
        rounds: Samples of each.
        timer: Seconds, for a CPU; `time.process_time` where others use the machine, too.
    """
    runs = {name: _prepared(run, device) for name, run in passes.items()}
    repeats = {name: _repeats(run, device) for name, (run, _) in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds):
        best = min((min(taken) for taken in samples.values() if taken), default=math.inf)
        for name, (run, _) in runs.items():
            if number >= FEW_ROUNDS and min(samples[name]) > BEATEN * best:
                continue
            taken_s = _once(run, device, timer, repeats=repeats[name])
            samples[name].append(taken_s / layers)
    return {name: Timing.of(samples[name], is_graph=runs[name][1]) for name in passes}


def measure_rates(
    device: torch.device,
    dtype: torch.dtype,
    timer: Callable[[], float] = time.perf_counter,
) -> Rates:
    """Measure how fast the device copies (read and written bytes count) and multiplies."""
    is_cuda = device.type == "cuda"
    size = 2**31 if is_cuda else 2**28
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = _middle(lambda: target.copy_(source), device, timer)
    edge = 8192 if is_cuda else 2048
    left = torch.randn(edge, edge, device=device).to(dtype)
    right = torch.randn(edge, edge, device=device).to(dtype)
    multiplying = _middle(lambda: left @ right, device, timer)
    return Rates(2 * size / copying, 2 * edge**3 / multiplying)


def _middle(run: Callable[[], object], device: torch.device, timer: Callable[[], float]) -> float:
    for _ in range(WARM_UP_PASSES):
        run()
    return statistics.median(_once(run, device, timer) for _ in range(10))


def _repeats(run: Callable[[], object], device: torch.device) -> int:
    """Return how often to run between two events, so that launching the first is nothing."""
    if device.type != "cuda":
        return 1
    return max(1, math.ceil(SAMPLE_S / _once(run, device)))


def _once(
    run: Callable[[], object],
    device: torch.device,
    timer: Callable[[], float] = time.perf_counter,
    *,
    repeats: int = 1,
) -> float:
    """Return the seconds that one call takes on the device."""
    if device.type != "cuda":
        begin = timer()
        for _ in range(repeats):
            run()
        return (timer() - begin) / repeats
    begin_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin_event.record()
    for _ in range(repeats):
        run()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1000 / repeats


def _prepared(run: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], bool]:
    """Warm a pass up and capture it where that is possible."""
    for _ in range(WARM_UP_PASSES if device.type == "cuda" else 1):
        run()
    if device.type != "cuda":
        return run, False
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run, False
    graph.replay()
    return graph.replay, True
