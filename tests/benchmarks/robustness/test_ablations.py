"""Tests of the ablations: each mechanism is missed where the workload needs it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from robustness.ablations import ABLATIONS, LOADS, slowdowns


def test_each_workload_needs_its_mechanism() -> None:
    chain = slowdowns(LOADS["chain summary"], [0])
    assert chain["dependent calls on the server"][0] > 1.3
    coding = slowdowns(LOADS["multi-agent coding, 16 files"], [0])
    assert coding["sharing"][0] > 1.5
    assert set(coding) == set(ABLATIONS)
    assert slowdowns(LOADS["map-reduce summary"], [0])["deduction"][0] > 1.1
    many = slowdowns(LOADS["25 chain summaries at once"], [0])
    assert many["order of programs"][0] > 1.3
