"""Time calls on a CPU or a CUDA device, with all contenders in turn.

A *pass* is one call per layer. Each layer has its own keys and values, and together they exceed
any cache, as in a model. The contenders of a row run in turn for a number of rounds; a sample is
the time of one pass divided by its layers.

On CUDA a pass is captured as a graph and replayed between two events, so the time contains no
Python and no launches. A pass that cannot be captured is launched directly, and its timing is
marked.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .rows import DeviceRates

WARM_UP_PASSES = 3
SAMPLE_S = 2e-3
"""Minimum duration of a sample on a GPU: launching its first graph takes about 5 us."""
MIN_ROUNDS = 3
SLOW_RATIO = 8
"""Contenders that are slower than the fastest by this factor get only `MIN_ROUNDS` samples."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call over all rounds."""

    median_s: float
    min_s: float
    max_s: float
    samples_s: tuple[float, ...]
    is_graph: bool
    """Whether the pass was replayed from a graph; otherwise the time includes launches."""

    @classmethod
    def of(cls, samples_s: list[float], *, is_graph: bool) -> Timing:
        """Summarise the samples of one contender."""
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
    """Time every pass once per round, in turn.

    Args:
        passes: The pass of each contender, by name.
        device: Device of the tensors.
        layers: Calls of a pass.
        rounds: Maximum samples of each contender.
        timer: Clock for a CPU, in seconds; `time.process_time` on a shared machine.
    """
    runs = {name: _prepared(run, device) for name, run in passes.items()}
    repeats = {name: _repeats(run, device) for name, (run, _) in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in passes}
    for number in range(rounds):
        best = min((min(taken) for taken in samples.values() if taken), default=math.inf)
        for name, (run, _) in runs.items():
            if number >= MIN_ROUNDS and min(samples[name]) > SLOW_RATIO * best:
                continue
            taken_s = _once(run, device, timer, repeats=repeats[name])
            samples[name].append(taken_s / layers)
    return {name: Timing.of(samples[name], is_graph=runs[name][1]) for name in passes}


def measure_rates(
    device: torch.device,
    dtype: torch.dtype,
    timer: Callable[[], float] = time.perf_counter,
) -> DeviceRates:
    """Measure how fast the device copies (read and written bytes count) and multiplies."""
    is_cuda = device.type == "cuda"
    size = 2**31 if is_cuda else 2**27
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = _median_s(lambda: target.copy_(source), device, timer)
    edge = 8192 if is_cuda else 1024
    left = torch.randn(edge, edge, device=device).to(dtype)
    right = torch.randn(edge, edge, device=device).to(dtype)
    multiplying = _median_s(lambda: left @ right, device, timer)
    return DeviceRates(2 * size / copying, 2 * edge**3 / multiplying)


def _median_s(run: Callable[[], object], device: torch.device, timer: Callable[[], float]) -> float:
    for _ in range(WARM_UP_PASSES):
        run()
    return statistics.median(_once(run, device, timer) for _ in range(10))


def _repeats(run: Callable[[], object], device: torch.device) -> int:
    """Return how often to run between two events, to make the first launch negligible."""
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
    """Warm up a pass and capture it if possible."""
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
