"""The operations of a CPU: the C++ kernels, a chosen instruction set, or the reference."""

from __future__ import annotations

import logging

import pytest
import torch

from conure.engine.protocol import EngineError
from conure.engine.runner import backend
from conure.kernels.cpu import library

CPU = torch.device("cpu")


def test_kernels_serve_where_there_is_a_library() -> None:
    made = backend.create_backend(CPU)
    assert made.operations.name == "cpu"
    assert (made.pack is None) == library.has_matrix_unit()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_missing_library_costs_one_warning(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(instructions: library.InstructionSet) -> None:
        raise library.LibraryUnavailableError("no C++ compiler found; install one")

    monkeypatch.setattr(library, "load", load)
    with caplog.at_level(logging.WARNING):
        made = backend.create_backend(CPU, batch_invariant=batch_invariant)
    assert made.operations.name == "reference"
    assert made.pack is None
    (record,) = caplog.records
    assert record.getMessage() == (
        "the CPU kernels are not available, so the engine is slow: "
        "no C++ compiler found; install one"
    )


def test_kernels_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    made = backend.create_backend(CPU, instructions="none")
    assert made.operations.name == "reference"
    assert not caplog.records


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(EngineError, match="cpu_instructions: 'mmx' is not an") as raised:
        backend.create_backend(CPU, instructions="mmx")
    assert raised.value.code == "engine.bad_option"
