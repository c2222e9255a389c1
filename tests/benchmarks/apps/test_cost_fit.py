"""Fitting recovers the costs that generated the times, and a plot shows its input."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.cost_fit import GRID, error, fit, predict_seconds
from apps.plot import LABEL, WIDTH, Bar, bars
from apps.scaled_workloads import workload
from simulation.engine import LinearCosts

COST = LinearCosts(
    prompt_s=2e-3, prompt_token_s=1e-4, step_s=4e-3, sequence_s=5e-5, held_token_s=6e-7
)


def test_fit_recovers_costs_from_exact_times() -> None:
    times = [(trial, float(np.dot(COST, trial.terms()))) for trial in GRID]
    assert fit(times) == pytest.approx(COST, rel=1e-6)
    assert error(fit(times), times) < 1e-9


def test_fit_of_noisy_times_reports_error() -> None:
    draw = random.Random(1)
    free = COST._replace(sequence_s=0.0, prompt_s=0.0)
    times = [(trial, float(np.dot(free, trial.terms())) * draw.uniform(0.8, 1.2)) for trial in GRID]
    found = fit(times)
    assert min(found) >= 0
    assert found.step_s == pytest.approx(COST.step_s, rel=0.3)
    assert 0.02 < error(found, times) < 0.2


def test_predictions_differ_only_by_round_trips() -> None:
    sent = workload("chain summary", 1)
    near = {
        whole: predict_seconds(sent, COST, whole=whole, capacity=65_536, round_trip_s=0.0)["app"]
        for whole in (False, True)
    }
    far = {
        whole: predict_seconds(sent, COST, whole=whole, capacity=65_536, round_trip_s=0.5)["app"]
        for whole in (False, True)
    }
    assert near[True] == pytest.approx(near[False])
    assert far[True] == pytest.approx(near[True] + 0.5)
    assert far[False] == pytest.approx(near[False] + 12 * 0.5)


def test_plot_draws_all_rows_to_one_scale() -> None:
    rows = [Bar("a < b", 1.0, 2.0, 4.0), Bar("c", 0.5, 1.0, 1.0, mark=3.0)]
    svg = ElementTree.fromstring(bars("Title & more", rows, mark="predicted"))
    name = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in svg.iter(f"{name}text")]
    assert {"Title & more", "a < b", "c", "2.00", "1.00", "predicted"} <= set(texts)
    _, *drawn = svg.iter(f"{name}rect")
    widths = [float(rect.attrib["width"]) for rect in drawn]
    assert widths == [WIDTH / 2, WIDTH / 4]
    ends = [path.attrib["d"] for path in svg.iter(f"{name}path")]
    assert any(f"H{LABEL + WIDTH}.0" in end for end in ends), "the longest whisker is the scale"
