"""Simulated systems with their own recorded costs reproduce the paper's times."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from apps.workloads import (
    GPTS,
    GPTS_RATE,
    Point,
    gpts_sent,
    highest_rate,
    recorded_coding,
    recorded_shared_prompt,
)
from paper import table

FIGURE_15 = {
    "batch 8, prefix stored once": (8.947, 8.081),
    "batch 8, nothing shared": (14.516, 8.081),
    "batch 16, prefix stored once": (14.072, 10.613),
    "batch 16, nothing shared": (25.257, 10.613),
    "batch 32, prefix stored once": (20.570, 14.218),
    "batch 64, prefix stored once": (34.991, 20.975),
}
"""Mean seconds of a request. Only the first and the third were used for the fit."""
FIGURE_18 = {
    "4 files, latency baseline": (553.5, 187.2),
    "4 files, throughput baseline": (237.4, 187.2),
    "8 files, latency baseline": (962.6, 196.4),
    "8 files, throughput baseline": (311.0, 196.4),
    "12 files, latency baseline": (1_492.0, 207.4),
    "12 files, throughput baseline": (421.8, 207.4),
    "16 files, latency baseline": (2_532.9, 216.4),
    "16 files, throughput baseline": (529.4, 216.4),
    "16 files, latency baseline, second run": (1_902.6, 216.4),
}
"""Seconds of the whole program."""


def test_shared_prompt_reproduces_figure_15() -> None:
    points = {point.label: (point.before, point.after) for point in recorded_shared_prompt(0)}
    assert points.keys() == FIGURE_15.keys()
    for label, seconds in points.items():
        assert seconds == pytest.approx(FIGURE_15[label], rel=0.06)


def test_coding_reproduces_figure_18() -> None:
    points = {point.label: (point.before, point.after) for point in recorded_coding(0)}
    assert points.keys() == FIGURE_18.keys()
    for label, seconds in points.items():
        assert seconds == pytest.approx(FIGURE_18[label], rel=0.06)


def test_applications_send_equal_numbers_of_requests() -> None:
    sent = gpts_sent(0, 4.0)
    systems = Counter(next(iter(plan.lengths)) for plan, _ in sent)
    assert systems == dict.fromkeys(GPTS, 125)
    assert sent[-1][1] / len(sent) == pytest.approx(1 / 4.0, rel=0.1)


def test_highest_rate_is_found_within_4_percent() -> None:
    found = highest_rate(lambda rate: 0.1 if rate <= 7.3 else 0.9)
    assert 7.3 / 1.04 <= found <= 7.3


def test_highest_rate_is_at_most_the_highest_of_the_paper() -> None:
    assert highest_rate(lambda _: 0.1) == GPTS_RATE


def test_unsaturated_rate_is_shown_as_lower_bound() -> None:
    point = Point("fast", math.nan, 2.0, 32.0, is_rate=True, is_least=True)
    *_, line = table([[point, point]])
    assert line.startswith("| fast | 2 | ≥ 32 | ≥ 16.00 | ≥ 16.00 | ≥ 16.00 |")
    *_, line = table([[point, point._replace(is_least=False)]])
    assert "≥" not in line
