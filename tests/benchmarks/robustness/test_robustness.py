"""Tests of the sensitivity table: scenarios, stored results and the tables made of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.programs import logged_coding, single
from apps.scenario import HEAD
from apps.setting import A100_13B
from apps.workloads import Point
from robustness import results as module
from robustness import tables
from robustness.calibration import FIGURE_10, minimise, residual
from robustness.cells import CELLS
from robustness.headlines import HEADLINES, RUNS, SUSTAINED
from robustness.results import Results, SimulationTask, run_all, tasks


def test_cost_model_reproduces_figure_10() -> None:
    assert residual(A100_13B, [5.0]) < 0.02
    assert residual(A100_13B._replace(sequence_s=0.0), [5.0]) > 0.1, "the fit is not arbitrary"
    assert len(FIGURE_10) == 5


def test_minimum_is_found() -> None:
    point, value = minimise(lambda x: (x[0] - 1.7) ** 2 + (x[1] - 0.4) ** 2, (1.0, 1.0))
    assert point == pytest.approx([1.7, 0.4], rel=0.02)
    assert value < 1e-3


def test_scenario_scales_what_it_names() -> None:
    setting = replace(HEAD, capacity=0.5, round_trips=0.0).ours(A100_13B, 0, capacity=4_096)
    assert (setting.capacity, setting.round_trip_s()) == (2_048, 0.0)
    plan = replace(HEAD, lengths=2.0).plan(single("s", 100, 7, 50, 0))
    assert plan.lengths == {"s": 200, "s/0": 14}
    assert plan.blueprint.calls["out"].num_output == 100
    assert HEAD.plan(logged_coding(4)) is logged_coding(4)


def test_scenario_changes_our_system_only() -> None:
    scenario = replace(HEAD, changes={"has_groups": False})
    assert not scenario.ours(A100_13B, 0).has_groups
    assert scenario.baseline(A100_13B, 0).has_groups


def test_headlines_are_points_of_their_runs() -> None:
    cheap = [run for run in RUNS if run not in (*module.COSTLY, SUSTAINED)]
    labels = {(run, point.label) for run in cheap for point in RUNS[run](0, HEAD)}
    assert {(h.run, h.label) for h in HEADLINES if h.run in cheap} <= labels


def test_first_table_runs_before_other_cells() -> None:
    order = tasks()
    assert len(order) == len(set(order))
    last = max(i for i, task in enumerate(order) if task.cell == "first table")
    assert all(task.cell == "first table" for task in order[:last])
    assert {task.cell for task in order} == set(CELLS)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[SimulationTask]:
    """Replace the simulations by two that take no time."""
    found = [SimulationTask("first table", "coding", seed) for seed in range(2)]
    runs = {
        "coding": lambda seed, _: iter([Point("16 files, latency baseline", 11.7, seed + 1, 1)])
    }
    monkeypatch.setattr(module, "tasks", lambda: found)
    monkeypatch.setattr(module, "RUNS", runs)
    return found


def test_results_are_kept_and_continued(tmp_path: Path, few: list[SimulationTask]) -> None:
    results = Results(tmp_path)
    over = iter([False, True])
    assert run_all(results, lambda: next(over)) == 1
    assert run_all(Results(tmp_path), lambda: False) == 0
    assert [results.get(task) for task in few] == [
        [Point("16 files, latency baseline", 11.7, seed + 1, 1)] for seed in range(2)
    ]
    points = results.points("first table", "coding", "16 files, latency baseline")
    assert [point.ratio for point in points] == [1, 2]
    assert results.get(few[0]._replace(cell="capacity x 0.6")) is None, "another scenario"


def test_missed_claims_are_marked(tmp_path: Path, few: list[SimulationTask]) -> None:
    results = Results(tmp_path)
    run_all(results, lambda: False)
    (line,) = [line for line in tables.headlines(results) if line.startswith("| coding, lat")]
    assert line.startswith(
        "| coding, latency baseline | 1.50 | 1.00 to 2.00 | 2 | 11.7 | 7 **missed**"
    )
    (row,) = [line for line in tables.sensitivity(results) if line.startswith("| first table")]
    assert "**1.50**" in row
