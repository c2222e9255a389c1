"""Run the simulations of the page, and keep every result in a folder.

A result is one workload for one seed in one scenario. Its file is named by all three, and by a
digest of the scenario, so that a changed scenario runs again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from apps.scenario import Scenario
from apps.workloads import Point

from .cells import BURSTS, CELLS
from .headlines import RUNS, SUSTAINED

NUM_SEEDS, NUM_CELL_SEEDS, NUM_COSTLY_SEEDS = 20, 10, 3
"""Seeds of the first table, of the other cells, and of their costly runs."""
NUM_SUSTAINED_SEEDS = 5
"""Seeds of the costliest run, which only the first table has."""
NUM_NEXT = 8
"""Simulations among which a process chooses."""
COSTLY = ("background", "GPTs")


class SimulationTask(NamedTuple):
    """One simulation."""

    cell: str
    run: str
    seed: int


def tasks() -> list[SimulationTask]:
    """Return all simulations, in order of importance."""
    found = [
        SimulationTask("first table", run, seed)
        for seed in range(NUM_SEEDS)
        for run in RUNS
        if run != SUSTAINED or seed < NUM_SUSTAINED_SEEDS
    ]
    others = [
        SimulationTask(cell, run, seed)
        for seed in range(NUM_CELL_SEEDS)
        for cell in CELLS
        for run in (("mixed",) if cell in BURSTS else RUNS)
        if cell != "first table" and run != SUSTAINED
        if run not in COSTLY or seed < NUM_COSTLY_SEEDS
    ]
    # A seed of the costly runs takes as long as several of the others.
    return found + sorted(others, key=lambda task: task.seed * (3 if task.run in COSTLY else 1))


class Results:
    """Results in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, task: SimulationTask) -> list[Point] | None:
        """Return the points of a simulation; None if it has not run."""
        path = self._path(task)
        if not path.exists():
            return None
        return msgspec.json.decode(path.read_bytes(), type=list[Point])

    def run(self, task: SimulationTask) -> list[Point]:
        """Return the points of a simulation, and run it if it has not run."""
        found = self.get(task)
        if found is None:
            found = list(RUNS[task.run](task.seed, CELLS[task.cell]))
            path = self._path(task)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(msgspec.json.encode(found))
            partial.replace(path)
        return found

    def points(self, cell: str, run: str, label: str) -> Iterator[Point]:
        """Yield the points of that label over the seeds that have run."""
        for seed in range(NUM_SEEDS):
            for point in self.get(SimulationTask(cell, run, seed)) or ():
                if point.label == label:
                    yield point

    def _path(self, task: SimulationTask) -> Path:
        digest = blake2b(_describe(CELLS[task.cell]).encode(), digest_size=6).hexdigest()
        name = f"{task.run} {task.seed} {digest}".replace(" ", "-")
        return self._folder / f"{name}.json"


def _describe(scenario: Scenario) -> str:
    return repr(scenario)


def run_all(results: Results, is_over: Callable[[], bool]) -> int:
    """Run what has not run until `is_over`; return the number of simulations that are left.

    Several processes may do this at once: each takes one of the next simulations at random, so
    that two rarely run the same one.
    """
    left = [task for task in tasks() if results.get(task) is None]
    while left and not is_over():
        task = left.pop(random.randrange(min(len(left), NUM_NEXT)))
        if results.get(task) is None:
            results.run(task)
    return len(left)
