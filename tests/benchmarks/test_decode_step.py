"""The decode step benchmark on a device double; the figures are meaningless."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from conure.engine.runner import backend
from conure.kernels.elementwise import ReferenceElementwise
from tests.engine import graph_double

PATH = Path(__file__).parents[2] / "benchmarks" / "decode_step.py"
sys.path.insert(0, str(PATH.parent))
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
    """Give every second runner an accelerator double, which is compared with the CPU."""
    plain, created = backend.create_backend, list[graph_double.Recorder]()
    uses_double = iter([True, False, True])

    def create_backend_double(
        device: torch.device, *, batch_invariant: bool, instructions: str
    ) -> backend.Backend:
        assert not batch_invariant
        assert instructions == "auto"
        if not next(uses_double):
            return plain(device)
        created.append(graph_double.Recorder())
        return graph_double.backend(created[-1])

    monkeypatch.setattr(backend, "create_backend", create_backend_double)
    return created


def test_benchmark_writes_its_figures(
    decode_step: ModuleType,
    recorders: list[graph_double.Recorder],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert decode_step.main([*ARGUMENTS, "--batch", "1", "3", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    figures = json.loads(path.read_text())["figures"]
    assert [(figure["name"], figure["batch"], figure["tokens"]) for figure in figures] == [
        ("decode", 1, 1),
        ("decode", 3, 3),
        ("prefill", 1, 64),
    ]
    for figure in figures[:2]:
        assert figure["replay_ms"] > 0
        assert figure["eager_ms"] > 0
        assert len(figure["runs"]) == 2
    assert len(recorders) == 2
    assert all(recorder.num_replayed > 10 for recorder in recorders)
    assert "as on the CPU" in capsys.readouterr().out


def test_wrong_results_are_not_timed(
    decode_step: ModuleType,
    recorders: list[graph_double.Recorder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = ReferenceElementwise.silu_mul

    def wrong(self: ReferenceElementwise, mixed: Tensor) -> Tensor:
        # The comparison of small models uses a dozen tokens, and does not notice this error.
        return gate(self, mixed) * (1.02 if len(mixed) <= 8 else 1.0)

    monkeypatch.setattr(ReferenceElementwise, "silu_mul", wrong)
    monkeypatch.setattr(
        decode_step, "measure", lambda *_, **__: pytest.fail("measured after a failed check")
    )
    with pytest.raises(AssertionError, match=r"a logprob is .* off|the device chose"):
        decode_step.main(ARGUMENTS)
