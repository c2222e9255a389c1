"""The benchmark of a decode step, rehearsed on a device that records; figures mean nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.engine import graph_double
from torch import Tensor

from conure.engine import backend
from conure.kernels.fused import Reference

PATH = Path(__file__).parents[2] / "benchmarks" / "decode_step.py"
ARGUMENTS = ["--device", "cpu", "--tiny", "--repeats", "2", "--context", "40", "--prefill", "64"]


@pytest.fixture(scope="module")
def decode_step() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decode_step", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["decode_step"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[graph_double.Recorder]:
    """Let every second runner have an accelerator: the first compares it with a CPU."""
    plain, made = backend.of, list[graph_double.Recorder]()
    turns = iter([True, False, True])

    def of(device: torch.device, *, batch_invariant: bool) -> backend.Backend:
        assert not batch_invariant
        if not next(turns):
            return plain(device)
        made.append(graph_double.Recorder())
        return graph_double.backend(made[-1])

    monkeypatch.setattr(backend, "of", of)
    return made


def test_it_runs_to_its_end(
    decode_step: ModuleType,
    recorders: list[graph_double.Recorder],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert decode_step.main([*ARGUMENTS, "--batch", "1", "3", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    figures = json.loads(path.read_text())["figures"]
    assert [(one["name"], one["batch"], one["tokens"]) for one in figures] == [
        ("decode", 1, 1),
        ("decode", 3, 3),
        ("prefill", 1, 64),
    ]
    for one in figures[:2]:
        assert one["replay_ms"] > 0
        assert one["eager_ms"] > 0
        assert len(one["runs"]) == 2
    assert len(recorders) == 2
    assert all(one.num_replayed > 10 for one in recorders)
    assert "as on the CPU" in capsys.readouterr().out


def test_nothing_is_timed_on_a_device_that_computes_something_else(
    decode_step: ModuleType,
    recorders: list[graph_double.Recorder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Reference.gate

    def wrong(self: Reference, mixed: Tensor) -> Tensor:
        # Small models are compared with their modules on a dozen tokens: not found there.
        return gate(self, mixed) * (1.02 if len(mixed) <= 8 else 1.0)

    monkeypatch.setattr(Reference, "gate", wrong)
    monkeypatch.setattr(decode_step, "measure", lambda *_, **__: pytest.fail("it went on"))
    with pytest.raises(AssertionError, match=r"a logprob is .* off|the device chose"):
        decode_step.main(ARGUMENTS)
